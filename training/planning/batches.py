"""The batch estimate: which batches an epoch will have, and what of each decides its cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import TrainingArguments

from metaphrase.data.pairs import data_seed
from metaphrase.data.token_budget import LengthGroupedSampler, TokenBudgetSampler
from metaphrase.modeling.packing import grid_width


@dataclass(frozen=True)
class BatchShape:
    """What of a batch decides its cost.

    Attributes:
        pairs: Number of pairs.
        source_tokens: Cells that the encoder computes: with padding, `pairs` times the longest source.
        target_tokens: Likewise for the decoder.
        longest_source: Tokens of the longest source.
        longest_target: Tokens of the longest target.
        source_scores: What one head of the encoder computes, one for each two tokens of a source.
        target_scores: Likewise of a target.
        cross_scores: Likewise one for each token of a target and each of its source.
        is_packed: Whether all pairs lie in one row without padding.
    """

    pairs: int
    source_tokens: int
    target_tokens: int
    longest_source: int
    longest_target: int
    source_scores: int
    target_scores: int
    cross_scores: int
    is_packed: bool

    @classmethod
    def of(cls, source_lengths, target_lengths, is_packed: bool) -> "BatchShape":
        """The shape of the batch of these pairs, by the lengths of their sides in tokens."""
        longest = int(max(source_lengths)), int(max(target_lengths))
        if not is_packed:
            return cls._padded(len(source_lengths), *longest)
        tokens = int(sum(source_lengths)), int(sum(target_lengths))
        # Sequences that are computed together have a grid of one width, so that these are the fewest there can be.
        source, target = (
            np.array([grid_width(int(length)) for length in side]) for side in (source_lengths, target_lengths)
        )
        scores = (int(queries @ keys) for queries, keys in ((source, source), (target, target), (target, source)))
        return cls(len(source_lengths), *tokens, *longest, *scores, is_packed=True)

    @classmethod
    def _padded(cls, pairs: int, source: int, target: int) -> "BatchShape":
        tokens = pairs * source, pairs * target
        scores = pairs * source**2, pairs * target**2, pairs * target * source
        return cls(pairs, *tokens, source, target, *scores, is_packed=False)

    @classmethod
    def of_tensors(cls, batch: Mapping[str, torch.Tensor]) -> "BatchShape":
        """The shape of a batch as a collator makes it, padded or packed."""
        if "source_lengths" in batch:
            return cls.of(batch["source_lengths"].tolist(), batch["target_lengths"].tolist(), is_packed=True)
        return cls._padded(*batch["input_ids"].shape, batch["labels"].shape[1])

    def repeated(self, times: int) -> "BatchShape":
        """The shape of the batch several times over, as R-Drop passes it."""
        names = ("pairs", "source_tokens", "target_tokens", "source_scores", "target_scores", "cross_scores")
        return replace(self, **{name: times * getattr(self, name) for name in names})

    @property
    def tokens(self) -> int:
        """Of both sides."""
        return self.source_tokens + self.target_tokens

    def tokens_of(self, side: str) -> int:
        """Of the side `source` or `target`."""
        return self.source_tokens if side == "source" else self.target_tokens

    def scores_of(self, queries: str, keys: str) -> int:
        """Of one head, where the side `source` or `target` asks itself or the other."""
        if queries != keys:
            return self.cross_scores
        return self.source_scores if keys == "source" else self.target_scores

    def width(self, side: str) -> int:
        """Columns of the scores on the side `source` or `target`."""
        longest = self.longest_source if side == "source" else self.longest_target
        if not self.is_packed:
            return longest
        return grid_width(longest)


@dataclass(frozen=True)
class DataEstimate:
    """What an epoch reads.

    Attributes:
        pairs: Of source and target.
        source_tokens: Without padding.
        target_tokens: Without padding.
        padding_share: Share of the cells that are computed but hold no token, from 0 to 1.
        batches_per_epoch: Of all devices together.
        steps_per_epoch: Updates of the weights.
        steps: Of the whole run.
    """

    pairs: int
    source_tokens: int
    target_tokens: int
    padding_share: float
    batches_per_epoch: int
    steps_per_epoch: int
    steps: int


def plan_batches(
    lengths: np.ndarray,
    arguments: TrainingArguments,
    max_tokens_per_batch: int | None,
    devices: int,
    length_multiple: int = 1,
) -> list[list[int]]:
    """The batches of the first epoch, of all devices, as the trainer will form them.

    Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        arguments: Give the seed and, without a budget of tokens, the size of a batch.
        max_tokens_per_batch: The budget.
        devices: How many share the epoch.
        length_multiple: What the collator rounds widths up to a multiple of.
    """
    seed = data_seed(arguments)
    if max_tokens_per_batch is not None:
        sampler = TokenBudgetSampler(lengths, max_tokens_per_batch, seed, devices, length_multiple=length_multiple)
        # A filler is a pair once more.
        return [[index % len(lengths) for index in batch] for batch in sampler.epoch_batches(0)]
    rows = arguments.per_device_train_batch_size
    if arguments.train_sampling_strategy == "group_by_length":
        order = list(LengthGroupedSampler(lengths.sum(axis=1).tolist(), rows, seed))
    else:
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [order[start : start + rows] for start in range(0, len(order), rows)]
    # Batches of whole size alone, equally many on each device.
    return batches[: len(order) // rows // devices * devices] if arguments.dataloader_drop_last else batches


def estimate_data(
    lengths: np.ndarray, shapes: Sequence[BatchShape], arguments: TrainingArguments, devices: int
) -> DataEstimate:
    source, target = (int(side) for side in lengths.sum(axis=0))
    steps_per_epoch = math.ceil(math.ceil(len(shapes) / devices) / arguments.gradient_accumulation_steps)
    epochs = math.ceil(arguments.num_train_epochs * steps_per_epoch)
    return DataEstimate(
        pairs=len(lengths),
        source_tokens=source,
        target_tokens=target,
        padding_share=1 - (source + target) / sum(shape.tokens for shape in shapes),
        batches_per_epoch=len(shapes),
        steps_per_epoch=steps_per_epoch,
        steps=arguments.max_steps if arguments.max_steps > 0 else epochs,
    )
