"""Read sources line by line, and write targets line by line, to a new file or to that of a stopped run."""

import codecs
import io
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from metaphrase.storage.write_lock import WriteLock
from metaphrase.tokenization import iterate_lines
from metaphrase.tokenization.texts import read_bytes

if TYPE_CHECKING:
    from metaphrase.inference.run import ScoredText

_SEPARATOR = " ||| "
# Scores have six decimals. Another number of threads may change the last ones.
_SCORE_TOLERANCE = 1e-4


def read_lines(path: str | None) -> Iterator[str]:
    """Yield the lines of a file (`.gz` or not) or of standard input. Only a line feed ends a line.

    Raises:
        ValueError: If a line is not valid UTF-8.
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
    """Check input and output before any work.

    Args:
        input_path: File to read, or `None`.
        output_path: File to write, or `None`.
        input_name: Option of the input, for messages.
        output_name: Option of the output, for messages.

    Raises:
        ValueError: If both are the same file, or the output ends in `.gz`.
        OSError: If the input cannot be read.
    """
    if output_path is not None and os.fspath(output_path).endswith(".gz"):
        raise ValueError(
            f"`{output_name}` must not end in .gz, because it is not compressed, got {os.fspath(output_path)!r}."
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
    """Return the number of lines for a progress bar on a terminal; `None` without terminal or for a pipe."""
    if path is None or not Path(path).is_file() or not sys.stderr.isatty():
        return None
    return sum(1 for _ in read_bytes(path))


def _open_standard_input() -> BinaryIO:
    """Open a copy of standard input. Python cannot close `sys.stdin` at exit while a thread waits for a line of it."""
    if sys.stdin is None:
        raise ValueError("`input` must be a file if standard input is closed, got None.")
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:
        # `sys.stdin` was replaced by an object without file descriptor.
        return sys.stdin.buffer


def format_targets(index: int, candidates: Sequence["ScoredText"], with_scores: bool) -> str:
    """Return the lines of the targets of one source.

    Args:
        index: Index of the source, from 0.
        candidates: Targets of the source.
        with_scores: True for `index ||| target ||| score`, False for the target alone.
    """
    if not with_scores:
        return as_lines(candidate.text for candidate in candidates)
    return as_lines(_SEPARATOR.join([str(index), c.text, f"{c.score:.6f}"]) for c in candidates)


def as_lines(texts: Iterable[str]) -> str:
    """Return one line for each text, with spaces in place of line breaks inside a text."""
    return "".join(text.replace("\r", " ").replace("\n", " ") + "\n" for text in texts)


class OutputStream:
    """Writer of targets, source by source.

    Attributes:
        first_source: Index of the first source to write.
    """

    first_source = 0

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, lines: str) -> None:
        """Write the lines of the next source."""
        self._stream.write(lines)
        self._stream.flush()

    def finish(self) -> None:
        """Finish after the last source."""


def standard_output() -> IO[str]:
    """Return standard output, set to UTF-8 with line feeds, whatever the locale.

    Raises:
        ValueError: If standard output is closed.
    """
    if sys.stdout is None:
        raise ValueError("`output` must be a file if standard output is closed, got None.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return sys.stdout


class NewFile(OutputStream):
    """Writer of a new file. An old file of that name keeps its content until the first write."""

    def __init__(self, path: str | os.PathLike, name: str = "output"):
        """Open the file, so that an error comes before any work.

        Args:
            path: The file.
            name: Option that names the file, for messages.

        Raises:
            ValueError: If another run is writing the file.
        """
        super().__init__(open(path, "w", encoding="utf-8", newline="\n", opener=_open_untouched))  # noqa: SIM115
        self._is_emptied = False
        try:
            self._lock = WriteLock(path, name)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()
        self._lock.release()

    def write(self, lines: str) -> None:
        self._empty()
        super().write(lines)

    def finish(self) -> None:
        # Without sources nothing was written yet.
        self._empty()

    def _empty(self) -> None:
        # Pipes and devices cannot be truncated.
        if not self._is_emptied and stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            self._stream.truncate(0)
        self._is_emptied = True


class ResumedFile(OutputStream):
    """Writer that resumes the file of a stopped run.

    The file alone tells how far the run came: whole lines count, and sources with all their targets. The chunk of the last
    complete source is decoded again in full, because batches depend on the chunk. Its lines must equal those in the file, and an
    incomplete end must be the beginning of the next line. Only then the incomplete end is cut off, and writing goes on.

    Attributes:
        first_source: Index of the first source of that chunk.
        num_done: Number of complete sources in the file.
    """

    def __init__(self, path: str | os.PathLike, *, num_targets: int, with_scores: bool, chunk_size: int):
        """Open the file and find out how far it goes.

        Args:
            path: The file. A missing file is created.
            num_targets: Targets of each source.
            with_scores: As for `format_targets`.
            chunk_size: Sources that are decoded together.

        Raises:
            ValueError: If the file is not regular, holds other lines than such targets, or another run is writing it.
        """
        check_regular(path)
        self.path, self._num_targets, self._with_scores = Path(path), num_targets, with_scores
        self.num_done = 0
        # Never truncated here: another run may have just begun the file.
        self._file = open(path, "r+b", opener=_open_or_create)  # noqa: SIM115 (closed by the context)
        self._lock = None
        try:
            self._lock = WriteLock(path, "output")
            start, self._end = self._measure(chunk_size)
            self._has_more = self._file.seek(0, os.SEEK_END) > self._end
            self._file.seek(start)
        except BaseException:
            self._close()
            raise
        self._source = self.first_source
        self._is_cut = False

    def __enter__(self) -> "ResumedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def write(self, lines: str) -> None:
        """See `OutputStream`.

        Raises:
            ValueError: If the file holds other lines for this source.
        """
        if self._source < self.num_done:
            self._compare(lines)
        else:
            self._cut(lines)
            self._file.write(lines.encode("utf-8"))
            self._file.flush()
        self._source += 1

    def finish(self) -> None:
        """See `OutputStream`.

        Raises:
            ValueError: If the file holds targets of more sources than there are.
        """
        if self._source < self.num_done or (self._has_more and not self._is_cut):
            raise ValueError(
                f"`output` must not hold targets of more sources than the input has, got {self.num_done} complete ones "
                f"{'and an incomplete one ' if self._has_more else ''}in {self.path}. Leave out --resume to start again."
            )

    def _close(self) -> None:
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _measure(self, chunk_size: int) -> tuple[int, int]:
        """Return the byte offsets of the last complete source: start of its chunk, and end."""
        start = source_start = end = offset = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            source, target = divmod(number, self._num_targets)
            if self._with_scores and not line.startswith(f"{source}{_SEPARATOR}".encode()):
                raise ValueError(
                    f"`output` must hold {self._num_targets} lines `index{_SEPARATOR}target{_SEPARATOR}score` for each source "
                    f"to be resumed, but line {number + 1} of {self.path} is not of source {source}. "
                    "Leave out --resume to start again."
                )
            if target == 0:
                source_start = offset
            offset += len(line)
            if target == self._num_targets - 1:
                self.num_done, end = source + 1, offset
                if source % chunk_size == 0:
                    self.first_source, start = source, source_start
        return start, end

    def _compare(self, lines: str) -> None:
        for expected in _with_ends(lines):
            line = self._file.readline().decode("utf-8", errors="replace")
            if not (line == expected or (self._with_scores and _is_close(line, expected))):
                raise self._mismatch(line, expected)

    def _cut(self, lines: str) -> None:
        """Cut off the incomplete end, after checking that it is the beginning of `lines`."""
        if self._is_cut:
            return
        self._file.seek(self._end)
        for expected in _with_ends(lines):
            line = self._file.readline()
            is_begun = expected.encode("utf-8").startswith(line)
            if not (is_begun or (self._with_scores and _is_close_beginning(line, expected))):
                raise self._mismatch(line.decode("utf-8", errors="replace"), expected)
        self._file.seek(self._end)
        self._file.truncate()
        self._is_cut = True

    def _mismatch(self, line: str, expected: str) -> ValueError:
        return ValueError(
            f"`output` must hold the lines of this command to be resumed, but in {self.path} source {self._source} has "
            f"{line.rstrip()!r} instead of {expected.rstrip()!r}. Use the model, input and options of the stopped run, or "
            "leave out --resume to start again."
        )


def _open_untouched(path: str, flags: int) -> int:
    """Opener for `open(path, "w")` that does not truncate the file."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _open_or_create(path: str, flags: int) -> int:
    """Opener for `open(path, "r+b")` that creates a missing file."""
    return os.open(path, flags | os.O_CREAT, 0o666)


def check_regular(path: str | os.PathLike) -> None:
    """Raise `ValueError` for a pipe, a device or a folder, which cannot be resumed."""
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"`output` must be a regular file with `resume`, got {os.fspath(path)!r}.")


def _is_close(line: str, expected: str) -> bool:
    """Return True if two lines differ at most in the last digits of the score."""
    (*text, score), (*expected_text, expected_score) = (row.rsplit(_SEPARATOR, 1) for row in (line, expected))
    try:
        is_close = math.isclose(float(score), float(expected_score), rel_tol=_SCORE_TOLERANCE, abs_tol=_SCORE_TOLERANCE)
    except ValueError:
        return False
    return is_close and text == expected_text


def _is_close_beginning(line: bytes, expected: str) -> bool:
    """Return True if a line equals `expected` up to its score, of which it may have the first digits only."""
    if line.endswith(b"\n"):
        return _is_close(line.decode("utf-8", errors="replace"), expected)
    return line.startswith((expected.rsplit(_SEPARATOR, 1)[0] + _SEPARATOR).encode("utf-8"))


def _with_ends(lines: str) -> list[str]:
    """Split lines at line feeds only, and keep these."""
    return [line + "\n" for line in lines.split("\n")[:-1]]
