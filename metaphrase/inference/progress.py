"""Progress of long work: a bar on a terminal or in a notebook, and elsewhere a line every few percent."""

import contextlib
import logging
import math
import os
import sys
import time
from typing import TypeAlias

from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

# Seconds between two lines: a share of the time so far, within bounds.
_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.05, 5, 600


def has_bar() -> bool:
    """Return True if a terminal or a notebook can show bars, and tqdm's variable TQDM_DISABLE is not set."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) and not os.environ.get("TQDM_DISABLE")


class ProgressLines(contextlib.nullcontext):
    """Progress in lines of the log, for a file that would fill with the frames of a bar. The caller logs the last line."""

    def __init__(self, total: int | None, unit: str, initial: int = 0, time_limit: float = math.inf):
        """Begin to measure time, after `initial` units of an earlier run. Work may end at the time limit with units left."""
        super().__init__(self)
        self.total, self.unit, self.done, self.time_limit = total, unit, initial, time_limit
        self._first, self._start = initial, time.monotonic()
        self._next = self._start + _LEAST_SECONDS

    def update(self, count: int, note: str = "") -> None:
        """Add units that are done. A line, which ends with the note, follows if the last one is long ago."""
        self.done += count
        now = time.monotonic()
        if now < self._next:
            return
        seconds = now - self._start
        self._next = now + min(max(_SHARE * seconds, _LEAST_SECONDS), _MOST_SECONDS)
        parts = [f"{self.unit} {self.done}"]
        if self.total:
            share = min(1.0, max(self.done / self.total, seconds / self.time_limit))
            left = seconds / max(self.done - self._first, 1) * (self.total - self.done)
            left = max(0.0, min(left, self.time_limit - seconds))
            size, unit = (3600, "h") if left >= 7200 else (60, "min") if left >= 120 else (1, "s")
            parts = [f"{100 * share:3.0f} %", f"{parts[0]}/{self.total}", f"{left / size:.0f} {unit} left"]
        logger.info("%s", "  ".join([*parts, note]).rstrip())


ProgressBar: TypeAlias = tqdm | ProgressLines


def progress_bar(total: int | None, unit: str, show_progress: bool | None, initial: int = 0) -> ProgressBar:
    """Return the progress of some work, to be updated and closed as a context.

    With True it is a bar, or lines where no bar can be; with `None` a bar that vanishes at its end, or nothing.
    """
    if show_progress and not has_bar():
        return ProgressLines(total, unit, initial)
    is_shown = has_bar() if show_progress is None else show_progress
    # A run evaluates many times: bars that stay would fill a notebook.
    return tqdm(total=total, initial=initial, unit=unit, disable=not is_shown, leave=bool(show_progress))
