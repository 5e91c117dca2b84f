import logging

import pytest
import torch
from small_experiments import read_log, train, weights

from metaphrase.evaluation.evaluate import ValidationSample
from metaphrase.inference import Generator
from metaphrase.techniques import averaging
from metaphrase.training.checkpoints import with_fields_of_run
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe, load_recipe


def assert_mean(run, steps):
    kept = [weights(run / f"checkpoint-{step}") for step in steps]
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, sum(checkpoint[name] for checkpoint in kept) / len(kept), msg=name)
        assert tensor.ndim == 1 or len(kept) == 1 or not torch.equal(kept[0][name], kept[1][name])


@pytest.fixture(autouse=True)
def mean_is_best(request, monkeypatch):
    """The mean of a few steps of training is often worse than the last one."""
    if "worse" not in request.node.name:
        monkeypatch.setattr(averaging, "_is_worse", lambda *_: False)


@pytest.mark.parametrize("score", [5.0, 95.0])
def test_a_mean_that_is_worse_than_the_best_is_left(data, tmp_path, monkeypatch, score, caplog):
    scores = iter([80.0, 90.0, score])
    monkeypatch.setattr(ValidationSample, "__call__", lambda *_: {"bleu": next(scores)})
    fields = {"average_best": 2, "metric_for_best_model": "bleu", "learning_rate": 1e-2, "bf16_full_eval": True}
    with caplog.at_level(logging.INFO):
        train(data, tmp_path / "run", **fields)
    is_left = score == 5.0
    assert_mean(tmp_path / "run", (6,) if is_left else (3, 6))
    assert ("checkpoints scores 5.00 in bleu, and the best of them 90.00" in caplog.text) is is_left
    assert [entry["eval_bleu"] for entry in read_log(tmp_path / "run", "eval_bleu")] == [80.0, 90.0]


def test_the_finished_model_is_the_mean_of_checkpoints_also_if_there_are_fewer(data, tmp_path, caplog):
    fields = {"average_last": 3, "max_steps": 7, "save_steps": 6, "eval_strategy": "no", "learning_rate": 1e-2}
    own = tmp_path / "run" / "average" / "model.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    with caplog.at_level(logging.WARNING):
        train(data, tmp_path / "run", **fields)
    assert own.read_bytes() == b"mine" and not (tmp_path / "run" / "_average").exists()
    # Fewer checkpoints are no reason for a warning.
    assert "checkpoint" not in caplog.text
    assert_mean(tmp_path / "run", (6, 7))


def test_the_best_are_kept_by_what_they_are_chosen_by(data, tmp_path, monkeypatch):
    """A schedule that is led by a metric makes the loss transformers' metric for the best model."""
    scores = iter([90.0, 80.0, 70.0, 60.0])
    monkeypatch.setattr(ValidationSample, "__call__", lambda *_: {"bleu": next(scores)})
    fields = {"average_best": 2, "save_total_limit": 2, "max_steps": 4, "eval_steps": 1, "save_steps": 1}
    fields |= {"learning_rate": 1e-2, "lr_scheduler_type": "reduce_lr_on_plateau", "test_file": None}
    monkeypatch.setattr(Experiment, "evaluate", lambda *_: {})
    train(data, tmp_path / "run", **fields)
    assert_mean(tmp_path / "run", (1, 2))


def test_a_run_stopped_before_its_first_checkpoint_is_not_lost(data, tmp_path, caplog):
    fields = {"average_best": 2, "early_stopping_patience": 1, "metric_for_best_model": "loss"}
    # Nothing gets better by a rate of 0; the second evaluation stops the run.
    fields |= {"max_steps": 100, "save_steps": 50, "eval_steps": 2, "learning_rate": 0.0, "test_file": None}
    with caplog.at_level(logging.WARNING):
        train(data, tmp_path / "run", **fields)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert "The finished model has the weights of step 4, the last one." in caplog.text
    assert weights(tmp_path / "run") and (tmp_path / "run" / "metrics.json").is_file()


SHORT = {"num_beams": 4, "length_penalty": 0.6}


def test_the_finished_model_decodes_as_chosen_and_a_resumed_run_chooses_again(data, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("metaphrase.choices.completion.choose_decoding", lambda *_: (SHORT, "as the test wants"))
    run = tmp_path / "run"
    metrics = train(data, run, choose_decoding=True, max_steps=2, save_strategy="no", eval_strategy="no")
    recipe = load_recipe(run / "recipe.yaml")
    assert (recipe.num_beams, recipe.length_penalty) == (4, 0.6)
    assert "Chosen to decode: num_beams 4, length_penalty 0.6 (as the test wants)" in caplog.text
    assert "# as the test wants" in (run / "recipe.yaml").read_text(encoding="utf-8")
    assert Generator.from_pretrained(run).model.generation_config.num_beams == 4
    assert metrics["generation"]["num_beams"] == 4
    resumed = Recipe.from_mapping({"output_dir": str(run), "resume_from_checkpoint": True, "max_steps": 3}, "the test")
    merged = with_fields_of_run(resumed, run)
    assert (merged.choose_decoding, merged.num_beams, merged.max_steps) == (True, None, 3)
    assert with_fields_of_run(resumed.replace(num_beams=2), run).num_beams == 2
