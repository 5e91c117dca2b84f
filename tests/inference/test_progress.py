"""Progress: bars on a terminal, lines of the log elsewhere."""

import sys

import pytest

from metaphrase.inference import progress
from metaphrase.inference.progress import ProgressLines, has_bar, progress_bar


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves on."""
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    return times


def messages(clock, caplog, lines, seconds, count, times):
    """The lines after so many updates, each some seconds after the one before."""
    caplog.set_level("INFO")
    for _ in range(times):
        clock[0] += seconds
        lines.update(count, "loss 1.5")
    return caplog.messages


# The last is work that ends in time: 2 percent of its updates are done.
@pytest.mark.parametrize(
    ("options", "seconds", "count", "times", "last"),
    [
        ({"total": 1000, "initial": 500}, 2, 5, 100, "100 %  line 1000/1000  0 s left  loss 1.5"),
        ({"total": 1000}, 0.5, 10, 100, "100 %  line 1000/1000  0 s left  loss 1.5"),
        ({"total": 1000, "time_limit": 600}, 15, 1, 20, " 50 %  line 20/1000  5 min left  loss 1.5"),
    ],
)
def test_a_line_comes_every_few_percent_and_seconds(clock, caplog, options, seconds, count, times, last):
    found = messages(clock, caplog, ProgressLines(unit="line", **options), seconds, count, times)
    assert len(found) == 10 and found[-1] == last


def test_slow_work_has_a_first_line_soon(clock, caplog):
    found = messages(clock, caplog, ProgressLines(10_000, "line"), 10, 1, 65)
    assert [line.split()[3] for line in found] == ["3/10000", "63/10000"]


def test_an_unknown_total_has_a_line_every_half_minute(clock, caplog):
    caplog.set_level("INFO")
    with progress_bar(None, "line", True) as lines:
        for _ in range(13):
            clock[0] += 5
            lines.update(1)
    assert caplog.messages == ["line 6", "line 12"]


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [(True, {}, (True, True, False)), (True, {"TQDM_DISABLE": "1"}, ("lines", False, False))],
)
def test_bars_are_for_terminals(is_terminal, variables, expected, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert has_bar() == (expected[0] is True)
    for show_progress, shown in zip((True, None, False), expected, strict=True):
        bar = progress_bar(10, "line", show_progress)
        assert isinstance(bar, ProgressLines) if shown == "lines" else bar.disable is not shown
        # Only a bar that the caller wants stays on the screen.
        assert shown is not True or bar.leave is (show_progress is True)
