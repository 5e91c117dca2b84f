"""Reading of text files line by line, checks of texts, and batches of similar length."""

import codecs
import contextlib
import gzip
import itertools
import math
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from metaphrase.errors import MetaphraseError

DEFAULT_JOINER = "@@"
# Around a term that a source asks for. They stand behind the word that the term translates.
TERM_TOKENS = ("<term>", "</term>")
# Stands before each feature of a word, such as `;PST` in the files of SIGMORPHON.
FEATURE_MARK = ";"
# A longer line is hardly text, and tokenizers and models take much time and memory for it.
MAX_LINE_CHARACTERS = 100_000
_BYTES_PER_CHUNK = 2**20


class Line(NamedTuple):
    """A line of a text file, with its number from 1, and the problem with it, if any, as a message.

    Bytes that are not UTF-8 are lone surrogates. Of a line that is too long, the text is the beginning. The kind of a problem is
    "line_too_long" or "invalid_utf8".
    """

    number: int
    text: str
    problem: str = ""
    kind: str = ""


@contextlib.contextmanager
def open_bytes(path: str | os.PathLike | None) -> Iterator[Any]:
    """Open a text file, plain or compressed (`.gz`); None is standard input. A damaged compressed file is an `OSError`."""
    if path is None:
        yield sys.stdin.buffer
        return
    with gzip.open(path, "rb") if os.fspath(path).endswith(".gz") else open(path, "rb") as file:
        try:
            yield file
        except (zlib.error, gzip.BadGzipFile, EOFError) as error:
            text = f"`{os.fspath(path)}` must be a compressed file that is whole, got: {error}."
            raise gzip.BadGzipFile(text) from error


def count_lines(path: str | os.PathLike | None) -> int | None:
    """Return the number of lines of a file, plain or compressed; None for a pipe or standard input."""
    is_stream = path is None or (os.path.exists(path) and not os.path.isfile(path))
    return None if is_stream else line_offsets(path, unit=sys.maxsize)[1]


def line_offsets(path: str | os.PathLike, unit: int) -> tuple[np.ndarray, int]:
    """Return where each `unit`-th line of a file begins, in bytes that are not compressed, and the number of lines."""
    offsets, count, position, chunk = [0], 0, 0, b"\n"
    with open_bytes(path) as file:
        while following := file.read(_BYTES_PER_CHUNK):
            chunk = following
            ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            offsets += (position + 1 + ends[unit - 1 - count % unit :: unit]).tolist()
            count, position = count + len(ends), position + len(chunk)
    return np.asarray(offsets), count + (not chunk.endswith(b"\n"))


