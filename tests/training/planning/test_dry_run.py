"""A dry run says what training would need, and leaves nothing behind."""

import pytest
from small_experiments import make_recipe

from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.dry_run import dry_run


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens_per_batch": 300}, {"gradient_checkpointing": "true", "bf16": "true"}]
)
def test_parameters_steps_and_time_are_told_and_nothing_is_written(data, tmp_path, fields):
    recipe = make_recipe(data, tmp_path / "run", max_steps=None, num_train_epochs=3, **fields)
    estimate = dry_run(Experiment(recipe))
    assert not (tmp_path / "run").exists()
    text = str(estimate)
    assert "unknown" not in text and "time" in text
    experiment = Experiment(recipe)
    experiment.train()
    figures = estimate.to_dict()
    assert figures["parameters"]["total"] == experiment.make_model(experiment.make_tokenizers()).num_parameters()


def test_devices_are_planned_for_without_any(data, tmp_path):
    estimate = dry_run(Experiment(make_recipe(data, tmp_path / "run", max_tokens_per_batch=300)), devices=8)
    assert "unknown" in str(estimate)


def test_a_stream_cannot_be_planned(data, tmp_path):
    fields = {"streaming": "true", "max_tokens_per_batch": 300, "max_steps": 5}
    with pytest.raises(ValueError, match="`streaming` must be false for a dry run"):
        dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields)))


@pytest.mark.parametrize("technique", [{"freeze": ["encoder"]}, {"lora_rank": 4}])
def test_only_what_is_trained_has_gradients_and_states(data, tmp_path, technique):
    if "lora_rank" in technique:
        pytest.importorskip("peft")
    Experiment(make_recipe(data, tmp_path / "base", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"model_name_or_path": tmp_path / "base", "preset": None, "vocab_size": None}
    whole, part = (
        dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields, **more))).to_dict() for more in ({}, technique)
    )
    experiment = Experiment(make_recipe(data, tmp_path / "run", **fields, **technique))
    model = experiment.make_model(experiment.make_tokenizers())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert part["parameters"]["trainable"] == trained < whole["parameters"]["trainable"]


def test_an_exponential_average_is_counted(data, tmp_path):
    plain, averaged = (
        dry_run(Experiment(make_recipe(data, tmp_path / "run", exponential_average_decay=decay)))
        for decay in (None, 0.99)
    )
    size = 4 * plain.parameters.trainable
    assert (plain.state.average, averaged.state.average) == (0, size)
    assert averaged.peak == plain.peak + size
    assert "\n  exponential average" in str(averaged) and "exponential average" not in str(plain)


@pytest.mark.parametrize(
    ("objective", "is_exact"), [("span_corruption", True), ("ul2", False), ("text_infilling", False)]
)
def test_what_an_objective_draws_is_told_to_be_a_bound(data, tmp_path, objective, is_exact):
    fields = {"objective": objective, "train_text_file": "train.de", "validation_text_file": "validation.de"}
    fields |= dict.fromkeys(("train_file", "validation_file", "test_file", "vocab_size", "metric_for_best_model"))
    fields |= {"num_sentinels": None if objective == "text_infilling" else 60, "tokenizer_kind": "byte"}
    estimate = dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields)), devices=1)
    assert ("are the most that may come" in str(estimate)) is not is_exact
