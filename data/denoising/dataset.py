"""Denoising: turn blocks of plain text into training pairs, with noise that is new in each epoch and reproducible."""

import logging
from bisect import bisect_left
from itertools import takewhile

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from metaphrase.data.augmentation import EpochPairs
from metaphrase.data.denoising.objectives import (
    MIN_BLOCK_LENGTH,
    MODE_TOKENS,
    MixtureOfDenoisers,
    SpanCorruption,
    TextInfilling,
    full_stop_ids_of,
    mode_token_ids_of,
    ul2_mixture,
)
from metaphrase.data.pairs import LENGTH_COLUMNS
from metaphrase.tokenization import sentinel_tokens

logger = logging.getLogger(__name__)

DEFAULT_SENTINELS = 100  # as T5
MASK_TOKEN = "<mask>"
_LENGTHS = (*LENGTH_COLUMNS, "length")
_LONGEST_BLOCK = 2**40
Objective = SpanCorruption | TextInfilling | MixtureOfDenoisers


def noise_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one block in one epoch, equal in all orders, batches, workers and processes."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, index)))


class DenoisingDataset(EpochPairs):
    """Blocks of plain text as pairs. `dataset[index]` is a block with the noise of the present epoch.

    The data set draws the noise, because a collator knows neither the index of a block nor its length before the draw.

    `dataset["source_length"]`, `dataset["target_length"]` and their sum `dataset["length"]` are lengths in tokens with
    end-of-sequence tokens, equal in all epochs. They are upper bounds unless `objective.lengths_are_exact`.

    Attributes:
        blocks: The blocks, in the column `input_ids`.
        objective: Objective that corrupts a block.
        seed: Seed of all noise.
        column_names: Names of `dataset[name]`, and the fields of a pair.
    """

    def __init__(self, blocks: datasets.Dataset, objective: Objective, seed: int = 0):
        """Args:
        blocks: The column `input_ids`, such as from `text_blocks`.
        objective: Objective that corrupts a block.
        seed: Seed of all noise.

        Raises:
            ValueError: If the objective refuses the length of a block.
        """
        super().__init__()
        self.blocks = blocks.select_columns("input_ids").with_format("numpy")
        self.objective = objective
        self.seed = seed
        self.column_names = ["input_ids", "labels", *_LENGTHS]
        self._lengths = _pair_lengths(self.blocks, objective)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, key: int | str) -> dict[str, list[int]] | list[int]:
        if isinstance(key, str):
            return self._lengths[:, _LENGTHS.index(key)].tolist()
        index = range(len(self))[key]
        generator = noise_generator(self.seed, self.epoch, index)
        source, target = self.objective(self.blocks[index]["input_ids"], generator)
        return {"input_ids": source.tolist(), "labels": target.tolist()}


def _pair_lengths(blocks: datasets.Dataset, objective: Objective) -> np.ndarray:
    """Check all blocks and return their `_LENGTHS`, `(blocks, 3)`."""
    tables = blocks.with_format("arrow").iter(batch_size=10_000)
    lengths = np.concatenate([pc.list_value_length(table["input_ids"]).to_numpy() for table in tables])
    distinct, inverse = np.unique(lengths, return_inverse=True)
    sides = []
    for length in distinct.tolist():
        objective.check_block_length(length)
        sides.append(objective.lengths(length))
    _warn_of_fixed_spans(objective, int(distinct[-1]))
    sides = np.array(sides, dtype=np.int64)
    return np.append(sides, sides.sum(axis=1, keepdims=True), axis=1)[inverse]


