"""Denoising: blocks of plain text to training pairs, with noise that is new in each epoch and the same in each rerun."""

import logging
from itertools import count

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from metaphrase.data.denoising.span_corruption import MIN_BLOCK_LENGTH, SpanCorruption
from metaphrase.data.denoising.text_infilling import TextInfilling, full_stop_ids_of
from metaphrase.data.denoising.ul2 import (
    MODE_TOKENS,
    MixtureOfDenoisers,
    Objective,
    mode_token_ids_of,
    ul2_mixture,
)
from metaphrase.tokenization.special_tokens import sentinel_tokens

logger = logging.getLogger(__name__)

OBJECTIVES = ("span_corruption", "ul2", "text_infilling")
# As many as T5 has.
DEFAULT_SENTINELS = 100
MASK_TOKEN = "<mask>"
LENGTH_COLUMNS = ("source_length", "target_length", "length")


def noise_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Makes the randomness of one block in one epoch. Nothing else decides it: no order, batch, worker or process.

    Raises:
        ValueError: If an argument is negative.
    """
    for name, value in (("seed", seed), ("epoch", epoch), ("index", index)):
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, got {value}.")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, index)))


class DenoisingDataset(torch.utils.data.Dataset):
    """Blocks of plain text as pairs: `dataset[index]` is the block under that index with the noise of the present epoch.

    The noise belongs to the data set and not to a collator, because a data set knows the index of each block and its length
    before it is drawn. The epoch lies in shared memory, so that workers that outlive an epoch see it change.

    `set_epoch` must be called before each epoch. `EpochCallback` makes a Trainer do so: accelerate's loaders by themselves stop
    at the first sampler that takes an epoch, and so mostly pass the data set by where several processes share it or a resumed
    run skips batches.

    `dataset["source_length"]`, `dataset["target_length"]` and their sum `dataset["length"]` are lengths in tokens, ends of
    sequence included, for batches of like length or of limited size; `lengths` is the first two as an array. They are the same
    in all epochs, and upper bounds unless `objective.lengths_are_exact`.

    Attributes:
        blocks: The blocks, in the column `input_ids`.
        objective: What corrupts a block.
        seed: Of all noise.
        column_names: What `dataset[name]` answers to, and the fields of a pair.
    """

    def __init__(self, blocks: datasets.Dataset, objective: Objective, seed: int = 0):
        """Args:
        blocks: The column `input_ids`, such as from `text_blocks`.
        objective: What corrupts a block.
        seed: Of all noise.

        Raises:
            ValueError: If there is no block, the objective refuses one for its length, or the seed is negative.
        """
        if "input_ids" not in blocks.column_names or len(blocks) == 0:
            raise ValueError(
                "`blocks` must have the column input_ids and at least one row, "
                f"got {blocks.column_names} with {len(blocks)} rows."
            )
        noise_generator(seed, 0, 0)
        self.blocks = blocks.select_columns("input_ids").with_format("numpy")
        self.objective = objective
        self.seed = seed
        self.column_names = ["input_ids", "labels", *LENGTH_COLUMNS]
        self._lengths = _pair_lengths(self.blocks, objective)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch whose noise is drawn."""
        return int(self._epoch)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the source and of the target of each pair, or their upper bounds, `(blocks, 2)`."""
        return self._lengths[:, :2]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the noise of an epoch, in all workers of this process too.

        Raises:
            ValueError: If the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"`epoch` must not be negative, got {epoch}.")
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, key: int | str) -> dict[str, list[int]] | list[int]:
        if isinstance(key, str):
            if key not in LENGTH_COLUMNS:
                raise KeyError(f"Only {', '.join(LENGTH_COLUMNS)} can be read for all blocks at once, got {key}.")
            return self._lengths[:, LENGTH_COLUMNS.index(key)].tolist()
        index = range(len(self))[key]
        generator = noise_generator(self.seed, self.epoch, index)
        source, target = self.objective(self.blocks[index]["input_ids"], generator)
        return {"input_ids": source.tolist(), "labels": target.tolist()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # Pickled by anything but a loader, the epoch has left shared memory.
        self._epoch.share_memory_()


def _pair_lengths(blocks: datasets.Dataset, objective: Objective) -> np.ndarray:
    """Checks all blocks and returns `LENGTH_COLUMNS` of each, `(blocks, 3)`."""
    tables = blocks.with_format("arrow").iter(batch_size=10_000)
    lengths = np.concatenate([pc.list_value_length(table["input_ids"]).to_numpy() for table in tables])
    distinct, place = np.unique(lengths, return_inverse=True)
    for length in distinct.tolist():
        objective.check_block_length(length)
    _warn_of_fixed_spans(objective, int(distinct[-1]))
    sides = np.array([objective.lengths(length) for length in distinct.tolist()], dtype=np.int64)
    return np.append(sides, sides.sum(axis=1, keepdims=True), axis=1)[place]


def _warn_of_fixed_spans(objective: Objective, longest: int) -> None:
    """Says so where even the longest blocks have so little noise that it is always at the same place."""
    is_mixture = isinstance(objective, MixtureOfDenoisers)
    parts = [denoiser.objective for denoiser in objective.denoisers] if is_mixture else [objective]
    fixed = [part for part in parts if isinstance(part, SpanCorruption) and part.is_fixed(longest)]
    if fixed:
        logger.warning(
            "%sBlocks of %d tokens have a single hidden span, which is always their end: take longer blocks, more noise, "
            "shorter spans, or `spans_anywhere`.",
            f"For {len(fixed)} of {len(parts)} denoisers: " if is_mixture else "",
            longest,
        )


class EpochCallback(TrainerCallback):
    """Tells the training data set, and every sampler above it, which epoch begins.

    A Trainer and accelerate hand the epoch down by themselves, but not through every stack of loaders and samplers: with several
    processes or after resuming, either the data set or a sampler may be left in its first epoch. This callback runs in every
    process before the loader of an epoch starts, and walks the whole stack.
    """

    def __init__(self) -> None:
        self._epochs = count()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs,
    ) -> None:
        """Finds the first epoch of this run as the Trainer does: from the steps done and the steps of an epoch."""
        steps = state.max_steps
        if has_length(train_dataloader):
            steps = -(-len(train_dataloader) // args.gradient_accumulation_steps)
        self._epochs = count(state.global_step // max(steps, 1))

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs,
    ) -> None:
        """Hands the epoch down."""
        announce_epoch(train_dataloader, next(self._epochs))


def announce_epoch(loader: DataLoader, epoch: int) -> None:
    """Calls `set_epoch` of a loader, of its data set, and of its samplers however deep accelerate has wrapped them."""
    parts = [loader, loader.dataset]
    sampler = loader.batch_sampler
    while sampler is not None:
        parts += [sampler, getattr(sampler, "sampler", None)]
        sampler = getattr(sampler, "batch_sampler", None)
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def longest_block(objective: Objective, max_source_length: int, max_target_length: int | None = None) -> int:
    """Returns the longest block whose pair is within the limits, with certainty.

    With `SpanCorruption` the source then has exactly `max_source_length` tokens, if the target is not limited: sources grow
    by at most one token with each token of the block, as long as there are enough kept tokens for one before each span.

    Args:
        objective: What corrupts the block.
        max_source_length: The most tokens of a source, end of sequence included.
        max_target_length: The most tokens of a target, likewise; None for no limit.

    Raises:
        ValueError: If even the shortest block exceeds the limits, or the objective refuses the block for its length.

    Source: `random_spans_helper` of T5's code finds the same for span corruption (Raffel et al. 2020, arXiv 1910.10683).
    """

    def fits(block_length: int) -> bool:
        source, target = objective.lengths(block_length)
        return source <= max_source_length and (max_target_length is None or target <= max_target_length)

    if not fits(MIN_BLOCK_LENGTH):
        shortest = objective.lengths(MIN_BLOCK_LENGTH)
        raise ValueError(
            f"`max_source_length` and `max_target_length` must hold a block of {MIN_BLOCK_LENGTH} tokens, which takes "
            f"{shortest[0]} and {shortest[1]}, got {max_source_length} and {max_target_length}."
        )
    low, high = MIN_BLOCK_LENGTH, 2 * MIN_BLOCK_LENGTH
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    objective.check_block_length(low)
    return low


def sentinel_ids_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the ids of `<extra_id_0>`, `<extra_id_1>` and so on, as far as the tokenizer has them without a gap."""
    vocabulary = tokenizer.get_vocab()
    ids = []
    for name in sentinel_tokens(len(vocabulary)):
        if name not in vocabulary:
            break
        ids.append(vocabulary[name])
    return tuple(ids)


