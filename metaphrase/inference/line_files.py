"""Read sources line by line, and write targets line by line, to a new file or to that of a stopped run."""

import collections
import contextlib
import io
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from metaphrase.errors import MetaphraseError
from metaphrase.inference.generator import ScoredText
from metaphrase.storage.folders import write_lock

_SEPARATOR = " ||| "
# Scores have six decimals. Another number of threads may change the last ones.
_SCORE_TOLERANCE = 1e-4


def check_files(
    inputs: Mapping[str, str | None], output: str | os.PathLike | None, name: str = "output", resume: bool = False
) -> None:
    """Check the files of a command before any work. The inputs and the output have the names of their options.

    The output must be no input by another name, not compressed, and with `resume` a regular file.
    """
    if output is not None and os.fspath(output).endswith(".gz"):
        raise MetaphraseError(f"`{name}` must not end in .gz, because it is not compressed, got {os.fspath(output)!r}.")
    if resume and output is not None and os.path.exists(output) and not os.path.isfile(output):
        raise MetaphraseError(f"`{name}` must be a regular file with `resume`, got {os.fspath(output)!r}.")
    for option, path in inputs.items():
        if path is None or Path(path).is_fifo():  # Opening and closing a pipe would stop its writer.
            continue
        with open(path, "rb"):
            pass
        if output is not None and os.path.isfile(output) and os.path.samefile(path, output):
            raise MetaphraseError(f"`{name}` must be another file than `{option}`, got {os.fspath(output)!r} for both.")


def format_targets(index: int, candidates: Sequence[ScoredText], with_scores: bool) -> str:
    """Return the lines of the targets of one source: `index ||| target ||| score`, or the targets alone."""
    lines = (_SEPARATOR.join([str(index), c.text, f"{c.score:.6f}"]) if with_scores else c.text for c in candidates)
    return as_lines(lines)


def as_lines(texts: Iterable[str]) -> str:
    """Return one line for each text, with spaces in place of line breaks inside a text."""
    return "".join(text.replace("\r", " ").replace("\n", " ") + "\n" for text in texts)


class OutputFile(contextlib.ExitStack):
    """Writer of targets, source by source, to a new file, to that of a stopped run, or to standard output.

    An old file keeps its content until the first write. A resumed file alone tells how far the run came: whole lines count, and
    sources with all their targets. The chunk of the last complete source is decoded again in full, because batches depend on the
    chunk. Its lines must equal those in the file, and an incomplete end must be the beginning of the next line. Only then the
    incomplete end is cut off, and writing goes on.

    Attributes:
        next_source: Index of the next source to write, at first that of the chunk in which a stopped run ended.
        num_done: Number of complete sources in the file at the beginning.
    """

    def __init__(
        self,
        path: str | os.PathLike | None,
        name: str = "output",
        *,
        resume: bool = False,
        num_targets: int = 1,
        with_scores: bool = False,
        chunk_size: int = 1,
    ):
        """Open the file, so that an error comes before any work, and find out how far a resumed one goes."""
        super().__init__()
        self.path, self._with_scores = path, with_scores
        self.next_source = self.num_done = 0
        self._old_lines: collections.deque[bytes] = collections.deque()
        if path is None:
            self._stream, self._end = sys.stdout, None
            if isinstance(sys.stdout, io.TextIOWrapper):
                # Whatever the locale.
                sys.stdout.reconfigure(encoding="utf-8", newline="\n")
            return
        # Closes the file if another run holds the lock, or the content cannot be resumed.
        with contextlib.ExitStack() as stack:
            # Mode `w` would empty the file at once.
            self._stream = stack.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
            stack.enter_context(write_lock(path, name))
            # Where the first write cuts the file. Pipes and devices cannot be truncated.
            self._end = 0 if os.path.isfile(path) else None
            if resume:
                self._measure(path, num_targets, chunk_size)
            self.push(stack.pop_all())

    def write(self, lines: str) -> None:
        """Write the lines of the next source. Raises `MetaphraseError` if a resumed file holds other lines for this source."""
        # Only a line feed ends a line.
        for expected in io.StringIO(lines, newline="\n"):
            if not self._old_lines:
                break
            line = self._old_lines.popleft()
            if not _is_beginning(line, expected.encode("utf-8"), self._with_scores):
                shown = line.decode("utf-8", errors="replace").rstrip()
                raise MetaphraseError(
                    f"`output` must hold the lines of this command to be resumed, but in {self.path} source {self.next_source} "
                    f"has {shown!r} instead of {expected.rstrip()!r}. Leave out --resume to start again."
                )
        if self.next_source >= self.num_done:
            if self._end is not None:
                self._stream.truncate(self._end)
                self._end = None
            self._stream.write(lines)
            self._stream.flush()
        self.next_source += 1

    def finish(self) -> None:
        """Empty an old file if nothing was written. Raises `MetaphraseError` if a resumed file holds targets of more sources."""
        if self._old_lines:
            shown = f"{self.num_done} in {self.path}"
            raise MetaphraseError(f"`output` must not hold more sources than the input, got {shown}. Omit --resume.")
        if not self.num_done and self._end is not None:
            self._stream.truncate(self._end)

    def _measure(self, path: str | os.PathLike, num_targets: int, chunk_size: int) -> None:
        """Find the last complete source, and keep the lines of its chunk and of an incomplete source."""
        start = source_start = offset = 0
        with open(path, "rb") as stream:
            for number, line in enumerate(stream):
                if not line.endswith(b"\n"):
                    break
                source, target = divmod(number, num_targets)
                if target == 0:
                    source_start = offset
                offset += len(line)
                if target == num_targets - 1:
                    self.num_done, self._end = source + 1, offset
                    if source % chunk_size == 0:
                        self.next_source, start = source, source_start
            stream.seek(start)
            self._old_lines.extend(stream)


def _is_beginning(line: bytes, expected: bytes, with_scores: bool) -> bool:
    """Return True if a line equals `expected`, or its beginning without the end. Scores may differ in their last digits."""
    if not with_scores or expected.startswith(line):
        return expected.startswith(line)
    text, separator, expected_score = expected.rpartition(_SEPARATOR.encode())
    if not line.endswith(b"\n"):
        return line.startswith(text + separator)
    with contextlib.suppress(ValueError):
        score = float(line.removeprefix(text + separator))
        return math.isclose(score, float(expected_score), rel_tol=_SCORE_TOLERANCE, abs_tol=_SCORE_TOLERANCE)
    return False
