"""Tests of the progress of training: a bar and plain lines on a terminal, and plain lines alone elsewhere."""

import io
import logging
import math
import re
import sys
import time

import pytest
from small_trainers import make_trainer, small_pairs
from tiny_models import tiny_model
from transformers import TrainerCallback

from metaphrase.scripts.__main__ import LinesBetweenBars
from metaphrase.training.callbacks import with_plain_lines

SCORES = re.compile(r"update \d, validation: loss \d\.\d+, perplexity \d+\.\d+")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr_of_run(tmp_path, monkeypatch, caplog):
    """Return the output of a run of four updates and two evaluations, with a message of the log."""

    def run(stream, seconds=math.inf):
        monkeypatch.delenv("TQDM_DISABLE", raising=False)
        monkeypatch.setattr(sys, "stderr", stream)
        log, handler = logging.getLogger("metaphrase"), LinesBetweenBars(stream)
        log.addHandler(handler)
        caplog.set_level("INFO")
        options = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
        trainer = make_trainer(tiny_model(vocab_size=60), small_pairs(), tmp_path, **options | {"disable_tqdm": False})
        speaker = TrainerCallback()
        speaker.on_step_end = lambda args, state, *_, **__: log.info("message in update %d", state.global_step)
        trainer.add_callback(speaker)
        with_plain_lines(trainer, time.time() + seconds).train()
        log.removeHandler(handler)
        return stream.getvalue()

    return run


@pytest.mark.parametrize(
    ("seconds", "shown"), [(math.inf, r"it/s, loss \d\.\d+\]"), (600, r"loss \d\.\d+, 10 min left\]")]
)
def test_a_terminal_has_a_bar_and_a_line_for_each_evaluation(seconds, shown, stderr_of_run):
    text = stderr_of_run(Terminal(), seconds)
    # Only what follows the last return of a line stays visible.
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert [line[:20] for line in lines if line.startswith("update")] == [
        "update 2, validation",
        "update 4, validation",
    ]
    assert "message in update 3" in lines and "{" not in text and re.search(rf"2/4 \[\d\d:\d\d[^\r]*{shown}", text)


def test_elsewhere_there_are_lines_alone(stderr_of_run):
    lines = stderr_of_run(io.StringIO()).splitlines()
    assert [line for line in lines if not SCORES.fullmatch(line)] == [
        f"message in update {step}" for step in range(1, 5)
    ]
    assert len(lines) == 6
