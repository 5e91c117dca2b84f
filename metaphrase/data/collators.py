"""Collators: join encoded pairs to padded tensors, or to one packed row on each side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from metaphrase.data.pairs import WEIGHT_COLUMN
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import IGNORED_LABEL, shift_right


def with_decoder_inputs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add `decoder_input_ids` (the labels shifted to the right) to a batch for a model that does not shift labels itself."""
    config, labels = model.config, inputs.get("labels")
    # FSMT builds the decoder input from the sources.
    if config.model_type != "fsmt" or labels is None or "decoder_input_ids" in inputs:
        return dict(inputs)
    return {**inputs, "decoder_input_ids": shift_right(labels, config.pad_token_id, config.decoder_start_token_id)}


def source_of(pair: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the ids of a pair's source, without the padding that an `attention_mask` marks."""
    ids, mask = pair["input_ids"], pair.get("attention_mask")
    return ids if mask is None or all(mask) else [token for token, is_token in zip(ids, mask, strict=True) if is_token]


def weights_of(pairs: Sequence[Mapping[str, Any]], num_fillers: int = 0) -> dict[str, torch.Tensor]:
    """Return the column `weight` `(pairs,)`, in which a pair without one has 1. There is none if all are 1."""
    weights = [1.0 if pair.get(WEIGHT_COLUMN) is None else float(pair[WEIGHT_COLUMN]) for pair in pairs]
    return {WEIGHT_COLUMN: torch.tensor(weights + [1.0] * num_fillers)} if {*weights} - {1.0} else {}


@dataclass
class PairCollator:
    """Collator that pads sources and labels on the right, to the longest of the batch. Labels are padded with -100.

    Widths are rounded up to `pad_to_multiple_of`, for tensor cores.
    """

    pad_token_id: int
    pad_to_multiple_of: int = 1

    def __call__(self, pairs: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Join pairs to `input_ids`, `attention_mask` and `labels`, `(batch, length)` each, and `weight` (see `weights_of`).

        An `attention_mask` marks the padding of pairs that are padded already.
        """
        sources = [source_of(pair) for pair in pairs]
        masks = [[1] * len(source) for source in sources]
        columns: dict[str, tuple[list, int]] = {"input_ids": (sources, self.pad_token_id), "attention_mask": (masks, 0)}
        if "labels" in pairs[0]:
            columns["labels"] = [pair["labels"] for pair in pairs], IGNORED_LABEL
        batch = weights_of(pairs)
        for name, (rows, padding) in columns.items():
            width = -(-max(map(len, rows)) // self.pad_to_multiple_of) * self.pad_to_multiple_of
            batch[name] = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.long)
        return batch


@dataclass
class PackedCollator:
    """Collator that packs all sources of a batch into one row, and all targets into another, longest sources first.

    The network computes the same as for padded pairs. The lengths mark where each pair begins.

    Short pairs of padding fill up the tokens of a row to `pad_to_multiple_of`. A CPU compiles bfloat16 kernels for each shape:
    few shapes save time and memory.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int = 1

    def __call__(self, pairs: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor | int]:
        """Join pairs, read as by `PairCollator`, to rows.

        Returns:
            `input_ids` `(1, source tokens)`, `labels` `(1, target tokens)`, `source_lengths` and `target_lengths` `(pairs,)`,
            and the largest of each as `longest_source` and `longest_target`; also `weight` (see `weights_of`).
        """
        pairs = sorted(pairs, key=lambda pair: (len(source_of(pair)), len(pair["labels"])), reverse=True)
        sides = [(source_of(pair), pair["labels"]) for pair in pairs]
        lengths = [[len(row) for row in rows] for rows in zip(*sides, strict=True)]
        if min(map(min, lengths)) == 0:
            raise MetaphraseError("Both sides of a pair must hold at least one token to be packed, got an empty one.")
        longest = [max(side) for side in lengths]
        missing, num_fillers = [-sum(side) % self.pad_to_multiple_of for side in lengths], 0
        # Both rows have equally many fillers. None is empty, or longer than the longest pair, because positions may end there.
        while any(missing) and min(missing) < (
            num_fillers := max(math.ceil(count / limit) for count, limit in zip(missing, longest, strict=True))
        ):
            missing = [count if count >= num_fillers else count + self.pad_to_multiple_of for count in missing]
        batch = {"longest_source": longest[0], "longest_target": longest[1], **weights_of(pairs, num_fillers)}
        names = (("input_ids", "source_lengths", self.pad_token_id), ("labels", "target_lengths", IGNORED_LABEL))
        for (ids, sizes, pad), rows, side, count in zip(names, zip(*sides, strict=True), lengths, missing, strict=True):
            fillers = [count // num_fillers + (number < count % num_fillers) for number in range(num_fillers)]
            batch[ids] = torch.tensor([[*chain.from_iterable(rows), *[pad] * count]])
            batch[sizes] = torch.tensor(side + fillers)
        return batch