def shard_range(total: int, shard: tuple[int, int] | None, unit: int = 1) -> range:
    """Return the items of one of several parts of nearly equal size, which may be empty. A part starts at a multiple of `unit`.

    `shard` is the number of the part, from 1, and the number of parts; None is for all items.
    """
    number, num_shards = shard or (1, 1)
    num_units = -(-total // unit)
    start, end = (num_units * part // num_shards * unit for part in (number - 1, number))
    return range(start, min(end, total))


def read_lines(
    path: str | os.PathLike | None,
    max_line_characters: int = MAX_LINE_CHARACTERS,
    keepends: bool = False,
    span: tuple[int, int] = (0, sys.maxsize),
) -> Iterator[Line]:
    """Yield the lines of a UTF-8 text file, or of standard input, without a byte-order mark. The memory for a line is bounded.

    Only LF and CR LF end a line. All other line breaks of Unicode stay inside the line, so that parallel files stay
    parallel. A file in UTF-16 is a `MetaphraseError`. Of a span of bytes, the lines that begin in it are read and counted.
    """
    name = "standard input" if path is None else f"`{os.fspath(path)}`"
    # A character has at most four bytes. The other bytes are a byte-order mark and the line end.
    size = min(4 * max_line_characters + 5, sys.maxsize)
    start, stop = span
    with open_bytes(path) as file:
        if start:
            file.seek(start - 1)
            # The end of a line that begins before the span.
            while (end := file.readline(size)) and not end.endswith(b"\n"):
                pass
            start = file.tell()
        for number in itertools.count(1):
            if start >= stop or not (line := file.readline(size)):
                return
            end = line
            start += len(line)
            while len(end) == size and not end.endswith(b"\n"):
                end = file.readline(size)
                start += len(end)
            if number == 1 and not span[0]:
                if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise MetaphraseError(f"{name} must be UTF-8, got UTF-16. Convert it with iconv -f UTF-16 -t UTF-8")
                line = line.removeprefix(codecs.BOM_UTF8)
            problem = kind = ""
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                text, kind = line.decode("utf-8", errors="surrogateescape"), "invalid_utf8"
                problem = (
                    f"{name} must be UTF-8, but line {number} has the byte 0x{line[error.start]:02x} "
                    f"at position {error.start} ({error.reason})."
                )
            if len(text) > max_line_characters and len(text.rstrip("\r\n")) > max_line_characters:
                kind = "line_too_long"
                problem = (
                    f"Each line of {name} must have at most {max_line_characters} characters, but line {number} has more. "
                    "Set `max_line_characters` higher to read it."
                )
            yield Line(number, text if keepends else text.removesuffix("\n").removesuffix("\r"), problem, kind)


def iterate_lines(
    paths: str | os.PathLike | Iterable[str | os.PathLike] | None,
    max_line_characters: int = MAX_LINE_CHARACTERS,
    keep_invalid: bool = False,
) -> Iterator[str | None]:
    """Yield the lines of UTF-8 text files, or of standard input, without their line ends (see `read_lines`).

    A line that is too long or not valid UTF-8 is a `MetaphraseError`. With `keep_invalid` an invalid line is None instead.
    """
    for path in [paths] if paths is None or isinstance(paths, str | os.PathLike) else paths:
        for line in read_lines(path, max_line_characters):
            if line.problem and not (keep_invalid and line.kind == "invalid_utf8"):
                raise MetaphraseError(line.problem)
            yield None if line.problem else line.text


def checked_texts(texts: Iterable[str], name: str = "texts") -> Iterator[str]:
    """Yield the same texts, and check each of them.

    Raises `MetaphraseError` if `texts` is a single string, or holds anything but strings that UTF-8 can write.
    """
    if isinstance(texts, str):
        raise MetaphraseError(f"`{name}` must hold one text each, got the single string {texts[:40]!r}.")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise MetaphraseError(f"`{name}` must hold strings only, got {type(text).__name__} as text {number}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise MetaphraseError(
                f"`{name}` must be valid Unicode, got the lone surrogate {text[error.start]!r} in text {number}."
            ) from error
        yield text


def join_columns(text: str, *columns: str) -> str:
    """Return a text with the features of other columns behind it, such as `run;PST;V` for `run` and `V;PST`.

    They are sorted, so that their order has no meaning. Wu et al. 2021, arXiv 2005.10213, let the network ignore it.
    """
    features = (feature for column in columns for feature in column.split(FEATURE_MARK) if feature)
    return FEATURE_MARK.join([text, *sorted(features)])


def join_pieces(text: str, joiner: str | None = None) -> str:
    """Join the pieces of a text such as `an@@ trie@@ b .`, as a `pretokenized` tokenizer decodes them.

    `joiner` is the suffix of each piece that the next piece continues; None means `@@`.
    """
    return re.sub(re.escape(joiner or DEFAULT_JOINER) + "(?: |$)", "", text)


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Return batches of the indices of sources of similar length, longest first.

    A batch that does not fit into memory fails at once. A source of more than `max_tokens_per_batch` has a separate batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # A source alone counts as a pair with an empty target.
    return cut_into_batches(longest_first, [(lengths[i], 0) for i in longest_first], max_tokens_per_batch, batch_size)


def cut_into_batches(
    order: ArrayLike, lengths: ArrayLike, max_tokens_per_batch: int, batch_size: float = math.inf
) -> list[list[int]]:
    """Cut an order of pairs into consecutive batches, each as large as the bounds allow.

    `lengths` are those of source and target in that order. The tokens of a batch count padding, on both sides. A longer pair has
    a separate batch.
    """
    indices = np.asarray(order, dtype=np.int64).tolist()
    source, target = np.ascontiguousarray(np.asarray(lengths, dtype=np.int64).reshape(-1, 2).T)
    ends, span = [0], 32
    while (start := ends[-1]) < len(indices):
        part = slice(start, start + span)
        widths = np.maximum.accumulate(source[part]) + np.maximum.accumulate(target[part])
        size = int(np.searchsorted(widths * np.arange(1, len(widths) + 1), max_tokens_per_batch, side="right"))
        if size < span or span >= batch_size:
            ends.append(start + max(1, int(min(size, batch_size))))
        # The next batch is about as large.
        span = 2 * max(size, 1)
    return [indices[start:end] for start, end in itertools.pairwise(ends)]
