"""Text blocks: plain text, one document per line, to blocks of equally many tokens without padding."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import datasets
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from metaphrase.data.encoding import tokenizer_fingerprint
from metaphrase.data.pairs import Policy
from metaphrase.tokenization.texts import iterate_lines

Remainder = Literal["drop", "keep"]
FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "documents": datasets.Value("int64"),
        "empty_documents": datasets.Value("int64"),
        "invalid_documents": datasets.Value("int64"),
    }
)
_COUNTS = ("documents", "empty_documents", "invalid_documents")
# What one call of the tokenizer gets: it is fast with many texts, and what is alive at once stays bounded.
TEXTS_PER_CALL = 1000
CHARACTERS_PER_CALL = 1_000_000
# Part of every cache key: raise it whenever the same texts would be cut into other blocks.
CACHE_VERSION = 2


class TextEncoder(Protocol):
    """What is asked of a tokenizer: ids for each text, each list ending in the end-of-sequence token."""

    def encode_sources(self, texts: list[str]) -> list[list[int]]: ...


@dataclass
class BlockReport:
    """The account of a text: how many documents and tokens it has, and what became of them.

    Attributes:
        documents: Documents read, those that are not used included.
        empty_documents: Those that are only white space, or of which the tokenizer leaves nothing; they are not used.
        invalid_documents: Those that are not UTF-8; they are not used.
        block_length: Tokens in a full block.
        full_blocks: Blocks of so many tokens.
        remainder_tokens: Tokens behind the last full block.
        remainder: What became of these: left out ("drop") or made a shorter block ("keep").
        least_length: Tokens that a shorter block must have; fewer are left out.
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
        """All tokens, used or not."""
        return self.full_blocks * self.block_length + self.remainder_tokens

    @property
    def blocks(self) -> int:
        """All blocks, with the shorter one if the remainder is kept."""
        return self.full_blocks + self.keeps_remainder

    @property
    def keeps_remainder(self) -> bool:
        """Whether the tokens behind the last full block are a shorter one."""
        return self.remainder == "keep" and self.remainder_tokens >= max(1, self.least_length)

    def to_dict(self) -> dict[str, Any]:
        """Returns all counts as plain values, ready for JSON."""
        return {**asdict(self), "tokens": self.tokens, "blocks": self.blocks}

    def __str__(self) -> str:
        parts = [
            f"{self.documents} documents",
            f"{self.tokens} tokens",
            f"{self.full_blocks} blocks of {self.block_length} tokens",
        ]
        unused = {"empty": self.empty_documents, "not UTF-8": self.invalid_documents}
        if unused := [f"{count} {name}" for name, count in unused.items() if count]:
            parts[0] += f", not used: {', '.join(unused)}"
        if self.remainder_tokens:
            fate = "kept as a shorter block" if self.keeps_remainder else "not used"
            parts.append(f"{self.remainder_tokens} tokens behind the last block {fate}")
        return "; ".join(parts) + "."


def load_texts(
    files: str | Path | Sequence[str | Path],
    max_samples: int | None = None,
    cache_dir: str | Path | None = None,
    invalid_utf8: Policy = "error",
) -> datasets.Dataset:
    """Reads UTF-8 text files with one document per line, compressed (`.gz`) or not, into the column `text`.

    Args:
        files: The files, read one after the other.
        max_samples: The number of lines to take, from the beginning.
        cache_dir: Where `datasets` keeps what was read; its own choice by default. A changed file is read again.
        invalid_utf8: What to do with a line that is not UTF-8: "error", or "skip": then it is `None`, which `text_blocks` counts.

    Raises:
        ValueError: If a line is not UTF-8, there is no line at all, or an argument is out of range.
        FileNotFoundError: If a file does not exist.
    """
    paths = tuple(str(path) for path in ([files] if isinstance(files, str | Path) else files))
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"`max_samples` must be at least 1, got {max_samples}.")
    if invalid_utf8 not in Policy.__args__:
        raise ValueError(f"`invalid_utf8` must be one of {', '.join(Policy.__args__)}, got {invalid_utf8!r}.")
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {path}.")
    # Size and time of change are part of the arguments and so of the cache key: a changed file is read again.
    stamps = tuple(
        (str(Path(path).resolve()), Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in paths
    )
    try:
        texts = datasets.Dataset.from_generator(
            generate_texts,
            features=datasets.Features({"text": datasets.Value("string")}),
            cache_dir=None if cache_dir is None else str(cache_dir),
            gen_kwargs={
                "paths": paths,
                "stamps": stamps,
                "version": CACHE_VERSION,
                "keep_invalid": invalid_utf8 == "skip",
            },
        )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ValueError | OSError | EOFError):
            raise cause from None
        raise
    return texts if max_samples is None else texts.select(range(min(max_samples, len(texts))))


def generate_texts(
    paths: tuple[str, ...], stamps: Any, version: int, keep_invalid: bool
) -> Iterator[dict[str, str | None]]:
    """Yields the lines of the files. `stamps` and `version` only make the cache key.

    Raises:
        ValueError: If a line is not UTF-8, or there is no line at all.
    """
    is_empty = True
    for line in iterate_lines(paths, keep_invalid):
        is_empty = False
        yield {"text": line}
    if is_empty:
        raise ValueError(f"Text files must hold at least one line, got none in {', '.join(paths) or 'no file'}.")


