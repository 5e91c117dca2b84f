"""Teacher forcing: what the decoder reads for given labels, and the loss of what it says.

Every part that shifts labels or counts them goes through this file.

How far two predictions of the same labels are from each other: what R-Drop adds to the loss.

Source: Liang et al. 2021, section 2, arXiv 2106.14448.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .packing import check_lengths

IGNORED_LABEL = -100


def shift_right(
    labels: torch.Tensor,
    pad_token_id: int | None,
    decoder_start_token_id: int | None,
    target_lengths: torch.Tensor | None = None,
    start_from_labels: bool = False,
) -> torch.Tensor:
    """The decoder's input for given labels: one start token, then all labels but the last.

    Args:
        labels: Ids `(batch, target)`; -100 marks what is no label.
        pad_token_id: Stands where a label is -100.
        decoder_start_token_id: Stands first.
        target_lengths: For packed rows, the tokens of each target in the one row, `(targets)`; each starts anew.
        start_from_labels: The last label of a row stands first, instead of the one start token: a language code, as in mBART
            (Liu et al. 2020, section 2.2, arXiv 2001.08210).

    Returns:
        Ids `(batch, target)`.

    Raises:
        ValueError: If an id that is needed is not configured, or the lengths do not fit the row.
    """
    if target_lengths is not None:
        check_lengths(target_lengths, labels.shape[1])
    for field, value in (("decoder_start_token_id", decoder_start_token_id), ("pad_token_id", pad_token_id)):
        is_needed = field == "pad_token_id" or not start_from_labels
        if value is None and is_needed:
            raise ValueError(f"`{field}` must be set in the configuration to shift labels to the right, got None.")
    if start_from_labels:
        starts = _last_labels(labels, pad_token_id, target_lengths)
    else:
        starts = labels.new_full(
            labels.shape[:1] if target_lengths is None else target_lengths.shape, decoder_start_token_id
        )
    shifted = labels.roll(1, dims=1)
    if target_lengths is None:
        shifted[:, 0] = starts
    else:
        shifted[0, target_lengths.cumsum(0) - target_lengths] = starts
    return shifted.masked_fill(shifted == IGNORED_LABEL, pad_token_id)


def _last_labels(labels: torch.Tensor, pad_token_id: int, target_lengths: torch.Tensor | None) -> torch.Tensor:
    """The last label of each row, or of each target of a packed one; where there is none, what stands first."""
    is_label = (labels != IGNORED_LABEL) & (labels != pad_token_id)
    places = torch.arange(labels.shape[1], device=labels.device)
    if target_lengths is None:
        return labels.gather(1, (places * is_label).argmax(dim=1, keepdim=True))[:, 0]
    starts = target_lengths.cumsum(0) - target_lengths
    start_of_each = starts.repeat_interleave(target_lengths, output_size=labels.shape[1])
    numbers = torch.arange(len(starts), device=labels.device)
    numbers = numbers.repeat_interleave(target_lengths, output_size=labels.shape[1])
    last = starts.scatter_reduce(0, numbers, torch.where(is_label[0], places, start_of_each), "amax")
    return labels[0, last]


def sequence_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy per label, in float32.

    Label smoothing takes the given share of the target's probability and spreads it over the whole vocabulary (Szegedy et al.
    2016, section 7, arXiv 1512.00567).

    Args:
        logits: `(batch, target, vocab)`.
        labels: Ids `(batch, target)`, -100 where there is none.
        num_items_in_batch: Labels in all the batches that make up one optimizer step. Divided by it, the losses of
            accumulated batches add up to the loss of one large batch. `None` divides by the labels of this batch.
        label_smoothing: Probability to spread, in [0, 1).

    Returns:
        The loss, a scalar; 0 if there is no label.
    """
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return loss_per_item(total, labels, num_items_in_batch)