def _warn_of_fixed_spans(objective: Objective, longest: int) -> None:
    """Log a warning if even the longest blocks have a single span, which never moves."""
    is_mixture = isinstance(objective, MixtureOfDenoisers)
    parts = [part for _, part in objective.denoisers] if is_mixture else [objective]
    fixed = [part for part in parts if isinstance(part, SpanCorruption) and part.is_fixed(longest)]
    if fixed:
        logger.warning(
            "%sBlocks of %d tokens have a single hidden span, which is always their end. Set longer blocks, more noise, "
            "shorter spans, or `spans_anywhere`.",
            f"For {len(fixed)} of {len(parts)} denoisers: " if is_mixture else "",
            longest,
        )


def longest_block(objective: Objective, max_source_length: int, max_target_length: int | None = None) -> int:
    """Return the length of the longest block whose pair is always within the limits.

    With `SpanCorruption` and no target limit the source has exactly `max_source_length` tokens. It grows by at most one token
    with each token of the block.

    Args:
        objective: Objective that corrupts the block.
        max_source_length: Most tokens of a source with its end-of-sequence token.
        max_target_length: The same for a target; None for no limit.

    Raises:
        ValueError: If even the shortest block exceeds the limits, or the objective refuses the length.

    Source: `random_spans_helper` of T5's code, for span corruption (Raffel et al. 2020, arXiv 1910.10683).
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
    longest = bisect_left(range(_LONGEST_BLOCK), True, lo=MIN_BLOCK_LENGTH, key=lambda length: not fits(length)) - 1
    objective.check_block_length(longest)
    return longest


def sentinel_ids_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>` and so on, up to the first that the tokenizer lacks."""
    vocabulary = tokenizer.get_vocab()
    return tuple(vocabulary[name] for name in takewhile(vocabulary.__contains__, sentinel_tokens(len(vocabulary))))


def objective_tokens(name: str, num_sentinels: int = DEFAULT_SENTINELS) -> tuple[str, ...]:
    """Return the special tokens that an objective adds to a tokenizer.

    Args:
        name: As for `make_objective`.
        num_sentinels: Number of sentinels, if the objective uses them. A block must not need more.
    """
    if name == "text_infilling":
        return (MASK_TOKEN,)
    modes = tuple(MODE_TOKENS[0].values()) if name == "ul2" else ()
    return (*modes, *sentinel_tokens(num_sentinels))


def make_objective(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    noise_density: float | None = None,
    mean_span_length: float | None = None,
    spans_anywhere: bool = False,
) -> Objective:
    """Make an objective with the special tokens of a tokenizer.

    Args:
        name: `span_corruption` (T5), `ul2`, or `text_infilling` with sentence permutation (BART).
        tokenizer: Has the tokens of `objective_tokens(name)`, or of a published T5, UL2 or BART.
        noise_density: Share of hidden tokens; None for that of the paper.
        mean_span_length: Mean tokens of a hidden span; None for that of the paper.
        spans_anywhere: As for `SpanCorruption`.

    Raises:
        ValueError: If the tokenizer lacks the tokens of the objective, or an option is out of range.
    """
    options = {"noise_density": noise_density, "mean_span_length": mean_span_length}
    options = {option: value for option, value in options.items() if value is not None}
    if name == "text_infilling":
        mask = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.get_vocab().get(MASK_TOKEN)
        if mask is None:
            raise ValueError(f"A tokenizer must have a mask token or {MASK_TOKEN} for `objective` {name}, got neither.")
        options["full_stop_ids"] = full_stop_ids_of(tokenizer)
        return TextInfilling(mask_token_id=mask, eos_token_id=tokenizer.eos_token_id, **options)
    sentinels = sentinel_ids_of(tokenizer)
    if not sentinels:
        raise ValueError(
            f"A tokenizer must have {sentinel_tokens(1)[0]} and further ones for `objective` {name}, got none."
        )
    if name == "ul2":
        return ul2_mixture(sentinels, tokenizer.eos_token_id, mode_token_ids_of(tokenizer), spans_anywhere)
    tokens = {"sentinel_ids": sentinels, "eos_token_id": tokenizer.eos_token_id}
    return SpanCorruption(**tokens, **options, spans_anywhere=spans_anywhere)
