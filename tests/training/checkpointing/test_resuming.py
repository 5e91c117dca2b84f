"""The best checkpoint of a run that goes on with another metric."""

import json
import shutil

import pytest
from small_experiments import make_recipe
from small_runs import MetaphraseTrainer, make_trainer, read
from transformers import EarlyStoppingCallback

from metaphrase.training.experiment import Experiment

# By loss, step 2 is the best of three; by score, step 1, or 3 where less is better.
LOSSES, SCORES = [3.0, 1.0, 2.0, 4.0, 5.0, 6.0], [30.0, 20.0, 10.0, 25.0, 26.0, 27.0]


class Scored(MetaphraseTrainer):
    """Evaluates to given values."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        step = self.state.global_step
        output.metrics.update(eval_loss=LOSSES[step - 1], eval_score=SCORES[step - 1])
        return output


def train(folder, metric, is_more_better, patience=2, **options):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": metric, "max_steps": 3}
    settings |= {"greater_is_better": is_more_better, **options}
    resume = settings.pop("resume", None)
    trainer = make_trainer(folder, Scored, callbacks=[EarlyStoppingCallback(patience)], **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def best_of(trainer):
    state = trainer.state
    return state.best_metric, state.best_global_step, state.best_model_checkpoint


@pytest.mark.parametrize("is_noted", [True, False])
def test_the_best_is_chosen_anew_by_another_metric(tmp_path, caplog, is_noted):
    train(tmp_path, "loss", False)
    if not is_noted:
        for path in tmp_path.glob("checkpoint-*/progress.json"):
            names = ("metric_for_best_model", "greater_is_better")
            path.write_text(json.dumps({name: value for name, value in read(path).items() if name not in names}))
    trainer = train(tmp_path, "eval_score", True, resume=True, max_steps=6)
    assert best_of(trainer) == (30.0, 1, str(tmp_path / "checkpoint-1"))
    assert (
        "another `metric_for_best_model`, score, where more is better: by that, checkpoint-1 is the best" in caplog.text
    )
    # The patience of two began anew at step 3.
    assert trainer.state.global_step == 5
    shutil.rmtree(tmp_path / "checkpoint-1")
    caplog.clear()
    trainer = train(tmp_path, "score", False, resume=True, max_steps=6)
    assert best_of(trainer) == (10.0, 3, str(tmp_path / "checkpoint-3"))
    assert "where less is better: by that, checkpoint-3 is the best" in caplog.text


@pytest.mark.parametrize("is_noted", [True, False])
def test_the_best_stays_by_the_same_metric(tmp_path, caplog, is_noted):
    train(tmp_path, "loss", False)
    if not is_noted:
        (tmp_path / "checkpoint-3" / "progress.json").unlink()
    trainer = train(tmp_path, "eval_loss", False, resume=True, max_steps=6)
    assert best_of(trainer) == (1.0, 2, str(tmp_path / "checkpoint-2"))
    # One evaluation was worse before, the next one is worse now.
    assert trainer.state.global_step == 4
    assert "another `metric_for_best_model`" not in caplog.text


def test_a_score_that_is_not_a_number_is_not_the_best(tmp_path):
    train(tmp_path, "loss", False)
    path = tmp_path / "checkpoint-3" / "trainer_state.json"
    state = read(path)
    next(entry for entry in state["log_history"] if "eval_score" in entry)["eval_score"] = float("nan")
    path.write_text(json.dumps(state))
    trainer = train(tmp_path, "score", True, resume=True, max_steps=4)
    assert best_of(trainer) == (25.0, 4, str(tmp_path / "checkpoint-4"))


def test_a_schedule_that_follows_the_metric_keeps_it(data, tmp_path):
    fields = {"max_steps": 1, "save_steps": 1, "eval_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}
    fields |= {"metric_for_best_model": "eval_loss", "test_file": None}
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    fields |= {"max_steps": 2, "resume_from_checkpoint": "true"}
    with pytest.raises(ValueError, match=r"`metric_for_best_model` must stay .* got 'bleu', and 'loss'"):
        Experiment(make_recipe(data, tmp_path / "run", **fields | {"metric_for_best_model": "bleu"}))
    with pytest.raises(ValueError, match=r"`greater_is_better` must stay .* got True, and null"):
        Experiment(make_recipe(data, tmp_path / "run", **fields, greater_is_better=True))
    for same in ("loss", None):
        Experiment(make_recipe(data, tmp_path / "run", **fields | {"metric_for_best_model": same}))
