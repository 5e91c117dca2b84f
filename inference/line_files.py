"""Input lines: the sources of a command, from a file or from standard input.

Output file: the targets of a run as lines, which a run that was stopped goes on with.
"""

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


if TYPE_CHECKING:
    from metaphrase.inference.run import ScoredText

_SEPARATOR = " ||| "
# What the same model may say otherwise on another number of threads, where scores have six decimals.
_SCORE_TOLERANCE = 1e-4


def format_targets(index: int, candidates: Sequence["ScoredText"], with_scores: bool) -> str:
    """The lines of a source's targets.

    Args:
        index: Of the source, from 0.
        candidates: Its targets.
        with_scores: Whether it is `index ||| target ||| score`, or the target alone.
    """
    lines = []
    for candidate in candidates:
        lines.append(
            _SEPARATOR.join([str(index), candidate.text, f"{candidate.score:.6f}"]) if with_scores else candidate.text
        )
    return as_lines(lines)


def as_lines(texts: Iterable[str]) -> str:
    """One line for each text: a line break of its own must not become a second line."""
    return "".join(text.replace("\r", " ").replace("\n", " ") + "\n" for text in texts)


class OutputStream:
    """Writes the targets of one source after the other, each as soon as it is there.

    Attributes:
        first_source: Index of the source that must come first.
    """

    first_source = 0

    def __init__(self, stream: IO[str]):
        """Takes an open stream of text."""
        self._stream = stream

    def write(self, lines: str) -> None:
        """Takes the lines of the next source."""
        self._stream.write(lines)
        self._stream.flush()

    def finish(self) -> None:
        """Says that there are no more sources."""


def standard_output() -> IO[str]:
    """Standard output in UTF-8 with line feeds, as files are, whatever the locale says: input is read so, too.

    Raises:
        ValueError: If it is closed.
    """
    if sys.stdout is None:
        raise ValueError("`output` must be a file where standard output is closed, got None.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return sys.stdout


class NewFile(OutputStream):
    """Writes a file anew, in place of what is there, which stays until the first lines are: a mistake costs no old results."""

    def __init__(self, path: str | os.PathLike, name: str = "output"):
        """Opens the file, so that one that cannot be written is found before any work.

        Args:
            path: Of the file.
            name: Of the option that names it.

        Raises:
            ValueError: If another run is writing it.
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
        # Of no sources at all the output is empty, too.
        self._empty()

    def _empty(self) -> None:
        # Pipes and devices have nothing to empty.
        if not self._is_emptied and stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            self._stream.truncate(0)
        self._is_emptied = True


class ResumedFile(OutputStream):
    """Goes on with the file of a run that was stopped at any moment.

    How far that run came is read from the file alone: whole lines count, and of several targets of a source only all of them.
    Batches depend on the window, so the window of the last source that is done is decoded once more, in full. What comes of it
    must be what the file holds, and so must the beginning of what comes in place of an unfinished end; the file is changed only
    then: that end is cut off, and the missing targets follow.

    Attributes:
        first_source: Index of the first source of that window.
        num_done: Sources whose targets the file holds.
    """

    def __init__(self, path: str | os.PathLike, *, num_targets: int, with_scores: bool, window: int):
        """Reads how far the file goes.

        Args:
            path: Of the file; where there is none, it begins.
            num_targets: Targets of each source.
            with_scores: As for `format_targets`.
            window: Sources that are decoded together.

        Raises:
            ValueError: If it is no regular file, its lines are not those of such targets, or another run is writing it.
        """
        check_regular(path)
        self.path, self._num_targets, self._with_scores = Path(path), num_targets, with_scores
        self.num_done = 0
        # Never emptied: between a look whether it is there and this, another run may have begun it.
        self._file = open(path, "r+b", opener=_open_or_create)  # noqa: SIM115 (closed by the context)
        self._lock = None
        try:
            self._lock = WriteLock(path, "output")
            start, self._end = self._measure(window)
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
                f"`output` must not hold targets of more sources than the input has, got {self.num_done} whole ones "
                f"{'and a part ' if self._has_more else ''}in {self.path}. Leave --resume out to begin anew."
            )

    def _close(self) -> None:
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _measure(self, window: int) -> tuple[int, int]:
        """Where in the file the window of the last whole source begins, and where that source ends, in bytes."""
        start = group = end = place = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            source, target = divmod(number, self._num_targets)
            if self._with_scores and not line.startswith(f"{source}{_SEPARATOR}".encode()):
                raise ValueError(
                    f"`output` must hold {self._num_targets} lines `index{_SEPARATOR}target{_SEPARATOR}score` for each source, "
                    f"to go on from there, but line {number + 1} of {self.path} is not of source {source}. "
                    "Leave --resume out to begin anew."
                )
            if target == 0:
                group = place
            place += len(line)
            if target == self._num_targets - 1:
                self.num_done, end = source + 1, place
                if source % window == 0:
                    self.first_source, start = source, group
        return start, end

    def _compare(self, lines: str) -> None:
        for expected in _with_ends(lines):
            found = self._file.readline().decode("utf-8", errors="replace")
            if not (found == expected or (self._with_scores and _is_close(found, expected))):
                raise self._refusal(found, expected)

    def _cut(self, lines: str) -> None:
        """Cuts the unfinished end off, if these lines, of the next source, begin with it."""
        if self._is_cut:
            return
        self._file.seek(self._end)
        for expected in _with_ends(lines):
            found = self._file.readline()
            is_begun = expected.encode("utf-8").startswith(found)
            if not (is_begun or (self._with_scores and _is_close_so_far(found, expected))):
                raise self._refusal(found.decode("utf-8", errors="replace"), expected)
        self._file.seek(self._end)
        self._file.truncate()
        self._is_cut = True

    def _refusal(self, found: str, expected: str) -> ValueError:
        return ValueError(
            f"`output` must hold what this command writes, to go on from there, but in {self.path} source {self._source} has "
            f"{found.rstrip()!r} in place of {expected.rstrip()!r}: model, input and options must be those of the run that was "
            "stopped. Leave --resume out to begin anew."
        )


def _open_untouched(path: str, flags: int) -> int:
    """As `open` does to write, but what is there stays."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _open_or_create(path: str, flags: int) -> int:
    """As `open` does to read and write what is there, or a new file."""
    return os.open(path, flags | os.O_CREAT, 0o666)


def check_regular(path: str | os.PathLike) -> None:
    """Raises `ValueError` if what is there is not a file that can be read again and cut off."""
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"`output` must be a regular file with `resume`, got {os.fspath(path)!r}.")


def _is_close(found: str, expected: str) -> bool:
    """Whether two lines differ in the last digits of the score alone."""
    (*text, score), (*other_text, other_score) = (line.rsplit(_SEPARATOR, 1) for line in (found, expected))
    try:
        is_close = math.isclose(float(score), float(other_score), rel_tol=_SCORE_TOLERANCE, abs_tol=_SCORE_TOLERANCE)
    except ValueError:
        return False
    return is_close and text == other_text


def _is_close_so_far(found: bytes, expected: str) -> bool:
    """Whether a line, or the beginning of one, differs in the score alone, of which it may have the first digits only."""
    before_score = expected.rsplit(_SEPARATOR, 1)[0] + _SEPARATOR
    if found.endswith(b"\n"):
        return _is_close(found.decode("utf-8", errors="replace"), expected)
    return found.startswith(before_score.encode("utf-8"))


def _with_ends(lines: str) -> list[str]:
    """The lines, each with its line feed, which alone ends one."""
    return [line + "\n" for line in lines.split("\n")[:-1]]
