"""Text blocks: cut plain text, one document per line, into blocks of equally many tokens without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets.fingerprint import Hasher

from metaphrase.data.encoding import PairEncoder
from metaphrase.data.fingerprints import tokenizer_fingerprint
from metaphrase.data.pairs import Policy, check_files, check_max_samples, check_policy, read_cached
from metaphrase.tokenization.texts import iterate_lines

Remainder = Literal["drop", "keep"]
_COUNTS = ("documents", "empty_documents", "invalid_documents")
FEATURES = datasets.Features(
    {"input_ids": datasets.List(datasets.Value("int32")), **{name: datasets.Value("int64") for name in _COUNTS}}
)
TEXTS_PER_CALL = 1000
# Part of every cache key. Raise it when the same texts would be cut into other blocks.
CACHE_VERSION = 2


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
) -> datasets.Dataset:
    """Read UTF-8 text files with one document per line, compressed (`.gz`) or not, into the column `text`.

    Args:
        files: The files, read one after the other.
        max_samples: Number of lines to take from the beginning.
        cache_dir: Cache folder of `datasets`. A changed file is read again.
        invalid_utf8: "error", or "skip" to make a line that is not UTF-8 a `None`, which `text_blocks` counts.

    Raises:
        ValueError: If a line is not UTF-8, there is no line at all, or an argument is out of range.
        FileNotFoundError: If a file does not exist.
    """
    paths = tuple(str(path) for path in ([files] if isinstance(files, str | Path) else files))
    check_max_samples(max_samples)
    check_policy("invalid_utf8", invalid_utf8)
    check_files(paths)
    features = datasets.Features({"text": datasets.Value("string")})
    keep_invalid = invalid_utf8 == "skip"
    texts = read_cached(generate_texts, paths, features, CACHE_VERSION, cache_dir, keep_invalid=keep_invalid)
    return texts if max_samples is None else texts.select(range(min(max_samples, len(texts))))


def generate_texts(paths: tuple[str, ...], cache_key: Any, keep_invalid: bool) -> Iterator[dict[str, str | None]]:
    """Yield the lines of the files. The cache key is not read.

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
    tokenizers: PairEncoder,
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
        ValueError: If an argument is out of range, the tokenizers are not joint, or there is no block.
    """
    if "text" not in texts.column_names:
        raise ValueError(f"`texts` must have the column text, got {texts.column_names}.")
    if (num_texts := len(texts)) == 0:
        raise ValueError("`texts` must hold at least one document, got none.")
    if block_length < 2:
        raise ValueError(f"`block_length` must be at least 2, got {block_length}.")
    if remainder not in Remainder.__args__:
        raise ValueError(f"`remainder` must be one of {', '.join(Remainder.__args__)}, got {remainder!r}.")
    if not getattr(tokenizers, "is_joint", True):
        raise ValueError("`tokenizers` must be joint, because a block goes to both sides, got two tokenizers.")
    cutter = _BlockCutter(tokenizers, block_length, end_documents)

    def cut(batch: list[str | None], rows: list[int]) -> dict[str, list[Any]]:
        blocks = cutter.add(batch)
        counts = [(0, 0, 0)] * len(blocks)
        if rows[-1] == num_texts - 1:
            # The last row holds the remainder, which may be empty, and the counts, so that a cached run has them too.
            blocks.append(cutter.rest)
            counts.append(cutter.counts)
        columns = map(list, zip(*counts, strict=True)) if counts else ([], [], [])
        return {"input_ids": blocks, **dict(zip(_COUNTS, columns, strict=True))}

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


class _BlockCutter:
    """Joins documents to one stream of tokens and cuts it into blocks. Holds less than one block between calls.

    Attributes:
        rest: Tokens behind the last block.
        counts: Documents in all, empty documents, invalid documents.
    """

    def __init__(self, tokenizers: PairEncoder, block_length: int, end_documents: bool):
        probe = tokenizers.encode_sources([""])[0]
        if not probe:
            raise ValueError("The tokenizer must end each list of ids in the end-of-sequence token, got [] for ''.")
        self.tokenizers, self.block_length, self.end_documents = tokenizers, block_length, end_documents
        self.end_id = probe[-1]
        self.rest: list[int] = []
        self.counts = [0, 0, 0]

    def add(self, texts: Sequence[str | None]) -> list[list[int]]:
        """Add documents and return the blocks that are now full."""
        valid = [text for text in texts if text is not None]
        self.counts[0] += len(texts)
        self.counts[2] += len(texts) - len(valid)
        for text, ids in zip(valid, self.tokenizers.encode_sources(valid), strict=True):
            if not ids or ids[-1] != self.end_id:
                raise ValueError(f"The tokenizer must end each list of ids in {self.end_id}, got {ids[-5:]} as end.")
            if not text.strip() or len(ids) == 1:
                self.counts[1] += 1
                continue
            self.rest += ids if self.end_documents else ids[:-1]
        stop = len(self.rest) - len(self.rest) % self.block_length
        blocks = [self.rest[start : start + self.block_length] for start in range(0, stop, self.block_length)]
        del self.rest[:stop]
        return blocks
