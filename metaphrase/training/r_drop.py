"""R-Drop: the batch with all its rows twice, and the check of the model.

Source: Liang et al. 2021, section 2, arXiv 2106.14448.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from metaphrase.training.adapters import is_adapted

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def smooths_labels(model: PreTrainedModel) -> bool:
    """True if the model's own loss smooths labels, as the loss of Metaphrase models does."""
    base = model.get_base_model() if is_adapted(model) else model
    return "smoothing" in inspect.signature(base.forward).parameters


def check_r_drop(model: PreTrainedModel, other_dropout: float) -> None:
    """Check that R-Drop can train a model.

    Args:
        model: The model to train.
        other_dropout: Dropout of an adapter beside the model.

    Raises:
        ValueError: If it is no Metaphrase model, or all dropout is 0, so that both passes agree.
    """
    if not smooths_labels(model):
        raise ValueError(f"`r_drop_alpha` must come with a Metaphrase model, got a {type(model).__name__}.")
    if not other_dropout and not any(getattr(model.config, name) for name in _DROPOUTS):
        raise ValueError(f"`r_drop_alpha` must come with a model whose {', '.join(_DROPOUTS)} are not all 0.")


def repeat_batch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with all its rows twice.

    Args:
        inputs: Tensors (B, ...), with `labels` among them. Plain values, and tensors without a row for each pair such as
            positions (1, T), are not repeated. A packed batch, which has `source_lengths`, is a row (1, tokens) and gets longer.
    """
    num_rows, is_packed = len(inputs["labels"]), inputs.get("source_lengths") is not None
    repeated = {}
    for name, value in inputs.items():
        is_batch = isinstance(value, torch.Tensor) and value.ndim > 0
        if is_batch and (is_packed or len(value) == num_rows):
            value = torch.cat([value, value], dim=min(value.ndim - 1, 1) if is_packed else 0)
        repeated[name] = value
    return repeated
