"""Batching: which pairs share a batch, and encoded pairs to padded tensors.

PackedCollator: encoded pairs to one packed row on each side, with no padding between them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedModel

from metaphrase.modeling import IGNORED_LABEL, shift_right

# Families whose own class makes what the decoder reads of the sources, where it is given labels alone.
_NOT_SHIFTING = ("fsmt",)


def with_decoder_inputs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch with `decoder_input_ids`, the labels shifted to the right, for a model that does not shift them by itself.

    Args:
        model: Any encoder-decoder; for most the batch stays as it is.
        inputs: With `labels`, `(batch, target)`.

    Raises:
        ValueError: If the model has no start token.
    """
    config, labels = model.config, inputs.get("labels")
    if config.model_type not in _NOT_SHIFTING or labels is None or "decoder_input_ids" in inputs:
        return dict(inputs)
    shifted = shift_right(labels, config.pad_token_id, config.decoder_start_token_id)
    return {**inputs, "decoder_input_ids": shifted}


def source_of(pair: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """The ids of a pair's source, without what its `attention_mask`, if it has one, hides: it may have been padded already."""
    ids, mask = pair["input_ids"], pair.get("attention_mask")
    return ids if mask is None or all(mask) else [token for token, is_seen in zip(ids, mask, strict=True) if is_seen]


class PairCollator:
    """Pads sources and labels on the right, to the longest of the batch.

    Source and target may have tokenizers of their own, so it needs no tokenizer, only the id that pads the source. Labels are
    padded with -100; the model makes the decoder's input from them.
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int = 1):
        """Args:
        pad_token_id: Pads `input_ids`.
        pad_to_multiple_of: Widths are rounded up to a multiple of it, for tensor cores.

        Raises:
            ValueError: If the multiple is below 1.
        """
        if pad_to_multiple_of < 1:
            raise ValueError(f"`pad_to_multiple_of` must be at least 1, got {pad_to_multiple_of}.")
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, pairs: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Joins pairs with `input_ids` and `labels` to `input_ids`, `attention_mask`, `labels`, `(batch, length)` each.

        Pairs that were padded already have an `attention_mask`, by which they are read.
        """
        sources = [source_of(pair) for pair in pairs]
        batch = {
            "input_ids": self._pad(sources, self.pad_token_id),
            "attention_mask": self._pad([[1] * len(source) for source in sources], 0),
        }
        if "labels" in pairs[0]:
            batch["labels"] = self._pad([pair["labels"] for pair in pairs], IGNORED_LABEL)
        return batch

    def _pad(self, rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        longest = max(len(row) for row in rows)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows], dtype=torch.long)


class LengthGroupedSampler(Sampler[int]):
    """Indices in an order whose consecutive batches hold pairs of like length, the batches themselves in random order.

    Pairs are shuffled, sorted by length inside windows of many batches, cut into batches, and the batches are shuffled: little is
    padded, and no stretch of training sees only long or only short pairs. The order depends on the seed and the epoch alone.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, batches_per_window: int = 50):
        """Args:
        lengths: Of each pair, in tokens.
        batch_size: Of the loader that reads this order.
        seed: Of the order.
        batches_per_window: More pad less, fewer mix more.
        """
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.window = batch_size * batches_per_window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch; accelerate's loaders call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        batches = []
        for start in range(0, len(shuffled), self.window):
            window = sorted(shuffled[start : start + self.window], key=lambda index: -self.lengths[index])
            batches += [window[place : place + self.batch_size] for place in range(0, len(window), self.batch_size)]
        # The loader cuts the order every `batch_size` indices, so only the last batch may be smaller.
        full = [batch for batch in batches if len(batch) == self.batch_size]
        rest = [batch for batch in batches if len(batch) < self.batch_size]
        order = torch.randperm(len(full), generator=generator).tolist()
        for batch in [full[place] for place in order] + rest:
            yield from batch


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
