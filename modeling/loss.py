"""Decoder inputs from labels, and the loss from logits."""

import torch
from torch import nn

IGNORED_LABEL = -100


def shift_right(
    labels: torch.Tensor,
    pad_token_id: int | None,
    decoder_start_token_id: int | None,
    target_lengths: torch.Tensor | None = None,
    start_from_labels: bool = False,
) -> torch.Tensor:
    """Make the decoder's input `(batch, target)` from labels: the start token, then all labels but the last.

    Args:
        labels: Ids `(batch, target)`, -100 at positions without a label.
        pad_token_id: Replaces -100.
        target_lengths: Tokens of each target in a packed row, `(targets)`. Each target gets a start token.
        start_from_labels: True to start with the last label of a target instead. This is a language code in mBART (Liu et al.
            2020, section 2.2, arXiv 2001.08210).
    """
    if pad_token_id is None or (decoder_start_token_id is None and not start_from_labels):
        raise ValueError("`pad_token_id` and `decoder_start_token_id` must be set in the configuration, got None.")
    if target_lengths is None:
        # A batch is read like a packed row, whose targets have one length.
        target_lengths = torch.full_like(labels[:, 0], labels.shape[1])
    packed = labels.flatten()
    starts = target_lengths.cumsum(0) - target_lengths
    shifted = packed.roll(1)
    if start_from_labels:
        # The index of the last label of each target, or of the first id of a target without labels.
        indices = torch.arange(len(packed), device=labels.device)
        is_label = (packed != IGNORED_LABEL) & (packed != pad_token_id)
        targets = torch.arange(len(starts), device=labels.device)
        targets = targets.repeat_interleave(target_lengths, output_size=len(packed))
        lasts = torch.where(is_label, indices, starts[targets])
        shifted[starts] = packed[starts.scatter_reduce(0, targets, lasts, "amax")]
    else:
        shifted[starts] = decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORED_LABEL, pad_token_id).view_as(labels)


def sequence_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
    label_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean cross-entropy of the labels, a scalar in float32, 0 without labels.

    Args:
        logits: `(batch, target, vocab)`.
        labels: Ids `(batch, target)`, -100 at positions without a label.
        num_items_in_batch: Number of labels in all batches of an optimizer step. Dividing by this number makes the losses of
            accumulated batches add up to the loss of one large batch. None divides by the labels of this batch.
        label_smoothing: Probability to spread over the vocabulary, in [0, 1) (Szegedy et al. 2016, section 7, arXiv 1512.00567).
        label_weights: Factors of the cross-entropies, `(batch, target)`. The divisor stays the number of labels.
    """
    labels = labels.to(logits.device)
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum" if label_weights is None else "none",
        label_smoothing=label_smoothing,
    )
    total = losses if label_weights is None else (losses * label_weights.flatten().to(losses.device)).sum()
    return total / num_items(labels, num_items_in_batch, total.device)


def num_items(
    labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None, device: torch.device
) -> torch.Tensor | int:
    """Return the divisor of a summed loss, at least 1: `num_items_in_batch`, or else the number of labels."""
    count = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    return count.to(device).clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
