"""Batches of an epoch, the sizes that decide their cost, and their floating-point operations."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from metaphrase.data.pairs import data_seed
from metaphrase.data.stages import StagedPairs
from metaphrase.data.token_budget import LengthGroupedSampler, TokenBudgetSampler
from metaphrase.modeling.packing import grid_width

# Cross-attention keys and values: decoder weights that are applied to source tokens. Names of Metaphrase, BART and T5.
_CROSS_PROJECTION = re.compile(r"\.(cross_attn|encoder_attn|EncDecAttention)\.(k|v|k_proj|v_proj)$")


@dataclass(frozen=True)
class BatchShape:
    """Sizes that decide the cost of a batch, which is padded, or packed into one row.

    Tokens are cells that are computed: with padding, `pairs` times the longest sequence. Scores are those of one head, in the
    encoder (`source_scores`) and in the decoder.
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
    def of(cls, source_lengths: Sequence[int], target_lengths: Sequence[int], is_packed: bool) -> "BatchShape":
        """Return the shape of a batch of pairs with these lengths in tokens."""
        sides = [[int(length) for length in side] for side in (source_lengths, target_lengths)]
        pairs = len(source_lengths)
        longest = [max(side) for side in sides]
        if not is_packed:
            sides = [pairs * [length] for length in longest]
        # A lower bound: packed sequences that are computed together have a grid of one width.
        source, target = (np.array([grid_width(length) if is_packed else length for length in side]) for side in sides)
        scores = (int(queries @ keys) for queries, keys in ((source, source), (target, target), (target, source)))
        return cls(pairs, *map(sum, sides), *longest, *scores, is_packed)

    @classmethod
    def of_tensors(cls, batch: Mapping[str, torch.Tensor]) -> "BatchShape":
        """Return the shape of a collated batch, padded or packed."""
        if "source_lengths" in batch:
            return cls.of(batch["source_lengths"].tolist(), batch["target_lengths"].tolist(), is_packed=True)
        sides = ([rows.shape[1]] * len(rows) for rows in (batch["input_ids"], batch["labels"]))
        return cls.of(*sides, is_packed=False)

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
    """Size of an epoch, and optimizer steps. Tokens do not count padding; batches are those of all devices together.

    `padding_share` is the share of computed cells that hold no token, from 0 to 1.
    """

    pairs: int
    source_tokens: int
    target_tokens: int
    padding_share: float
    batches_per_epoch: int
    steps_per_epoch: int
    steps: int

    @classmethod
    def of(
        cls, lengths: np.ndarray, shapes: Sequence[BatchShape], arguments: TrainingArguments, devices: int
    ) -> "DataEstimate":
        """Count the tokens (pairs, 2) of an epoch, and the steps that its batches make."""
        source, target = (int(side) for side in lengths.sum(axis=0))
        padding_share = 1 - (source + target) / sum(shape.tokens for shape in shapes)
        steps_per_epoch = math.ceil(math.ceil(len(shapes) / devices) / arguments.gradient_accumulation_steps)
        steps = arguments.max_steps
        if steps <= 0:
            steps = math.ceil(arguments.num_train_epochs * steps_per_epoch)
        return cls(len(lengths), source, target, padding_share, len(shapes), steps_per_epoch, steps)


def plan_batches(
    lengths: np.ndarray,
    arguments: TrainingArguments,
    max_tokens_per_batch: int | None,
    devices: int,
    length_multiple: int = 1,
    staged: StagedPairs | None = None,
) -> list[list[int]]:
    """Return the batches of the first epoch, of all devices, as the trainer will form them. All stages are one epoch.

    Args:
        lengths: Tokens of source and target of each pair, shape (pairs, 2).
        arguments: Training arguments with the seed and, without a token budget, the batch size.
        max_tokens_per_batch: The token budget.
        devices: Number of devices that share the epoch.
        length_multiple: Multiple that the collator rounds widths up to.
        staged: The training pairs, if they have stages.
    """
    seed = data_seed(arguments)
    if staged is not None:
        sampler = staged.sampler(lengths, max_tokens_per_batch, seed, devices, length_multiple=length_multiple)
        return [[index % len(lengths) for index in batch] for batch in sampler.epoch_batches(0)]
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


def training_flops(model: PreTrainedModel, shapes: Sequence[BatchShape], is_checkpointed: bool = False) -> int:
    """Return the operations of forward and backward passes, a multiplication and an addition counted as two.

    Only matrix products are counted: 2 per weight of a projection and token, and 4 per attention score and entry of a head.
    Masked scores count too. A backward pass takes twice the forward pass, and once more with checkpoints.

    Source: Kaplan et al. 2020, section 2.1, arXiv 2001.08361.

    Args:
        model: An encoder-decoder.
        shapes: Shapes of the batches.
        is_checkpointed: True if layers are computed again in the backward pass.
    """
    source_tokens = sum(shape.source_tokens for shape in shapes)
    target_tokens = sum(shape.target_tokens for shape in shapes)
    head = model.get_output_embeddings()
    encoder_modules = {id(module) for module in model.get_encoder().modules()}
    layers = sum(_score_flops(model, shape) for shape in shapes)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            reads_source = id(module) in encoder_modules or _CROSS_PROJECTION.search(name)
            layers += 2 * module.weight.numel() * (source_tokens if reads_source else target_tokens)
    output = 0 if head is None else 2 * head.weight.numel() * target_tokens
    return (4 if is_checkpointed else 3) * layers + 3 * output


def _score_flops(model: PreTrainedModel, shape: BatchShape) -> int:
    config = model.config
    if not hasattr(config, "get_head_dim"):
        return 0  # Other families name their widths otherwise. A few per cent at the lengths of sentences.
    heads = {name: getattr(config, f"{name}_attention_heads") for name in ("encoder", "decoder")}
    encoder, decoder = (
        getattr(config, f"{name}_layers") * count * config.get_head_dim(count) for name, count in heads.items()
    )
    return 4 * (encoder * shape.source_scores + decoder * (shape.target_scores + shape.cross_scores))
