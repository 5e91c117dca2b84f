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


def test_a_line_comes_every_few_percent_and_seconds(clock, caplog):
    caplog.set_level("INFO")
    lines = ProgressLines(1000, "line", initial=500)
    for _ in range(100):
        clock[0] += 2
        lines.update(5, "loss 1.5")
    assert len(caplog.messages) == 10 and lines.done == 1000
    assert caplog.messages[0] == " 55 %  line 550/1000  3 min left  loss 1.5"
    caplog.clear()
    lines = ProgressLines(1000, "line")
    for _ in range(100):
        clock[0] += 0.5
        lines.update(10)
    assert len(caplog.messages) == 10 and caplog.messages[-1] == "100 %  line 1000/1000  0 s left"


def test_work_that_ends_in_time_shows_the_time_that_is_left(clock, caplog):
    caplog.set_level("INFO")
    lines = ProgressLines(1000, "update", time_limit=600)
    for _ in range(20):
        clock[0] += 15
        lines.update(1)
    # A line every 5 percent of the time: 2 percent of the updates are done.
    assert len(caplog.messages) == 10 and caplog.messages[-1] == " 50 %  update 20/1000  5 min left"


def test_slow_work_has_a_first_line_soon(clock, caplog):
    caplog.set_level("INFO")
    lines = ProgressLines(10_000, "line")
    for _ in range(65):
        clock[0] += 10
        lines.update(1)
    assert [line.split()[3] for line in caplog.messages] == ["3/10000", "63/10000"]


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
