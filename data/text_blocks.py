"""Text blocks: cut plain text, one document per line, into blocks of equally many tokens without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets.fingerprint import Hasher

from metaphrase.data.fingerprints import tokenizer_fingerprint
from metaphrase.data.pairs import Policy, check_files, read_cached
from metaphrase.tokenization import TokenizerPair, iterate_lines
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS

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
