"""Progress of long work: a bar on a terminal or in a notebook, and elsewhere a line every few percent."""

import contextlib
import logging
import math
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

    def __init__(self, total: int | None, unit: str, initial: int = 0, time_limit: float = math.inf):
        """Begin to measure time.

        Args:
            total: Number of all units; `None` if it is unknown.
            unit: Name of a unit.
            initial: Units that an earlier run has done.
            time_limit: Seconds after which the work ends although units are left.
        """
        self.total, self.unit, self.done, self.time_limit = total, unit, initial, time_limit
        self._first = initial
        self._start = self._last_time = time.monotonic()
        self._last_percent = self._percent(self._start)
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
        is_far = round(self._percent(now) - self._last_percent, 6) >= _PERCENT
        if seconds < (_SECONDS if is_far else self._most_seconds):
            return
        self._last_percent, self._last_time = self._percent(now), now
        self._most_seconds = _MANY_SECONDS if self.total else _FIRST_SECONDS
        parts = [f"{self.unit} {self.done}"]
        if self.total:
            seconds = now - self._start
            left = min(seconds / (self.done - self._first) * (self.total - self.done), self.time_limit - seconds)
            parts = [f"{self._percent(now):3.0f} %", f"{parts[0]}/{self.total}", f"{short_duration(left)} left"]
        logger.info("%s", "  ".join([*parts, note]).rstrip())

    def _percent(self, now: float) -> float:
        if not self.total:
            return 0.0
        return min(100.0, 100 * max(self.done / self.total, (now - self._start) / self.time_limit))


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


def short_duration(seconds: float) -> str:
    """Return a duration such as `12 min`. A negative one is `0 s`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
