"""Batches of sources or pairs of similar length."""

import math
from collections.abc import Sequence


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Group sources of similar length, longest first, so that a batch that does not fit into memory fails at once.

    Args:
        lengths: Tokens of each source.
        batch_size: Most sources in a batch.
        max_tokens_per_batch: Most tokens in a batch, padding counted. A longer source has a separate batch.

    Returns:
        The indices of the sources of each batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # A source alone counts as a pair with an empty target.
    return cut_into_batches(longest_first, [(lengths[i], 0) for i in longest_first], max_tokens_per_batch, batch_size)


def cut_into_batches(
    order: Sequence[int],
    lengths: Sequence[Sequence[int]],
    max_tokens_per_batch: int,
    batch_size: float = math.inf,
) -> list[list[int]]:
    """Cut an order of pairs into consecutive batches, each as large as the bounds allow.

    Args:
        order: Indices of pairs.
        lengths: Tokens of source and target of each of them.
        max_tokens_per_batch: Most tokens of both sides of a batch, padding counted. A longer pair has a separate batch.
        batch_size: Most pairs in a batch.
    """
    batches: list[list[int]] = []
    longest_source = longest_target = 0
    for index, (source, target) in zip(order, lengths, strict=True):
        longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        width = longest_source + longest_target
        if batches and len(batches[-1]) < batch_size and (len(batches[-1]) + 1) * width <= max_tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest_source, longest_target = source, target
    return batches
