"""Loss of training: with label smoothing and R-Drop, and in chunks if `metaphrase.ops` is there."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.data.pairs import WEIGHT_COLUMN
from metaphrase.modeling import IGNORED_LABEL, MetaphraseForConditionalGeneration, sequence_loss
from metaphrase.modeling.loss import num_items
from metaphrase.plugins import plugin
from metaphrase.training.distributed import is_adapted


@dataclass(frozen=True)
class TrainingLoss:
    """Loss for the argument `loss_of_states` of a Metaphrase model.

    Attributes:
        smoothing: Probability to spread over the vocabulary.
        r_drop_alpha: Weight of the divergence of R-Drop, for a batch with two equal halves. The loss is
            (CE(p) + CE(q)) / 2 + alpha / 2 * (KL(p, q) + KL(q, p)) / 2. This is half of equation 4 of Liang et al. 2021,
            arXiv 2106.14448, to compare with a loss without R-Drop.
    """

    smoothing: float = 0.0
    r_drop_alpha: float = 0.0

    def __call__(
        self,
        model: MetaphraseForConditionalGeneration,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None,
        label_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean loss of the labels `(batch, target)`, from the decoder's output `(batch, target, hidden)`.

        The loss of each label counts `label_weights` times `(batch, target)`, and the number of labels divides the sum.
        """
        divisor = num_items(labels, num_items_in_batch, hidden_states.device)
        # A compiler fuses the plain loss.
        projected_loss = None if torch.compiler.is_compiling() else plugin("projected_loss")
        if projected_loss is not None and model.config.final_logit_softcapping is None:
            states = model.transform(hidden_states)
            options = self.smoothing, self.r_drop_alpha, divisor, label_weights
            loss = projected_loss(model.lm_head, states, labels, *options)
            if loss is not None:
                return loss
        logits = model.project(hidden_states)
        loss = sequence_loss(logits, labels, num_items_in_batch, self.smoothing, label_weights)
        if self.r_drop_alpha:
            divergence = divergence_of_halves(logits.flatten(0, 1), labels.flatten(), label_weights)
            loss = loss + self.r_drop_alpha * divergence / divisor
        return loss


def divergence_of_halves(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return half the sum of both Kullback-Leibler divergences of two predictions, summed over the labels, in float32.

    The predictions are the halves of logits `(labels, vocab)`, with equal halves of labels `(labels,)` and of their weights.
    -100 is no label.

    Source: Liang et al. 2021, equation 2, arXiv 2106.14448.
    """
    is_label = (labels != IGNORED_LABEL).to(logits.device)[:, None]
    # Ignored rows become zeros, since infinite logits would give NaN even with a weight of 0.
    first, second = nn.functional.log_softmax(torch.where(is_label, logits, 0.0).float(), dim=-1).chunk(2)
    # KL(p, q) + KL(q, p) is the sum of (p - q)(log p - log q).
    divergences = (first.exp() - second.exp()) * (first - second)
    if weights is not None:
        divergences = divergences * weights.flatten()[: len(divergences), None]
    return 0.5 * divergences.sum()


# R-Drop (Liang et al. 2021, section 2, arXiv 2106.14448)


def smooths_labels(model: PreTrainedModel) -> bool:
    """Return True if the model lets `TrainingLoss` compute the loss, as Metaphrase models do."""
    base = model.get_base_model() if is_adapted(model) else model
    return "loss_of_states" in inspect.signature(base.forward).parameters


def weights_of_labels(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the `weight` of each pair `(pairs,)` for each of its labels, shaped as `labels`; None without weights."""
    labels, weights = batch["labels"], batch.get(WEIGHT_COLUMN)
    lengths = batch.get("target_lengths", labels.shape[1])
    return None if weights is None else weights.repeat_interleave(lengths, output_size=labels.numel()).view_as(labels)


def repeat_batch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of tensors (B, ...), with `labels` among them, with all its rows twice.

    Plain values, and tensors without a row for each pair such as positions (1, T), are not repeated. A packed batch, which has
    `source_lengths`, is a row (1, tokens) and gets longer.
    """
    num_rows, is_packed = len(inputs["labels"]), inputs.get("source_lengths") is not None
    repeated = {}
    for name, value in inputs.items():
        is_batch = isinstance(value, torch.Tensor) and value.ndim > 0
        if is_batch and (is_packed or len(value) == num_rows):
            value = torch.cat([value, value], dim=min(value.ndim - 1, 1) if is_packed else 0)
        repeated[name] = value
    return repeated