def text_blocks(
    texts: datasets.Dataset,
    tokenizers: TextEncoder,
    block_length: int,
    *,
    end_documents: bool = True,
    remainder: Remainder = "drop",
    least_length: int = 1,
) -> tuple[datasets.Dataset, BlockReport]:
    """Joins all documents in their order and cuts them into blocks, so that no token is padding and few are lost.

    The result is cached by the data set, the tokenizer and the arguments, on disk where `texts` is on disk. One process cuts,
    since each block begins where the last one ended; a fast tokenizer uses all cores by itself.

    Args:
        texts: The column `text`, one document per row; `None` stands for one that could not be read.
        tokenizers: A joint pair of tokenizers.
        block_length: Tokens in each block.
        end_documents: Keep the end of sequence behind each document, so that a model sees where one ends. T5 joined
            documents without.
        remainder: What becomes of the tokens behind the last full block: "drop", or "keep" as a shorter block.
        least_length: Tokens that such a block must have; fewer are left out, and counted.

    Returns:
        The column `input_ids`, and the report.

    Raises:
        ValueError: If an argument is out of range, the tokenizers are not joint, or there is no block.
    """
    cutter = _BlockCutter(texts.column_names, tokenizers, block_length, end_documents, remainder)
    if (num_texts := len(texts)) == 0:
        raise ValueError("`texts` must hold at least one document, got none.")

    def cut(batch: list[str | None], rows: list[int]) -> dict[str, list[Any]]:
        blocks = cutter.add(batch)
        counts = [(0, 0, 0)] * len(blocks)
        if rows[-1] == num_texts - 1:
            # A run that reads the cache needs the counts too: they stand beside the remainder, which may be empty.
            blocks.append(cutter.rest)
            counts.append(tuple(getattr(cutter.report, name) for name in _COUNTS))
        return {
            "input_ids": blocks,
            **{name: [of_block[index] for of_block in counts] for index, name in enumerate(_COUNTS)},
        }

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


def iterate_blocks(
    texts: Iterable[str],
    tokenizers: TextEncoder,
    block_length: int,
    *,
    end_documents: bool = True,
    remainder: Remainder = "drop",
    report: BlockReport | None = None,
) -> Iterator[list[int]]:
    """Yields the blocks of `text_blocks` one by one, from texts that may never end.

    Besides one block, at most `TEXTS_PER_CALL` documents or about `CHARACTERS_PER_CALL` characters are in memory, or one
    document if it is longer.

    Args:
        texts: The documents.
        tokenizers: As for `text_blocks`, like the other arguments.
        report: Receives the counts; they are right whenever a block is yielded, and at the end.

    Raises:
        ValueError: As `text_blocks` does, but for a text without any block.
    """
    cutter = _BlockCutter(["text"], tokenizers, block_length, end_documents, remainder, report)
    return _iterate(texts, cutter)


def _iterate(texts: Iterable[str], cutter: "_BlockCutter") -> Iterator[list[int]]:
    # Apart from the function above, so that a wrong argument is an error before the first block is asked for.
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == TEXTS_PER_CALL or size >= CHARACTERS_PER_CALL:
            yield from cutter.add(batch)
            batch, size = [], 0
    if batch:
        yield from cutter.add(batch)
    if cutter.rest and cutter.report.remainder == "keep":
        yield cutter.rest


class _BlockCutter:
    """Joins the tokens of documents to one stream and cuts it into blocks; keeps less than one block between calls."""

    def __init__(
        self,
        columns: Sequence[str],
        tokenizers: TextEncoder,
        block_length: int,
        end_documents: bool,
        remainder: str,
        report: BlockReport | None = None,
    ):
        if "text" not in columns:
            raise ValueError(f"`texts` must have the column text, got {list(columns)}.")
        if block_length < 2:
            raise ValueError(f"`block_length` must be at least 2, got {block_length}.")
        if remainder not in Remainder.__args__:
            raise ValueError(f"`remainder` must be one of {', '.join(Remainder.__args__)}, got {remainder!r}.")
        if not getattr(tokenizers, "is_joint", True):
            raise ValueError("`tokenizers` must be joint, because a block goes to both sides, got one for each side.")
        probe = tokenizers.encode_sources([""])[0]
        if not probe:
            raise ValueError("The tokenizer must end each list of ids in the end-of-sequence token, got [] for ''.")
        self.tokenizers = tokenizers
        self.end_documents = end_documents
        self.end_id = probe[-1]
        self.rest: list[int] = []
        self.report = BlockReport() if report is None else report
        self.report.block_length, self.report.remainder = block_length, remainder

    def add(self, texts: Sequence[str | None]) -> list[list[int]]:
        """Takes further documents and returns the blocks that are now full."""
        report, length = self.report, self.report.block_length
        valid = [text for text in texts if text is not None]
        report.documents += len(texts)
        report.invalid_documents += len(texts) - len(valid)
        for text, ids in zip(valid, self.tokenizers.encode_sources(valid), strict=True):
            if not ids or ids[-1] != self.end_id:
                raise ValueError(f"The tokenizer must end each list of ids in {self.end_id}, got {ids[-5:]} as end.")
            if not text.strip() or len(ids) == 1:
                report.empty_documents += 1
                continue
            self.rest += ids if self.end_documents else ids[:-1]
        stop = len(self.rest) - len(self.rest) % length
        blocks = [self.rest[start : start + length] for start in range(0, stop, length)]
        del self.rest[:stop]
        report.full_blocks += len(blocks)
        report.remainder_tokens = len(self.rest)
        return blocks
