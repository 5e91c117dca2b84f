"""The experiment whose model is the mean of checkpoints."""

import logging

import pytest
import torch
from small_experiments import make_recipe, read_log, weights

from metaphrase.evaluation.evaluate import ValidationSample
from metaphrase.training import finishing as final_weights
from metaphrase.training.experiment import Experiment


def assert_mean(run, steps):
    """That a run's model is the mean of its checkpoints of these steps, which differ."""
    kept = [weights(run / f"checkpoint-{step}") for step in steps]
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, sum(checkpoint[name] for checkpoint in kept) / len(kept), msg=name)
        assert tensor.ndim == 1 or len(kept) == 1 or not torch.equal(kept[0][name], kept[1][name])


@pytest.fixture(autouse=True)
def mean_is_best(request, monkeypatch):
    """The mean of a few steps of training is often worse than the last one."""
    if "worse" not in request.node.name:
        monkeypatch.setattr(final_weights, "_is_worse", lambda *_: False)


@pytest.mark.parametrize("score", [5.0, 95.0])
def test_a_mean_that_is_worse_than_the_best_is_left(data, tmp_path, monkeypatch, score, caplog):
    scores = iter([80.0, 90.0, score])
    monkeypatch.setattr(ValidationSample, "__call__", lambda *_: {"bleu": next(scores)})
    fields = {"average_best": 2, "metric_for_best_model": "bleu", "learning_rate": 1e-2}
    with caplog.at_level(logging.INFO):
        Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    is_left = score == 5.0
    assert_mean(tmp_path / "run", (6,) if is_left else (3, 6))
    assert (
        "The mean of the best checkpoints scores 5.00 in bleu, and the best of them 90.00" in caplog.text
    ) is is_left
    # It is no evaluation of the run.
    assert [entry["eval_bleu"] for entry in read_log(tmp_path / "run", "eval_bleu")] == [80.0, 90.0]


@pytest.mark.parametrize("choice", ["last", "best"])
def test_the_finished_model_is_the_mean_of_checkpoints(data, tmp_path, choice):
    fields = {f"average_{choice}": 2, "max_steps": 9, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    # A mean that its owner has made stays.
    own = tmp_path / "run" / "average" / "model.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert own.read_bytes() == b"mine" and not (tmp_path / "run" / "_average").exists()
    assert_mean(tmp_path / "run", (6, 9))


def test_a_run_that_went_back_is_averaged_without_what_it_left(data, tmp_path):
    fields = {"average_best": 2, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    Experiment(make_recipe(data, tmp_path / "run", **fields, max_steps=9)).train()
    fields["resume_from_checkpoint"] = tmp_path / "run" / "checkpoint-3"
    Experiment(make_recipe(data, tmp_path / "run", **fields, max_steps=6)).train()
    assert_mean(tmp_path / "run", (3, 6))


@pytest.mark.parametrize("schedule", ["constant", "reduce_lr_on_plateau"])
def test_the_best_are_kept_by_what_they_are_chosen_by(data, tmp_path, schedule, monkeypatch):
    """A schedule that is led by a metric makes the loss transformers' metric for the best model."""
    scores = iter([90.0, 80.0, 70.0, 60.0])
    monkeypatch.setattr(ValidationSample, "__call__", lambda *_: {"bleu": next(scores)})
    fields = {"average_best": 2, "save_total_limit": 2, "max_steps": 4, "eval_steps": 1, "save_steps": 1}
    fields |= {"learning_rate": 1e-2, "lr_scheduler_type": schedule, "test_file": None}
    monkeypatch.setattr(Experiment, "_evaluate", lambda *_: {})
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert_mean(tmp_path / "run", (1, 2))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"average_last": 4, "save_total_limit": 2}, "save_total_limit"),
        ({"average_last": 2, "save_strategy": "no"}, "save_strategy"),
        ({"average_best": 2, "save_strategy": "no"}, "save_strategy"),
        ({"average_best": 2, "eval_strategy": "no"}, "eval_strategy"),
        ({"average_best": 2, "save_strategy": "epoch"}, "save_strategy"),
        ({"average_best": 2, "save_steps": 5, "eval_steps": 3}, "save_steps"),
        ({"average_best": 2, "save_steps": 2, "eval_steps": 4}, "save_steps"),
        ({"average_best": 2, "save_steps": 0.3, "eval_steps": 0.2}, "save_steps"),
        ({"average_best": 2, "save_steps": 10, "eval_steps": 0.1}, "save_steps"),
    ],
)
def test_averages_need_checkpoints_that_are_kept_and_scored(data, tmp_path, fields, named):
    with pytest.raises(ValueError, match=f"`{named}`"):
        make_recipe(data, tmp_path / "run", **fields)


def test_averages_of_checkpoints_that_are_scored_are_accepted(data, tmp_path):
    for met in (
        {"save_steps": 6},
        {"save_strategy": "best", "metric_for_best_model": "bleu"},
        {"eval_steps": None, "logging_steps": 3},
        {"save_steps": 0.3, "eval_steps": 0.1},
    ):
        make_recipe(data, tmp_path / "run", average_best=2, **met)


def test_a_run_stopped_before_its_first_checkpoint_is_not_lost(data, tmp_path, caplog):
    fields = {"average_best": 2, "early_stopping_patience": 1, "metric_for_best_model": "loss"}
    # Nothing gets better by a rate of 0; the second evaluation stops the run.
    fields |= {"max_steps": 100, "save_steps": 50, "eval_steps": 2, "learning_rate": 0.0, "test_file": None}
    with caplog.at_level(logging.WARNING):
        Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert "got none in" in caplog.text and "The finished model has the weights of step 4, the last one." in caplog.text
    assert weights(tmp_path / "run") and (tmp_path / "run" / "metrics.json").is_file()


@pytest.mark.parametrize(("steps", "kept"), [(7, [6, 7]), (3, [3])])
def test_a_run_too_short_for_its_average_is_not_lost(data, tmp_path, caplog, steps, kept):
    with caplog.at_level(logging.WARNING):
        Experiment(make_recipe(data, tmp_path / "run", average_last=3, max_steps=steps, save_steps=6)).train()
    # It has the mean of all checkpoints, which is no reason for a warning.
    assert "checkpoint" not in caplog.text
    assert_mean(tmp_path / "run", kept)
