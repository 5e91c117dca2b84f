"""Batching: which pairs share a batch, and encoded pairs to padded tensors."""

from collections.abc import Iterator, Mapping, Sequence

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
