import contextlib
import json
import math
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from small_experiments import ONE_STEP, make_recipe, weights
from small_runs import make_trainer, names
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from metaphrase.inference import Generator
from metaphrase.training import experiment
from metaphrase.training.callbacks import EarlyStopping, EndOnInterrupt, TimeBudget, parse_seconds
from metaphrase.training.checkpoints import checkpoints_in
from metaphrase.training.experiment import Experiment
from metaphrase.training.trainer import MetaphraseTrainer


@pytest.mark.parametrize("text", ["20", "m", "0m", "-5m", "1h30m", "nan"])
def test_durations_that_are_none_are_refused(text):
    assert [parse_seconds(text) for text in ("90s", "20m", "1.5h", "2d")] == [90, 1200, 5400, 172_800]
    with pytest.raises(ValueError, match="`time_budget` must be a number above 0 with s, m, h or d"):
        parse_seconds(text)


def test_training_ends_in_time_with_a_low_rate(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    budget, control, state = TimeBudget(1125.0, 2.0, 200.0), TrainerControl(), TrainerState(max_steps=100)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, eval_strategy="steps")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    budget.on_train_begin(arguments, state, control, lr_scheduler=scheduler)
    # A fifth of the time is kept for the scores. Half of the other 100 seconds is over after one step.
    clock[0] += 50
    optimizer.step()
    budget.on_optimizer_step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.5)]
    budget.on_step_end(arguments, state, control)
    assert not control.should_training_stop
    # The last evaluation, and final scores of twice its duration: 95 of 125 seconds remain for training.
    budget.on_evaluate(arguments, state, control, metrics={"eval_runtime": 10.0})
    clock[0] += 44
    budget.on_optimizer_step()
    budget.on_step_end(arguments, state, control)
    assert not control.should_training_stop
    clock[0] += 2
    budget.on_optimizer_step()
    budget.on_step_end(arguments, state, control)
    assert control.should_training_stop and control.should_evaluate and control.should_save
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.0)]


@pytest.mark.parametrize(
    ("scores", "patience", "ends"),
    [([0, 0, 0, 5, 4, 0], 2, True), ([5, 6, 6], 1, True), ([0, 0, 0, 0, 5, 4], 2, False)],
)
def test_patience_begins_with_the_first_score_above_zero(scores, patience, ends, tmp_path):
    options = {"metric_for_best_model": "bleu", "greater_is_better": True, "eval_strategy": "steps"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **options)
    stopping, control, state = EarlyStopping(patience), TrainerControl(), TrainerState(max_steps=100)
    for state.global_step, score in enumerate(scores, 1):
        assert not control.should_training_stop
        stopping.on_evaluate(arguments, state, control, {"eval_bleu": float(score)})
        # The Trainer sets it after the evaluation.
        state.best_metric = max(float(score), state.best_metric or 0.0)
    assert control.should_training_stop is ends


def test_the_end_of_an_epoch_evaluates_no_update_again(data, tmp_path, monkeypatch):
    fields = {"max_steps": 40, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with monkeypatch.context() as patch:
        press_ctrl_c_at(1, patch)
        Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [2]


def press_ctrl_c_at(step, monkeypatch):
    class Keyboard(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                signal.raise_signal(signal.SIGINT)

    make_trainer = experiment.make_trainer

    def with_keyboard(*args):
        trainer = make_trainer(*args)
        trainer.add_callback(Keyboard())
        return trainer

    monkeypatch.setattr(experiment, "make_trainer", with_keyboard)


def test_ctrl_c_leaves_a_finished_model(data, tmp_path, monkeypatch, caplog):
    fields = {"max_steps": 6, "average_best": 2, "metric_for_best_model": "loss"}
    Experiment(make_recipe(data, tmp_path / "whole", **fields)).train()
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        press_ctrl_c_at(3, patch)
        result = Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    # The update in which the key was pressed is the last, and it is evaluated.
    assert result["scores"] and "Training ends after this update" in caplog.text
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["checkpoint-3", "checkpoint-4"]
    assert Generator.from_pretrained(tmp_path / "run").generate(["The cat is black."])
    assert signal.getsignal(signal.SIGINT) is before
    # A resumed run goes on from there. Its averaged checkpoints are others, so the last ones are compared.
    Experiment(make_recipe(data, tmp_path / "run", **fields, resume_from_checkpoint=True)).train()
    last = [weights(tmp_path / run / "checkpoint-6") for run in ("whole", "run")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_the_second_ctrl_c_ends_at_once(data, tmp_path):
    with pytest.raises(KeyboardInterrupt), EndOnInterrupt().listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_time_ends_a_run_without_validation_pairs_too(data, tmp_path):
    fields = ONE_STEP | {"max_steps": 50, "time_budget": "1s", "metrics": "exact_match"}
    Experiment(make_recipe(data, tmp_path / "run", **fields), started=time.time() - 1).train()
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["checkpoint-1"]


DIVERGING = {"learning_rate": 1e30, "max_steps": 9, "lr_scheduler_type": "constant"}


class Spoiled(MetaphraseTrainer):
    updates: tuple[int, ...] = ()

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + (math.inf if self.state.global_step + 1 in self.updates else 0)


def test_training_stops_when_the_loss_stays_nan(tmp_path):
    trainer = make_trainer(tmp_path, MetaphraseTrainer, **DIVERGING, save_strategy="no")
    message = r"must be finite, got NaN or infinity since update 2 of 9\. Start .* a lower `learning_rate`, got 1e\+30"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 4


def test_no_checkpoint_of_nan_weights_is_saved(tmp_path):
    trainer = make_trainer(tmp_path, MetaphraseTrainer, **DIVERGING, save_total_limit=1)
    message = r"weights must be finite, got NaN or infinity after update 2 of 9\. .*checkpoint-1 holds the last weights"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    kept = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in kept.values())


def test_a_run_that_diverges_at_its_end_leaves_no_model(data, tmp_path):
    # Decay multiplies the weights by 10,000 in each update.
    fields = ONE_STEP | {"learning_rate": 100, "weight_decay": 100, "max_steps": 11, "save_strategy": "no"}
    fields |= {"lr_scheduler_type": "constant", "logging_steps": 100}
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity"):
        Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("updates", "fp16", "end"), [((2, 3, 5, 6), False, 7), ((2, 3, 4), False, 4), ((2, 3, 4), True, 7)]
)
def test_a_loss_that_recovers_ends_no_training(updates, fp16, end, tmp_path):
    trainer = make_trainer(tmp_path, Spoiled, max_steps=7, save_strategy="no")
    # Only a GPU trains in float16. There, updates that overflow are skipped.
    trainer.args.fp16, trainer.updates = fp16, updates
    is_refused = pytest.raises(ValueError, match="must be finite, got NaN or infinity since update 2")
    with contextlib.nullcontext() if end == 7 else is_refused:
        trainer.train()
    assert trainer.state.global_step == end
