import io
import logging
import re
import sys

from small_trainers import make_trainer

from metaphrase.inference import progress
from metaphrase.training.callbacks import with_plain_lines


def test_there_is_a_line_for_some_updates_and_for_each_evaluation(model, pairs, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "_LEAST_SECONDS", 0)
    options = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": False}
    with caplog.at_level(logging.INFO, "metaphrase"):
        with_plain_lines(make_trainer(model, pairs, tmp_path, **options)).train()
    lines = [line for line in caplog.messages if "update" in line]
    shown = [
        r" 25 %  update 1/4  \d s left",
        *(rf"\s*{25 * n} %  update {n}/4  0? ?\d s left  loss [\d.]+" for n in (2, 3, 4)),
    ]
    evaluated = [
        line for line in lines if re.fullmatch(r"update [24], validation: loss [\d.]+, perplexity [\d.]+", line)
    ]
    assert len(evaluated) == 2 and all(
        re.fullmatch(*pair) for pair in zip(shown, sorted(set(lines) - set(evaluated)), strict=True)
    )
    assert sys.stderr.getvalue() == ""
