"""Batching: encoded pairs to padded tensors."""

from collections.abc import Mapping, Sequence

import torch

from metaphrase.modeling import IGNORED_LABEL


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
        """Joins pairs with `input_ids` and `labels` to `input_ids`, `attention_mask`, `labels`, `(batch, length)` each."""
        sources = [pair["input_ids"] for pair in pairs]
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
