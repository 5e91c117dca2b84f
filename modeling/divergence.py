"""How far two predictions of the same labels are from each other: what R-Drop adds to the loss.

Source: Liang et al. 2021, section 2, arXiv 2106.14448.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .teacher_forcing import IGNORED_LABEL

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
