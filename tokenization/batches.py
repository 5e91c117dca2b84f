"""Batches of sources or pairs of similar length."""

import math
from collections.abc import Sequence


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Return batches of the indices of sources of similar length, longest first.

    A batch that does not fit into memory fails at once. A source of more than `max_tokens_per_batch` has a separate batch.
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

    `lengths` are those of source and target in that order. The tokens of a batch count padding, on both sides. A longer pair has
    a separate batch.
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