def loss_per_item(
    total: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """Divides a summed loss by the labels of the optimizer step, or else of the batch. For the arguments see `sequence_loss`."""
    return total / num_items(labels, num_items_in_batch, total.device)


def num_items(
    labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None, device: torch.device
) -> torch.Tensor | int:
    """What a summed loss is divided by: the labels of the optimizer step, or else of the batch, as `sequence_loss` has them."""
    if num_items_in_batch is None:
        return (labels != IGNORED_LABEL).sum().clamp(min=1).to(device)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(device).clamp(min=1)
    return max(num_items_in_batch, 1)


DEFAULT_LABELS_PER_CHUNK = 512


def check_halves(labels: torch.Tensor) -> None:
    """Refuses labels `(labels)` whose second half is not the first again.

    Raises:
        ValueError: If so; on an accelerator, which would have to be waited for, only their number is looked at.
    """
    half = labels.shape[0] // 2
    is_even = labels.shape[0] == 2 * half
    if not is_even or (labels.device.type == "cpu" and not torch.equal(labels[:half], labels[half:])):
        raise ValueError("With `r_drop_alpha`, the second half of a batch must be the first again, got other labels.")


def symmetric_divergence(
    first_logits: torch.Tensor,
    second_logits: torch.Tensor,
    labels: torch.Tensor,
    labels_per_chunk: int = DEFAULT_LABELS_PER_CHUNK,
) -> torch.Tensor:
    """Half the sum of both Kullback-Leibler divergences of two predictions, summed over the labels, in float32.

    A chunk's distributions are forgotten after the forward pass and made again for the backward pass: beside the logits and
    their gradients only one chunk of the vocabulary's width is ever in memory.

    Source: Liang et al. 2021, equation 2, arXiv 2106.14448.

    Args:
        first_logits: `(labels, vocab)`.
        second_logits: `(labels, vocab)`.
        labels: `(labels,)`; where one is -100, the predictions do not count.
        labels_per_chunk: Rows that are looked at at once.

    Returns:
        The sum in nats, a scalar; gradients reach both predictions.

    Raises:
        ValueError: If shapes do not agree, or a chunk would be empty.
    """
    if first_logits.ndim != 2 or first_logits.shape != second_logits.shape or labels.shape != first_logits.shape[:1]:
        raise ValueError(
            "`first_logits` and `second_logits` must be (labels, vocab) and `labels` (labels,), "
            f"got {tuple(first_logits.shape)}, {tuple(second_logits.shape)} and {tuple(labels.shape)}."
        )
    if labels_per_chunk < 1:
        raise ValueError(f"`labels_per_chunk` must be at least 1, got {labels_per_chunk}.")
    total = torch.zeros((), dtype=torch.float32, device=first_logits.device)
    kept = (labels != IGNORED_LABEL).to(first_logits.device)
    chunks = (tensor.split(labels_per_chunk) for tensor in (first_logits, second_logits, kept))
    for chunk in zip(*chunks, strict=True):
        # Nothing here is random: the generators need not be put back for the second time.
        total = total + checkpoint(_divergence, *chunk, use_reentrant=False, preserve_rng_state=False)
    return total


def divergence_of_halves(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`symmetric_divergence` of the first half of logits `(labels, vocab)` from the second, with `labels` `(labels)` of both."""
    check_halves(labels)
    first, second = logits.chunk(2)
    return symmetric_divergence(first, second, labels[: len(first)])


def _divergence(first_logits: torch.Tensor, second_logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`symmetric_divergence` of one chunk, where `kept` says which rows count."""
    # Zeros in a row that does not count: what stands there, finite or not, has no say and no gradient.
    first, second = (
        nn.functional.log_softmax(torch.where(kept[:, None], logits, 0.0).float(), dim=-1)
        for logits in (first_logits, second_logits)
    )
    # KL(p, q) + KL(q, p) is the sum of (p - q)(log p - log q).
    return 0.5 * ((first.exp() - second.exp()) * (first - second)).sum()
