"""Batches of texts of like length, which cost little padding."""

from collections.abc import Sequence

DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Groups indices of like length, longest first, so that a batch that does not fit fails at once.

    Args:
        lengths: Tokens of each source.
        batch_size: Most sources in a batch.
        max_tokens_per_batch: Most tokens in a batch, padding counted; a longer source has a batch of its own.

    Returns:
        Lists of indices; each index stands in exactly one.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        batch = batches[-1] if batches else None
        # Sorted from the longest on, the first of a batch says how wide it is.
        if (
            batch is not None
            and len(batch) < batch_size
            and (len(batch) + 1) * lengths[batch[0]] <= max_tokens_per_batch
        ):
            batch.append(index)
        else:
            batches.append([index])
    return batches
