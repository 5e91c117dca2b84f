"""R-Drop: two passes of one batch under different dropout, and the distance between what they say.

Source: Liang et al. 2021, section 2, arXiv 2106.14448.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def check_r_drop(model: PreTrainedModel, other_dropout: float = 0.0) -> None:
    """Refuses a model that R-Drop cannot train.

    Args:
        model: With its configuration.
        other_dropout: Of what is added to it, such as an adapter.

    Raises:
        ValueError: If it does not take `r_drop_alpha`, or drops nothing, so that both passes always agree.
    """
    if "r_drop_alpha" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"`r_drop_alpha` must come with a Metaphrase model, got a {type(model).__name__}.")
    if not other_dropout and not any(getattr(model.config, name) for name in _DROPOUTS):
        raise ValueError(f"`r_drop_alpha` must come with a model whose {', '.join(_DROPOUTS)} are not all 0.")


def repeat_batch(inputs: Mapping[str, Any], times: int = 2) -> dict[str, Any]:
    """The batch several times over, one copy after the other.

    Args:
        inputs: Tensors `(batch, ...)` with `labels` among them. What is no tensor, or has no row for each of the batch, such as
            positions `(1, length)` that all rows share, stays as it is. With `source_lengths` the batch is packed: one row
            `(1, tokens)`, which becomes longer.
        times: How often.

    Raises:
        ValueError: If there are no labels, or a value hides tensors that would have to be repeated too.
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


class RDropMixin:
    """For a trainer, before its parents: when `r_drop_alpha` is above 0, each batch is passed twice from `r_drop_start_step` on.

    The model's forward must take `r_drop_alpha`, and adds the divergence of both passes to its loss. Both are one call with the
    batch repeated, whose rows draw their dropout apart: a batch takes the memory of two. Evaluation is left alone.
    """

    r_drop_alpha: float = 0.0
    r_drop_start_step: int = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.r_drop_alpha or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if 0 < self.state.max_steps <= self.r_drop_start_step:
            # How many steps an epoch has is known no earlier.
            raise ValueError(
                f"`r_drop_start_step` must be below the {self.state.max_steps} steps of the run, got {self.r_drop_start_step}."
            )
        if self.state.global_step < self.r_drop_start_step:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        twice = None if num_items_in_batch is None else 2 * num_items_in_batch
        inputs = {**repeat_batch(inputs), "r_drop_alpha": self.r_drop_alpha}
        return super().compute_loss(model, inputs, return_outputs, twice)
