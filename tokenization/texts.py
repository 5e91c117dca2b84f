"""Texts: read line by line from files, and checked one by one before they are used."""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Literal, overload

from metaphrase.tokenization.tokenizer_settings import DEFAULT_JOINER


class _CompressedFile(gzip.GzipFile):
    """A `.gz` file to read, whose errors name it: an `OSError` if it is damaged or no such file, an `EOFError` if cut short."""

    def read(self, size: int | None = -1) -> bytes:
        return self._whole(super().read, size)

    def read1(self, size: int = -1) -> bytes:
        return self._whole(super().read1, size)

    def readline(self, size: int = -1) -> bytes:
        return self._whole(super().readline, size)

    def _whole(self, read: Callable[[int | None], bytes], size: int | None) -> bytes:
        try:
            return read(size)
        except (zlib.error, gzip.BadGzipFile, EOFError) as error:
            kind = EOFError if isinstance(error, EOFError) else gzip.BadGzipFile
            raise kind(f"`{self.name}` must be a compressed file that is whole, got: {error}.") from error


def open_bytes(path: str | os.PathLike) -> BinaryIO:
    """Opens a file for reading, decompressing `.gz`."""
    return _CompressedFile(path, "rb") if os.fspath(path).endswith(".gz") else open(path, "rb")


@overload
def iterate_lines(
    paths: str | os.PathLike | Iterable[str | os.PathLike], keep_invalid: Literal[False] = False
) -> Iterator[str]: ...


@overload
def iterate_lines(
    paths: str | os.PathLike | Iterable[str | os.PathLike], keep_invalid: bool
) -> Iterator[str | None]: ...


def iterate_lines(
    paths: str | os.PathLike | Iterable[str | os.PathLike], keep_invalid: bool = False
) -> Iterator[str | None]:
    """The lines of UTF-8 text files, one file after the other, without their line ends. A file may be compressed (`.gz`).

    Only a line feed, or a carriage return and a line feed, ends a line: the other characters that Unicode counts as line
    breaks stay inside the line, so the lines of two parallel files cannot drift apart. Empty lines are yielded as empty
    strings. A byte-order mark at the start of a file is left out.

    Args:
        paths: The files.
        keep_invalid: Whether `None` comes in the place of a line that is not valid UTF-8, rather than an error.

    Raises:
        ValueError: If a line is not valid UTF-8. The message names the file and the line.
        FileNotFoundError: If a file is missing.
    """
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        with open_bytes(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                try:
                    yield line.decode("utf-8")
                except UnicodeDecodeError as error:
                    if keep_invalid:
                        yield None
                        continue
                    raise ValueError(
                        f"`{os.fspath(path)}` must be UTF-8, but line {number} has the byte 0x{line[error.start]:02x} "
                        f"at position {error.start} ({error.reason})."
                    ) from error


def checked_texts(texts: Iterable[str], name: str = "texts") -> Iterator[str]:
    """The same texts, each checked as it is reached.

    Args:
        texts: Any number of them.
        name: What they were given as.

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
    """Joins the pieces of a text that was split into subwords, as decoding with a `pretokenized` tokenizer does.

    Args:
        text: Such as `an@@ trie@@ b .`
        joiner: Ends every piece that the next one continues. `None` means `@@`.
    """
    return re.sub(re.escape(joiner or DEFAULT_JOINER) + "(?: |$)", "", text)
