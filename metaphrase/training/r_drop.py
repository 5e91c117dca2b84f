"""R-Drop: the batch with all its rows twice, the divergence of its halves, and the check of the model.

Source: Liang et al. 2021, section 2, arXiv 2106.14448.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.modeling import IGNORED_LABEL
from metaphrase.training.adapters import is_adapted

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def smooths_labels(model: PreTrainedModel) -> bool:
    """Return True if the model lets `TrainingLoss` compute the loss, as Metaphrase models do."""
    base = model.get_base_model() if is_adapted(model) else model
    return "loss_of_states" in inspect.signature(base.forward).parameters


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


def check_halves(labels: torch.Tensor) -> None:
    """Check that the second half of the labels `(labels,)` equals the first half.

    On an accelerator only the number is checked, since values would have to wait.
    """
    half = labels.shape[0] // 2
    is_even = labels.shape[0] == 2 * half
    if not is_even or (labels.device.type == "cpu" and not torch.equal(labels[:half], labels[half:])):
        raise ValueError("With `r_drop_alpha`, the second half of a batch must be the first again, got other labels.")


def divergence_of_halves(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return half the sum of both Kullback-Leibler divergences of two predictions, summed over the labels, in float32.

    The predictions are the halves of logits `(labels, vocab)`, with equal halves of labels `(labels,)`. -100 is no label.

    Source: Liang et al. 2021, equation 2, arXiv 2106.14448.
    """
    check_halves(labels)
    is_label = (labels != IGNORED_LABEL).to(logits.device)[:, None]
    # Ignored rows become zeros, since infinite logits would give NaN even with a weight of 0.
    first, second = nn.functional.log_softmax(torch.where(is_label, logits, 0.0).float(), dim=-1).chunk(2)
    # KL(p, q) + KL(q, p) is the sum of (p - q)(log p - log q).
    return 0.5 * ((first.exp() - second.exp()) * (first - second)).sum()
