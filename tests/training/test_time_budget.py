"""Tests of the time budget: it is read, it ends training, and it lowers the learning rate by the clock."""

import time

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments, get_scheduler

from metaphrase.training.time_budget import TimeBudget, parse_seconds


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("2d", 172_800)])
def test_durations(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["20", "m", "0m", "-5m", "1h30m", "nan"])
def test_durations_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="`time_budget` must be a number above 0 with one of s, m, h or d"):
        parse_seconds(text)


def test_training_ends_in_time_with_a_low_rate(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    budget, control, state = TimeBudget(1100.0, final_share=2.0), TrainerControl(), TrainerState(max_steps=100)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    budget.on_train_begin(arguments, state, control, lr_scheduler=scheduler)
    # Half of the time is over after one step: the rate is that of the 50th step.
    clock[0] += 50
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.5)]
    budget.on_step_end(arguments, state, control)
    assert not control.should_training_stop
    # Final scores take twice the evaluation: 80 of 100 seconds remain for training.
    budget.on_evaluate(arguments, state, control, metrics={"eval_runtime": 10.0})
    clock[0] += 31
    budget.on_step_end(arguments, state, control)
    assert control.should_training_stop and control.should_evaluate and control.should_save
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.0)]
