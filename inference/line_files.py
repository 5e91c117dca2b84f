"""Read sources line by line, and write targets line by line, to a new file or to that of a stopped run."""

import collections
import contextlib
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from metaphrase.inference.generator import ScoredText
from metaphrase.storage.folders import WriteLock
from metaphrase.tokenization import iterate_lines
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS, count_lines, decode_lines
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME

_SEPARATOR = " ||| "
# Settings, weights, code and vocabularies. Other files beside a model, such as metrics.json, are results.
_MODEL_FILES = ("*config.json", "*.index.json", "*token*.json", "*vocab*", "*.safetensors", "*.bin", "*.py", "*.model")
_MODEL_FILES += ("*.spm", "*.jinja", "*.codes", "merges.txt", "dict.txt", VOCABULARY_MAP_NAME)
# Scores have six decimals. Another number of threads may change the last ones.
_SCORE_TOLERANCE = 1e-4


def read_lines(path: str | None, max_line_characters: int = MAX_LINE_CHARACTERS) -> Iterator[str]:
    """Yield the lines of a file (`.gz` or not) or of standard input. Only a line feed ends a line.

    Raises:
        ValueError: If a line is too long or not valid UTF-8.
    """
    if path is not None:
        yield from iterate_lines(path, max_line_characters=max_line_characters)
        return
    try:
        # A copy: Python cannot close `sys.stdin` at exit while a thread waits for a line of it.
        stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:
        # `sys.stdin` was replaced by an object without file descriptor.
        stream = sys.stdin.buffer
    for line in decode_lines(stream, "standard input", max_line_characters):
        if line.problem:
            raise ValueError(line.problem)
        yield line.content


def check_files(
    inputs: Mapping[str, str | None],
    output: str | os.PathLike | None,
    name: str = "output",
    models: Sequence[str] = (),
) -> None:
    """Check the files of a command before any work.

    Args:
        inputs: Files to read, by the names of their options; `None` is standard input.
        output: File to write; `None` is standard output.
        name: Option of the output, for messages.
        models: Folders or Hub ids of the models to read.

    Raises:
        ValueError: If the output is a file that is read, by whatever name, or ends in `.gz`.
        OSError: If an input cannot be read.
    """
    if output is not None and os.fspath(output).endswith(".gz"):
        raise ValueError(f"`{name}` must not end in .gz, because it is not compressed, got {os.fspath(output)!r}.")
    for option, path in inputs.items():
        if path is None or Path(path).is_fifo():  # Opening and closing a pipe would stop its writer.
            continue
        with open(path, "rb"):
            pass
        if output is not None and os.path.isfile(output) and os.path.samefile(path, output):
            raise ValueError(f"`{name}` must be another file than `{option}`, got {os.fspath(output)!r} for both.")
    if output is None or not os.path.isfile(output):
        return
    folders = [folder for model in models for folder in (Path(model), Path(model, TARGET_SUBFOLDER))]
    for path in (path for folder in folders for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        if path.is_file() and path.samefile(output):
            raise ValueError(f"`{name}` must be no file of the model, got {os.fspath(output)!r}, which is {path}.")


def num_lines(path: str | None) -> int | None:
    """Return the number of lines, for progress; `None` for a pipe or standard input."""
    return count_lines(path) if path is not None and Path(path).is_file() else None


def format_targets(index: int, candidates: Sequence[ScoredText], with_scores: bool) -> str:
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


class OutputStream(contextlib.AbstractContextManager):
    """Writer of targets, source by source.

    Attributes:
        first_source: Index of the first source to write.
    """

    first_source = 0

    def __init__(self, stream: IO, resources: contextlib.ExitStack | None = None):
        self._stream, self._resources = stream, resources or contextlib.ExitStack()

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def write(self, lines: str) -> None:
        """Write the lines of the next source."""
        self._stream.write(lines)
        self._stream.flush()

    def finish(self) -> None:
        """Finish after the last source."""


def open_output(path: str | os.PathLike | None) -> OutputStream:
    """Open a new file, or standard output."""
    return OutputStream(standard_output()) if path is None else NewFile(path)


def standard_output() -> IO[str]:
    """Return standard output, set to UTF-8 with line feeds, whatever the locale."""
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
        with contextlib.ExitStack() as resources:
            # Mode `w` would empty the file at once.
            stream = resources.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
            resources.enter_context(WriteLock(path, name))
            super().__init__(stream, resources.pop_all())
        # Pipes and devices cannot be truncated.
        self._holds_old_lines = os.path.isfile(path)

    def write(self, lines: str) -> None:
        self.finish()
        super().write(lines)

    def finish(self) -> None:
        """Empty the file, unless something was written."""
        if self._holds_old_lines:
            self._stream.truncate(0)
        self._holds_old_lines = False


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
            ValueError: If the file is not regular, or another run is writing it.
        """
        check_regular(path)
        self.path, self._with_scores = Path(path), with_scores
        self.num_done = 0
        with contextlib.ExitStack() as resources:
            # Never truncated here: another run may have just begun the file.
            stream = resources.enter_context(open(path, "a+b"))
            resources.enter_context(WriteLock(path, "output"))
            stream.seek(0)
            start, self._end = self._measure(stream, num_targets, chunk_size)
            stream.seek(start)
            # The lines of the chunk, and of an incomplete source.
            self._old_lines = collections.deque(stream)
            super().__init__(stream, resources.pop_all())
        self._source = self.first_source

    def write(self, lines: str) -> None:
        """See `OutputStream`.

        Raises:
            ValueError: If the file holds other lines for this source.
        """
        # Only a line feed ends a line.
        for expected in io.StringIO(lines, newline="\n"):
            line = self._old_lines.popleft() if self._old_lines else b""
            if not _is_beginning(line, expected.encode("utf-8"), self._with_scores):
                raise ValueError(
                    f"`output` must hold the lines of this command to be resumed, but in {self.path} source {self._source} has "
                    f"{line.decode('utf-8', errors='replace').rstrip()!r} instead of {expected.rstrip()!r}. Use the model, "
                    "input and options of the stopped run, or leave out --resume to start again."
                )
        if self._source == self.num_done:
            self._stream.truncate(self._end)
        if self._source >= self.num_done:
            self._stream.write(lines.encode("utf-8"))
            self._stream.flush()
        self._source += 1

    def finish(self) -> None:
        """See `OutputStream`.

        Raises:
            ValueError: If the file holds targets of more sources than there are.
        """
        if self._old_lines:
            raise ValueError(
                f"`output` must not hold targets of more sources than the input has, got {self.num_done} in {self.path}. "
                "Leave out --resume to start again."
            )

    def _measure(self, stream: IO[bytes], num_targets: int, chunk_size: int) -> tuple[int, int]:
        """Return the byte offsets of the last complete source: start of its chunk, and end."""
        start = source_start = end = offset = 0
        for number, line in enumerate(stream):
            if not line.endswith(b"\n"):
                break
            source, target = divmod(number, num_targets)
            if target == 0:
                source_start = offset
            offset += len(line)
            if target == num_targets - 1:
                self.num_done, end = source + 1, offset
                if source % chunk_size == 0:
                    self.first_source, start = source, source_start
        return start, end


def check_regular(path: str | os.PathLike) -> None:
    """Raise `ValueError` for a pipe, a device or a folder, which cannot be resumed."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"`output` must be a regular file with `resume`, got {os.fspath(path)!r}.")


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
