"""Progress: bars on a terminal, lines of the log elsewhere."""

import sys
from types import SimpleNamespace

import pytest

from metaphrase.inference import progress
from metaphrase.inference.progress import ProgressLines, has_bar, progress_bar


@pytest.mark.parametrize(
    ("options", "seconds", "count", "last"),
    [
        ({"total": 1000, "initial": 500}, 2, 5, "100 %  line 1000/1000  0 s left  loss 1.5"),
        # Work that ends in time: 10 percent of its updates are done.
        ({"total": 1000, "time_limit": 400}, 2, 1, " 50 %  line 100/1000  3 min left  loss 1.5"),
        ({"total": None}, 60, 1, "line 100  loss 1.5"),
    ],
)
def test_lines_become_rare(options, seconds, count, last, monkeypatch, caplog):
    caplog.set_level("INFO")
    now = [0.0]
    # The clock of this module alone: a server of other tests may sleep by the real one.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = ProgressLines(unit="line", **options)
    for number in range(100):
        now[0] += seconds
        if number == 99:
            lines._next = 0
        lines.update(count, "loss 1.5")
    assert 10 <= len(caplog.messages) <= 60 and caplog.messages[-1] == last


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, (True, True, False)), ({"TQDM_DISABLE": "1"}, ("lines", False, False))]
)
def test_bars_are_for_terminals(variables, expected, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert has_bar() == (expected[0] is True)
    for show_progress, shown in zip((True, None, False), expected, strict=True):
        bar = progress_bar(10, "line", show_progress)
        assert isinstance(bar, ProgressLines) if shown == "lines" else bar.disable is not shown
        # Only a bar that the caller wants stays on the screen.
        assert shown is not True or bar.leave is (show_progress is True)