def objective_tokens(name: str, num_sentinels: int = DEFAULT_SENTINELS) -> tuple[str, ...]:
    """Returns the additional special tokens that a tokenizer must be trained with, to serve an objective.

    Args:
        name: One of `OBJECTIVES`.
        num_sentinels: Of the objectives that use sentinels. A block must not need more.

    Raises:
        ValueError: If there is no such objective.
    """
    _check_name(name)
    if name == "text_infilling":
        return (MASK_TOKEN,)
    return (
        (*MODE_TOKENS[0].values(), *sentinel_tokens(num_sentinels)) if name == "ul2" else sentinel_tokens(num_sentinels)
    )


def make_objective(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    noise_density: float | None = None,
    mean_span_length: float | None = None,
    spans_anywhere: bool = False,
) -> Objective:
    """Makes an objective of a tokenizer's special tokens.

    Args:
        name: `span_corruption` (T5), `ul2`, or `text_infilling` with sentence permutation (BART).
        tokenizer: Has the tokens of `objective_tokens(name)`, or those of a published T5, UL2 or BART.
        noise_density: Share of the tokens that are hidden; None for that of the paper.
        mean_span_length: Mean tokens of a hidden span; None for that of the paper.
        spans_anywhere: As for `SpanCorruption`.

    Raises:
        ValueError: If there is no such objective, the tokenizer lacks its tokens, or an option does not belong to it.
    """
    _check_name(name)
    given = {
        "noise_density": noise_density,
        "mean_span_length": mean_span_length,
        "spans_anywhere": spans_anywhere or None,
    }
    options = {option: value for option, value in given.items() if value is not None}
    foreign = {
        "span_corruption": (),
        "ul2": ("noise_density", "mean_span_length"),
        "text_infilling": ("spans_anywhere",),
    }
    for option in foreign[name]:
        if option in options:
            raise ValueError(f"`{option}` must be left out for `objective` {name}, got {options[option]}.")
    if name == "text_infilling":
        mask = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.get_vocab().get(MASK_TOKEN)
        if mask is None:
            raise ValueError(f"A tokenizer must have a mask token or {MASK_TOKEN} for `objective` {name}, got neither.")
        if "noise_density" in options:
            options["mask_ratio"] = options.pop("noise_density")
        full_stops = full_stop_ids_of(tokenizer)
        return TextInfilling(
            mask_token_id=mask, eos_token_id=tokenizer.eos_token_id, full_stop_ids=full_stops, **options
        )
    sentinels = sentinel_ids_of(tokenizer)
    if not sentinels:
        raise ValueError(
            f"A tokenizer must have {sentinel_tokens(1)[0]} and further ones for `objective` {name}, got none."
        )
    if name == "ul2":
        return ul2_mixture(sentinels, tokenizer.eos_token_id, mode_token_ids_of(tokenizer), **options)
    return SpanCorruption(sentinel_ids=sentinels, eos_token_id=tokenizer.eos_token_id, **options)


def _check_name(name: str) -> None:
    if name not in OBJECTIVES:
        raise ValueError(f"`objective` must be one of {', '.join(OBJECTIVES)}, got {name!r}.")
