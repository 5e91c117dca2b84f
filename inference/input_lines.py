"""Input lines: the sources of a command, from a file or from standard input."""

import codecs
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from metaphrase.tokenization import iterate_lines
from metaphrase.tokenization.texts import open_bytes


def read_lines(path: str | None) -> Iterator[str]:
    """The lines of a file (`.gz` or not) or of standard input, as they come; only a line feed ends one, so that as many go out.

    Raises:
        ValueError: If a line is not valid UTF-8. The message says which.
    """
    if path is not None:
        yield from iterate_lines(path)
        return
    for number, line in enumerate(_open_standard_input(), start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"Standard input must be UTF-8, but line {number} is not ({error}).") from error


def check_files(
    input_path: str | None,
    output_path: str | os.PathLike | None,
    input_name: str = "input",
    output_name: str = "output",
) -> None:
    """Fails before any work.

    Args:
        input_path: What is read.
        output_path: What is written.
        input_name: Of the option that says so, for messages.
        output_name: Likewise.

    Raises:
        ValueError: If both are the same file, or the output's name says that it is compressed.
        OSError: If the input cannot be read.
    """
    if output_path is not None and os.fspath(output_path).endswith(".gz"):
        raise ValueError(
            f"`{output_name}` must not end in .gz, as it is written without compression, got {os.fspath(output_path)!r}."
        )
    if input_path is None:
        return
    if not Path(input_path).is_fifo():  # Opening and closing a pipe would stop its writer.
        with open(input_path, "rb"):
            pass
    if output_path is not None and os.path.exists(output_path) and os.path.samefile(input_path, output_path):
        raise ValueError(
            f"`{output_name}` must be another file than `{input_name}`, got {os.fspath(output_path)!r} for both."
        )


def count_lines(path: str | None) -> int | None:
    """For a progress bar that somebody sees; `None` for what cannot be read twice."""
    if path is None or not Path(path).is_file() or not sys.stderr.isatty():
        return None
    with open_bytes(path) as file:
        return sum(1 for _ in file)


def _open_standard_input() -> BinaryIO:
    """A file of its own: Python cannot close `sys.stdin` at its end while a thread still waits for a line of it."""
    if sys.stdin is None:
        raise ValueError("`input` must be a file where standard input is closed, got None.")
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:
        # It is no file of the system's.
        return sys.stdin.buffer
