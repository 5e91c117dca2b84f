"""Denoising: turn blocks of plain text into training pairs, with noise that is new in each epoch and reproducible."""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets.fingerprint import Hasher
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
from metaphrase.data.encoding import tokenizer_fingerprint
from metaphrase.data.pairs import LENGTH_COLUMNS, Policy, check_files, read_cached
from metaphrase.tokenization import TokenizerPair, iterate_lines, sentinel_tokens
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS

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


Remainder = Literal["drop", "keep"]
_COUNTS = ("empty_documents", "invalid_documents")
FEATURES = datasets.Features(
    {"input_ids": datasets.List(datasets.Value("int32")), **{name: datasets.Value("int64") for name in _COUNTS}}
)
TEXTS_PER_CALL = 1000
# Part of every cache key. Raise it when the same texts would be cut into other blocks.
CACHE_VERSION = 4


@dataclass
class BlockReport:
    """Counts of documents, tokens and blocks.

    Attributes:
        documents: Documents read, used or not.
        empty_documents: Unused documents of white space only, or without any token.
        invalid_documents: Unused documents that are not UTF-8.
        block_length: Tokens in a full block.
        full_blocks: Number of full blocks.
        remainder_tokens: Tokens behind the last full block.
        remainder: Policy for the remainder: "drop", or "keep" as a shorter block.
        least_length: Fewest tokens of a shorter block.
    """

    documents: int = 0
    empty_documents: int = 0
    invalid_documents: int = 0
    block_length: int = 0
    full_blocks: int = 0
    remainder_tokens: int = 0
    remainder: Remainder = "drop"
    least_length: int = 1

    @property
    def tokens(self) -> int:
        """Number of all tokens, used or not."""
        return self.full_blocks * self.block_length + self.remainder_tokens

    @property
    def blocks(self) -> int:
        """Number of all blocks, with the shorter one."""
        return self.full_blocks + self.keeps_remainder

    @property
    def keeps_remainder(self) -> bool:
        """True if the remainder becomes a shorter block."""
        return self.remainder == "keep" and self.remainder_tokens >= max(1, self.least_length)

    def to_dict(self) -> dict[str, Any]:
        """Return all counts as plain values for JSON."""
        return {**asdict(self), "tokens": self.tokens, "blocks": self.blocks}

    def __str__(self) -> str:
        counts = {"empty": self.empty_documents, "not UTF-8": self.invalid_documents}
        unused = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        documents = f"{self.documents} documents" + (f", not used: {unused}" if unused else "")
        parts = [documents, f"{self.tokens} tokens", f"{self.full_blocks} blocks of {self.block_length} tokens"]
        if self.remainder_tokens:
            fate = "kept as a shorter block" if self.keeps_remainder else "not used"
            parts.append(f"{self.remainder_tokens} tokens behind the last block {fate}")
        return "; ".join(parts) + "."


def load_texts(
    files: str | Path | Sequence[str | Path],
    max_samples: int | None = None,
    cache_dir: str | Path | None = None,
    invalid_utf8: Policy = "error",
    max_line_characters: int = MAX_LINE_CHARACTERS,
) -> datasets.Dataset:
    """Read UTF-8 text files with one document per line, compressed (`.gz`) or not, into the column `text`.

    Args:
        files: The files, read one after the other.
        max_samples: Number of lines to take from the beginning.
        cache_dir: Cache folder of `datasets`. A changed file is read again.
        invalid_utf8: "error", or "skip" to make a line that is not UTF-8 a `None`, which `text_blocks` counts.
        max_line_characters: Maximum length of a document.

    Raises:
        ValueError: If a line is too long or not UTF-8, or there is no line at all.
        FileNotFoundError: If a file does not exist.
    """
    paths = tuple(str(path) for path in ([files] if isinstance(files, str | Path) else files))
    check_files(paths)
    features = datasets.Features({"text": datasets.Value("string")})
    arguments = {"paths": paths, "keep_invalid": invalid_utf8 == "skip", "limit": max_line_characters}
    texts = read_cached(generate_texts, paths, features, CACHE_VERSION, cache_dir, arguments)
    return texts if max_samples is None else texts.select(range(min(max_samples, len(texts))))


