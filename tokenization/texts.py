"""Reading of text files line by line, and checks of texts."""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from metaphrase.tokenization.tokenizer_settings import DEFAULT_JOINER


class Line(NamedTuple):
    """A line of a text file.

    Attributes:
        number: Its number from 1.
        text: Its text with the line end. Bytes that are not UTF-8 are lone surrogates.
        problem: Message about the first byte that is not UTF-8; empty if there is none.
    """

    number: int
    text: str
    problem: str = ""

    @property
    def content(self) -> str:
        """The text without the line end."""
        return self.text.removesuffix("\n").removesuffix("\r")


def read_bytes(path: str | os.PathLike) -> Iterator[bytes]:
    """Yield the lines of a file, plain or compressed (`.gz`), with their ends but without a byte-order mark.

    Raises:
        OSError: If a compressed file is damaged.
        EOFError: If a compressed file is truncated.
    """
    with gzip.open(path) if os.fspath(path).endswith(".gz") else open(path, "rb") as file:
        try:
            for index, line in enumerate(file):
                yield line if index else line.removeprefix(codecs.BOM_UTF8)
        except (zlib.error, gzip.BadGzipFile, EOFError) as error:
            kind = EOFError if isinstance(error, EOFError) else gzip.BadGzipFile
            raise kind(f"`{os.fspath(path)}` must be a compressed file that is whole, got: {error}.") from error


def read_lines(path: str | os.PathLike) -> Iterator[Line]:
    """Yield the lines of a UTF-8 text file. Errors are as for `read_bytes`.

    Only LF and CR LF end a line. All other line breaks of Unicode stay inside the line, so that parallel files stay
    parallel.
    """
    for number, line in enumerate(read_bytes(path), start=1):
        try:
            text, problem = line.decode("utf-8"), ""
        except UnicodeDecodeError as error:
            text = line.decode("utf-8", errors="surrogateescape")
            problem = (
                f"`{os.fspath(path)}` must be UTF-8, but line {number} has the byte 0x{line[error.start]:02x} "
                f"at position {error.start} ({error.reason})."
            )
        yield Line(number, text, problem)


def iterate_lines(
    paths: str | os.PathLike | Iterable[str | os.PathLike], keep_invalid: bool = False
) -> Iterator[str | None]:
    """Yield the lines of UTF-8 text files, plain or compressed (`.gz`), without their line ends (see `read_lines`).

    Args:
        paths: One file or several.
        keep_invalid: True to yield None for a line that is not valid UTF-8, instead of an error.

    Raises:
        ValueError: If a line is not valid UTF-8.
        FileNotFoundError: If a file is missing.
    """
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        for line in read_lines(path):
            if line.problem and not keep_invalid:
                raise ValueError(line.problem)
            yield None if line.problem else line.content


def checked_texts(texts: Iterable[str], name: str = "texts") -> Iterator[str]:
    """Yield the same texts, and check each of them.

    Args:
        texts: Any number of texts.
        name: The argument's name, for errors.

    Raises:
        ValueError: If `texts` is a single string, or holds anything but strings that UTF-8 can write.
    """
    if isinstance(texts, str):
        raise ValueError(f"`{name}` must hold one text each, got the single string {texts[:40]!r}.")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise ValueError(f"`{name}` must hold strings only, got {type(text).__name__} as text {number}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`{name}` must be valid Unicode, got the lone surrogate {text[error.start]!r} in text {number}."
            ) from error
        yield text


def join_pieces(text: str, joiner: str | None = None) -> str:
    """Join the subwords of a text, as a `pretokenized` tokenizer decodes them.

    Args:
        text: Such as `an@@ trie@@ b .`
        joiner: Suffix of each piece that the next piece continues. None means `@@`.
    """
    return re.sub(re.escape(joiner or DEFAULT_JOINER) + "(?: |$)", "", text)
