"""Batches of an epoch, and the sizes that decide their cost."""

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
    """Sizes that decide the cost of a batch.

    Attributes:
        pairs: Number of pairs.
        source_tokens: Source cells that are computed; with padding, `pairs` times the longest source.
        target_tokens: Target cells that are computed.
        longest_source: Tokens of the longest source.
        longest_target: Tokens of the longest target.
        source_scores: Attention scores of one encoder head.
        target_scores: Self-attention scores of one decoder head.
        cross_scores: Cross-attention scores of one decoder head.
        is_packed: True if all pairs lie in one row without padding.
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
        """Return the shape of a batch of pairs with these lengths in tokens."""
        longest = int(max(source_lengths)), int(max(target_lengths))
        if not is_packed:
            return cls._padded(len(source_lengths), *longest)
        tokens = int(sum(source_lengths)), int(sum(target_lengths))
        # A lower bound: sequences that are computed together have a grid of one width.
        source, target = (
            np.array([grid_width(int(length)) for length in lengths]) for lengths in (source_lengths, target_lengths)
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
        """Return the shape of a collated batch, padded or packed."""
        if "source_lengths" in batch:
            return cls.of(batch["source_lengths"].tolist(), batch["target_lengths"].tolist(), is_packed=True)
        return cls._padded(*batch["input_ids"].shape, batch["labels"].shape[1])

    def repeated(self, times: int) -> "BatchShape":
        """Return the shape of the batch repeated several times, as R-Drop does."""
        names = ("pairs", "source_tokens", "target_tokens", "source_scores", "target_scores", "cross_scores")
        return replace(self, **{name: times * getattr(self, name) for name in names})

    @property
    def tokens(self) -> int:
        return self.source_tokens + self.target_tokens

    def width(self, side: str) -> int:
        """Return the columns of attention scores on the side `source` or `target`."""
        longest = self.longest_source if side == "source" else self.longest_target
        return grid_width(longest) if self.is_packed else longest


@dataclass(frozen=True)
class DataEstimate:
    """Size of an epoch and of the run.

    Attributes:
        pairs: Pairs per epoch.
        source_tokens: Without padding.
        target_tokens: Without padding.
        padding_share: Share of computed cells that hold no token, from 0 to 1.
        batches_per_epoch: Of all devices together.
        steps_per_epoch: Optimizer steps.
        steps: Optimizer steps of the whole run.
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
    """Return the batches of the first epoch, of all devices, as the trainer will form them.

    Args:
        lengths: Tokens of source and target of each pair, shape (pairs, 2).
        arguments: Training arguments with the seed and, without a token budget, the batch size.
        max_tokens_per_batch: The token budget.
        devices: Number of devices that share the epoch.
        length_multiple: Multiple that the collator rounds widths up to.
    """
    seed = data_seed(arguments)
    if max_tokens_per_batch is not None:
        sampler = TokenBudgetSampler(lengths, max_tokens_per_batch, seed, devices, length_multiple=length_multiple)
        # Indices beyond the end repeat a pair to fill up a batch.
        return [[index % len(lengths) for index in batch] for batch in sampler.epoch_batches(0)]
    rows = arguments.per_device_train_batch_size
    if arguments.train_sampling_strategy == "group_by_length":
        order = list(LengthGroupedSampler(lengths.sum(axis=1).tolist(), rows, seed))
    else:
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [order[start : start + rows] for start in range(0, len(order), rows)]
    # Dropping the last leaves full batches alone, equally many on each device.
    return batches[: len(order) // rows // devices * devices] if arguments.dataloader_drop_last else batches


def estimate_data(
    lengths: np.ndarray, shapes: Sequence[BatchShape], arguments: TrainingArguments, devices: int
) -> DataEstimate:
    source, target = (int(side) for side in lengths.sum(axis=0))
    steps_per_epoch = math.ceil(math.ceil(len(shapes) / devices) / arguments.gradient_accumulation_steps)
    return DataEstimate(
        pairs=len(lengths),
        source_tokens=source,
        target_tokens=target,
        padding_share=1 - (source + target) / sum(shape.tokens for shape in shapes),
        batches_per_epoch=len(shapes),
        steps_per_epoch=steps_per_epoch,
        steps=arguments.max_steps
        if arguments.max_steps > 0
        else math.ceil(arguments.num_train_epochs * steps_per_epoch),
    )
