"""Progress of long work: a bar on a terminal or in a notebook, and elsewhere a line every few percent."""

import contextlib
import logging
import os
import sys
import time

from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

# Distance of two lines: at least these seconds, and either this share or many seconds. The first line comes early.
_PERCENT, _SECONDS, _FIRST_SECONDS, _MANY_SECONDS = 5, 5, 30, 600


def has_bar() -> bool:
    """Return True if a terminal or a notebook can show bars, and tqdm's variable TQDM_DISABLE is not set."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) and not os.environ.get("TQDM_DISABLE")


class ProgressLines(contextlib.AbstractContextManager):
    """Progress in lines of the log, for a file that would fill with the frames of a bar.

    Attributes:
        done: Number of units that are done.
    """

    def __init__(self, total: int | None, unit: str, initial: int = 0):
        """Begin to measure time.

        Args:
            total: Number of all units; `None` if it is unknown.
            unit: Name of a unit.
            initial: Units that an earlier run has done.
        """
        self.total, self.unit, self.done = total, unit, initial
        self._first = self._last_done = initial
        self._start = self._last_time = time.monotonic()
        self._most_seconds = _FIRST_SECONDS

    def __exit__(self, *exception: object) -> None:
        """Leave the last line to the caller, who knows more."""

    def update(self, count: int, note: str = "") -> None:
        """Add units that are done. A line follows if the last one is long ago.

        Args:
            count: Number of units.
            note: Text for the line.
        """
        self.done += count
        now = time.monotonic()
        seconds = now - self._last_time
        is_far = bool(self.total) and 100 * (self.done - self._last_done) >= _PERCENT * self.total
        if seconds < (_SECONDS if is_far else self._most_seconds):
            return
        self._last_done, self._last_time = self.done, now
        self._most_seconds = _MANY_SECONDS if self.total else _FIRST_SECONDS
        parts = [f"{self.unit} {self.done}"]
        if self.total:
            left = (now - self._start) / (self.done - self._first) * (self.total - self.done)
            parts = [f"{100 * self.done / self.total:3.0f} %", f"{parts[0]}/{self.total}", f"{_duration(left)} left"]
        logger.info("%s", "  ".join([*parts, note]).rstrip())


ProgressBar = tqdm | ProgressLines


def progress_bar(total: int | None, unit: str, show_progress: bool | None, initial: int = 0) -> ProgressBar:
    """Return the progress of some work, to be updated and closed as a context.

    Args:
        total: As for `ProgressLines`.
        unit: As for `ProgressLines`.
        show_progress: True for a bar, or for lines where no bar can be; `None` for a bar that vanishes at its end, or nothing;
            False for nothing.
        initial: As for `ProgressLines`.
    """
    if show_progress and not has_bar():
        return ProgressLines(total, unit, initial)
    is_shown = has_bar() if show_progress is None else show_progress
    # A run evaluates many times: bars that stay would fill a notebook.
    return tqdm(total=total, initial=initial, unit=unit, disable=not is_shown, leave=bool(show_progress))


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
