"""Tests of the choice of beams and length penalty on validation pairs."""

import json
import time
from types import SimpleNamespace

import pytest
from small_experiments import make_recipe
from transformers import GenerationConfig

from metaphrase.evaluation.evaluate import TaskScores
from metaphrase.inference import Generator
from metaphrase.training.experiment import Experiment
from metaphrase.training.finishing import choose_decoding, fill_decoding, final_share
from metaphrase.training.recipe.recipe import Recipe, load_recipe
from metaphrase.training.run_folder import with_fields_of_run

GREEDY, BEAMS = {"num_beams": 1}, {"num_beams": 4, "length_penalty": 1.0}
SHORT, LONG = {**BEAMS, "length_penalty": 0.6}, {**BEAMS, "length_penalty": 1.5}


class Writer:
    """A generator that writes `right` wrong-free texts of ten, by setting."""

    def __init__(self, right):
        self.right, self.asked = right, []

    def generate(self, sources, show_progress, **setting):
        self.asked.append(setting)
        right = self.right[len(self.asked) - 1]
        return [source if row < right else "no" for row, source in enumerate(sources)]


SOURCES = [f"the number {row} of ten sentences" for row in range(10)]


@pytest.mark.parametrize(
    ("metric", "right", "chosen", "tried"),
    [
        ("bleu", [5, 6, 8, 7], SHORT, 4),
        ("bleu", [5, 6, 6, 9], LONG, 4),
        ("bleu", [5, 6, 6, 6], BEAMS, 4),
        # Beams that bring nothing only cost time.
        ("bleu", [5, 5], GREEDY, 2),
        ("exact_match", [5, 6], BEAMS, 2),
        ("wer", [6, 5], GREEDY, 2),
        ("wer", [5, 6], BEAMS, 2),
    ],
)
def test_the_best_setting_is_chosen(metric, right, chosen, tried):
    writer = Writer(right)
    values, reason = choose_decoding(writer, SOURCES, SOURCES, TaskScores([metric]))
    assert values == chosen and len(writer.asked) == tried
    assert f"{metric} of 10 validation pairs" in reason and "with greedy search" in reason


def test_a_search_that_takes_too_long_is_left_out():
    writer = Writer([5, 6, 7, 8])
    values, _ = choose_decoding(writer, SOURCES, SOURCES, TaskScores(["bleu"]), lambda seconds: len(writer.asked) < 2)
    assert values == BEAMS and len(writer.asked) == 2


@pytest.mark.parametrize("given", [{}, {"num_beams": 2}], ids=["open", "given"])
def test_the_finished_model_decodes_as_chosen(data, tmp_path, given, monkeypatch):
    monkeypatch.setattr("metaphrase.training.finishing.choose_decoding", lambda *_: (SHORT, "as the test wants"))
    run = tmp_path / "run"
    Experiment(make_recipe(data, run, choose_decoding=True, **given)).train()
    recipe, expected = load_recipe(run / "recipe.yaml"), given or SHORT
    assert recipe.num_beams == expected["num_beams"] and recipe.length_penalty == expected.get("length_penalty")
    config = json.loads((run / "generation_config.json").read_text(encoding="utf-8"))
    assert config["num_beams"] == expected["num_beams"]
    assert Generator.from_pretrained(run).model.generation_config.num_beams == expected["num_beams"]
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["generation"]["num_beams"] == expected["num_beams"]
    assert ("# as the test wants" in (run / "recipe.yaml").read_text(encoding="utf-8")) is not bool(given)


def test_a_resumed_run_chooses_its_decoding_again(data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr("metaphrase.training.finishing.choose_decoding", lambda *_: (GREEDY, "as wanted"))
    Experiment(make_recipe(data, run, choose_decoding=True, max_steps=2)).train()
    resumed = Recipe.from_mapping({"output_dir": str(run), "resume_from_checkpoint": True, "max_steps": 3}, "the test")
    merged = with_fields_of_run(resumed, run)
    assert (merged.choose_decoding, merged.num_beams, merged.max_steps) == (True, None, 3)
    # Beams that were given stay.
    assert with_fields_of_run(resumed.replace(num_beams=2), run).num_beams == 2


def test_it_needs_validation_pairs(data, tmp_path):
    fields = {"validation_file": None, "eval_strategy": "no", "choose_decoding": True, "save_strategy": "no"}
    with pytest.raises(ValueError, match="`choose_decoding` must come with `validation_file` or `num_validation`"):
        Experiment(make_recipe(data, tmp_path / "run", **fields))


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, 2),
        ({"num_beams": 4}, 4),
        # Greedy search and three with beams choose the decoding.
        ({"choose_decoding": True}, 4 + 7),
        ({"choose_decoding": True, "metrics": "exact_match"}, 4 + 3),
        ({"choose_decoding": True, "num_beams": 4}, 4),
        ({"average_best": 2, "metric_for_best_model": "loss"}, 2 + 1),
    ],
)
def test_time_of_what_follows_training(fields, share, data, tmp_path):
    recipe = make_recipe(data, tmp_path, **{"max_decoded_samples": 4, "metrics": "bleu"} | fields)
    assert final_share(recipe, recipe.metrics, num_scored=8, num_validation=20) == share
    assert final_share(recipe, recipe.metrics, num_scored=0, num_validation=20) == 0
    # Some time is kept for scores, also if no evaluation shows how much they take.
    assert final_share(recipe, recipe.metrics, num_scored=8, num_validation=0) > 0


def test_time_for_the_final_scores_remains(tmp_path, monkeypatch):
    answers = []

    def choose(generator, sources, references, scores, is_in_time):
        answers.extend([is_in_time(9), is_in_time(11)])
        return SHORT, "as the test wants"

    monkeypatch.setattr("metaphrase.training.finishing.choose_decoding", choose)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    model = SimpleNamespace(generation_config=GenerationConfig())
    sample = SimpleNamespace(sources=["a"] * 4, references=["b"] * 4, scores=None)
    recipe = Recipe.from_mapping({"choose_decoding": True, "num_validation": 4}, "the test")
    # The scores of 8 pairs take twice the time of 4.
    filled = fill_decoding(recipe, SimpleNamespace(model=model), sample, 1030.0, 8, tmp_path)
    assert answers == [True, False]
    assert (filled.num_beams, filled.length_penalty, filled.reasons["num_beams"]) == (4, 0.6, "as the test wants")
    assert GenerationConfig.from_pretrained(tmp_path).length_penalty == 0.6