def generate_texts(
    paths: tuple[str, ...], cache_key: Any, keep_invalid: bool, limit: int = MAX_LINE_CHARACTERS
) -> Iterator[dict[str, str | None]]:
    """Yield the lines of the files. The cache key is not read.

    Raises:
        ValueError: If a line is too long or not UTF-8, or there is no line at all.
    """
    is_empty = True
    for line in iterate_lines(paths, keep_invalid, limit):
        is_empty = False
        yield {"text": line}
    if is_empty:
        raise ValueError(f"Text files must hold at least one line, got none in {', '.join(paths) or 'no file'}.")


def text_blocks(
    texts: datasets.Dataset,
    tokenizers: TokenizerPair,
    block_length: int,
    *,
    end_documents: bool = True,
    remainder: Remainder = "drop",
    least_length: int = 1,
) -> tuple[datasets.Dataset, BlockReport]:
    """Join all documents in order and cut them into blocks.

    `datasets` caches the result by data set, tokenizer and arguments, on disk if `texts` is on disk. One process cuts, because
    each block begins where the last one ended. A fast tokenizer uses all cores anyway.

    Args:
        texts: The column `text`, one document per row; `None` for an unreadable document.
        tokenizers: A joint pair of tokenizers.
        block_length: Tokens in each block.
        end_documents: Keep the end-of-sequence token behind each document. T5 joined documents without one.
        remainder: Policy for the tokens behind the last full block: "drop", or "keep" as a shorter block.
        least_length: Fewest tokens of a shorter block.

    Returns:
        The column `input_ids`, and the report.

    Raises:
        ValueError: If the tokenizers are not joint, or there is no block.
    """
    if not tokenizers.is_joint:
        raise ValueError("`tokenizers` must be joint, because a block goes to both sides, got two tokenizers.")
    rest: list[int] = []  # tokens behind the last block
    counts = dict.fromkeys(_COUNTS, 0)

    def cut(batch: list[str | None], rows: list[int]) -> dict[str, list[Any]]:
        valid = [text for text in batch if text is not None]
        counts["invalid_documents"] += len(batch) - len(valid)
        for text, ids in zip(valid, tokenizers.encode_sources(valid), strict=True):
            # An empty document has the end-of-sequence token alone.
            if not text.strip() or len(ids) == 1:
                counts["empty_documents"] += 1
            else:
                rest.extend(ids if end_documents else ids[:-1])
        stop = len(rest) - len(rest) % block_length
        blocks = [rest[start : start + block_length] for start in range(0, stop, block_length)]
        del rest[:stop]
        columns = {name: [0] * len(blocks) for name in _COUNTS}
        if rows[-1] == len(texts) - 1:
            # The last row holds the remainder, which may be empty, and the counts, so that a cached run has them too.
            blocks.append(rest)
            columns = {name: [*column, counts[name]] for name, column in columns.items()}
        return {"input_ids": blocks, **columns}

    keys = (block_length, end_documents, CACHE_VERSION)
    rows = texts.map(
        cut,
        batched=True,
        batch_size=TEXTS_PER_CALL,
        with_indices=True,
        input_columns=["text"],
        remove_columns=texts.column_names,
        features=FEATURES,
        new_fingerprint=Hasher.hash((texts._fingerprint, tokenizer_fingerprint(tokenizers), keys)),
        desc="Cutting blocks",
    )
    last = rows[len(rows) - 1]
    report = BlockReport(
        documents=len(texts),
        **{name: last[name] for name in _COUNTS},
        block_length=block_length,
        full_blocks=len(rows) - 1,
        remainder_tokens=len(last["input_ids"]),
        remainder=remainder,
        least_length=least_length,
    )
    if report.blocks == 0:
        raise ValueError(f"The texts must fill at least one block of {block_length} tokens. {report}")
    return rows.select(range(report.blocks)).select_columns("input_ids"), report
