"""R-Drop: each batch runs twice under different dropout, and the loss adds the divergence of the two predictions.

Source: Liang et al. 2021, section 2, arXiv 2106.14448.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def check_r_drop(model: PreTrainedModel, other_dropout: float = 0.0) -> None:
    """Check that R-Drop can train a model.

    Args:
        model: The model to train.
        other_dropout: Dropout of an adapter beside the model.

    Raises:
        ValueError: If the model's forward does not take `r_drop_alpha`, or all dropout is 0, so that both passes agree.
    """
    if "r_drop_alpha" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"`r_drop_alpha` must come with a Metaphrase model, got a {type(model).__name__}.")
    if not other_dropout and not any(getattr(model.config, name) for name in _DROPOUTS):
        raise ValueError(f"`r_drop_alpha` must come with a model whose {', '.join(_DROPOUTS)} are not all 0.")


def repeat_batch(inputs: Mapping[str, Any], times: int = 2) -> dict[str, Any]:
    """Return a batch with all its rows repeated.

    Args:
        inputs: Tensors (B, ...), with `labels` among them. Plain values, and tensors without a row for each pair such as
            positions (1, T), are not repeated. A packed batch, which has `source_lengths`, is a row (1, tokens) and gets longer.
        times: Number of copies.

    Raises:
        ValueError: If there are no labels, or a value is neither a tensor nor plain.
    """
    if inputs.get("labels") is None:
        raise ValueError(f"`inputs` must hold `labels`, got {', '.join(sorted(inputs))}.")
    batch = inputs["labels"].shape[0]
    is_packed = inputs.get("source_lengths") is not None
    repeated = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and is_packed and value.ndim > 0:
            value = torch.cat([value] * times, dim=min(value.ndim - 1, 1))
        elif isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch:
            value = torch.cat([value] * times)
        elif not isinstance(value, torch.Tensor | bool | int | float | str | None):
            raise ValueError(f"`{name}` must be a tensor or a plain number to be repeated, got {type(value).__name__}.")
        repeated[name] = value
    return repeated
