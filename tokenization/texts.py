"""Reading of text files line by line, and checks of texts."""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from metaphrase.tokenization.tokenizer_settings import DEFAULT_JOINER


class _CompressedFile(gzip.GzipFile):
    """A `.gz` file whose errors name the file: an `OSError` if it is damaged, an `EOFError` if it is truncated."""

    def read(self, size: int | None = -1) -> bytes:
        return self._read_whole(super().read, size)

    def read1(self, size: int = -1) -> bytes:
        return self._read_whole(super().read1, size)

    def readline(self, size: int = -1) -> bytes:
        return self._read_whole(super().readline, size)

    def _read_whole(self, read: Callable[[int | None], bytes], size: int | None) -> bytes:
        try:
            return read(size)
        except (zlib.error, gzip.BadGzipFile, EOFError) as error:
            kind = EOFError if isinstance(error, EOFError) else gzip.BadGzipFile
            raise kind(f"`{self.name}` must be a compressed file that is whole, got: {error}.") from error


def open_bytes(path: str | os.PathLike) -> BinaryIO:
    """Open a file for reading, and decompress `.gz`."""
    return _CompressedFile(path, "rb") if os.fspath(path).endswith(".gz") else open(path, "rb")


def iterate_lines(
    paths: str | os.PathLike | Iterable[str | os.PathLike], keep_invalid: bool = False
) -> Iterator[str | None]:
    """Yield the lines of UTF-8 text files, plain or compressed (`.gz`), without their line ends.

    Only LF and CR LF end a line. All other line breaks of Unicode stay inside the line, so that parallel files stay
    parallel. A byte-order mark is dropped.

    Args:
        paths: One file or several.
        keep_invalid: True to yield None for a line that is not valid UTF-8, instead of an error.

    Raises:
        ValueError: If a line is not valid UTF-8.
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
