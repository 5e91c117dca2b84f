"""PackedCollator: encoded pairs to one packed row on each side, with no padding between them."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from metaphrase.modeling import IGNORED_LABEL
from metaphrase.training.batching import source_of


class PackedCollator:
    """Puts all sources of a batch one after the other in one row, and all targets in another, the longest sources first.

    What the network computes of the pairs is what it would compute of padded ones. The lengths tell it where each pair lies.
    """

    def __init__(self, pad_token_id: int = 0, pad_to_multiple_of: int = 1):
        """Args:
        pad_token_id: What rows are filled up with.
        pad_to_multiple_of: The tokens of a row, which are filled up by short pairs of padding, without labels. A CPU compiles its
            bfloat16 kernels for each shape that it meets; few shapes save that time, and the memory that the kernels take.
        """
        self.pad_token_id, self.pad_to_multiple_of = pad_token_id, pad_to_multiple_of

    def __call__(self, pairs: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor | int]:
        """Joins pairs with `input_ids` and `labels`, read as by `PairCollator`, to `(1, source tokens)` and `(1, target tokens)`.

        Returns:
            `input_ids`, `labels`, `source_lengths` and `target_lengths` `(pairs)`, and the largest of each.

        Raises:
            ValueError: If a side of a pair is empty.
        """
        sides = [(source_of(pair), pair["labels"]) for pair in pairs]
        sides.sort(key=lambda sides: (len(sides[0]), len(sides[1])), reverse=True)
        sources, targets = map(list, zip(*sides, strict=True))
        lengths = [[len(row) for row in rows] for rows in (sources, targets)]
        if min(map(min, lengths)) == 0:
            raise ValueError("Both sides of a pair must hold at least one token to be packed, got an empty one.")
        longest = [max(side) for side in lengths]
        for rows, side, fillers, value in zip(
            (sources, targets),
            lengths,
            filler_lengths([sum(side) for side in lengths], longest, self.pad_to_multiple_of),
            (self.pad_token_id, IGNORED_LABEL),
            strict=True,
        ):
            rows += [[value] * filler for filler in fillers]
            side += fillers
        return {
            "input_ids": torch.tensor([list(chain.from_iterable(sources))]),
            "labels": torch.tensor([list(chain.from_iterable(targets))]),
            "source_lengths": torch.tensor(lengths[0]),
            "target_lengths": torch.tensor(lengths[1]),
            "longest_source": longest[0],
            "longest_target": longest[1],
        }


def filler_lengths(tokens: Sequence[int], longest: Sequence[int], multiple: int) -> list[list[int]]:
    """Lengths of the pairs that fill two rows up.

    Args:
        tokens: Of each row.
        longest: No filler of a row is longer, since positions may end there.
        multiple: What the tokens of each row shall be a multiple of.

    Returns:
        As many lengths for each row, all of at least 1; none if both rows are full.
    """
    missing = [-count % multiple for count in tokens]
    if not any(missing):
        return [[] for _ in tokens]
    while min(missing) < (
        fillers := max(math.ceil(count / limit) for count, limit in zip(missing, longest, strict=True))
    ):
        missing = [count if count >= fillers else count + multiple for count in missing]
    return [[count // fillers + (number < count % fillers) for number in range(fillers)] for count in missing]
