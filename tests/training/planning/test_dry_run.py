"""A dry run says what training would need, and leaves nothing behind."""

import pytest
import torch
from estimated_runs import DESIGNS, batch_and_shape, training_model
from small_experiments import make_recipe, train
from torch.utils.flop_counter import FlopCounterMode

from metaphrase.training.experiment import Experiment
from metaphrase.training.planning import estimate as timing
from metaphrase.training.planning.batches import training_flops
from metaphrase.training.planning.estimate import dry_run, measure_flops_per_second


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
    assert estimate.parameters.total == experiment.make_model(experiment.make_tokenizers()).num_parameters()


@pytest.mark.parametrize("technique", [{"freeze": ["encoder"]}, {"lora_rank": 4}])
def test_only_what_is_trained_has_gradients_and_states(data, tmp_path, technique):
    if "lora_rank" in technique:
        pytest.importorskip("peft")
    train(data, tmp_path / "base", max_steps=1, save_steps=1, eval_steps=1)
    fields = {"model_name_or_path": tmp_path / "base"}
    whole, part = (
        dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields, **more))) for more in ({}, technique)
    )
    experiment = Experiment(make_recipe(data, tmp_path / "run", **fields, **technique))
    model = experiment.make_model(experiment.make_tokenizers())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert part.parameters.trainable == trained < whole.parameters.trainable


@pytest.mark.parametrize(
    ("objective", "is_exact"), [("span_corruption", True), ("ul2", False), ("text_infilling", False)]
)
def test_what_an_objective_draws_is_told_to_be_a_bound(data, tmp_path, objective, is_exact):
    fields = {"objective": objective, "train_text_file": "train.de", "validation_text_file": "validation.de"}
    fields |= dict.fromkeys(("train_file", "validation_file", "test_file", "vocab_size", "metric_for_best_model"))
    fields |= {"num_sentinels": None if objective == "text_infilling" else 60, "tokenizer_kind": "byte"}
    estimate = dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields)), devices=1)
    assert ("are the most that may come" in str(estimate)) is not is_exact
    assert "unknown" in str(estimate), "no time is measured for other devices"


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("design", ["recommended", "grouped and normed"])
def test_operations_are_those_that_torch_counts(design, is_checkpointed):
    # torch does not count what a CPU's fused attention does.
    model = training_model(attn_implementation="eager", **DESIGNS[design])
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    batch, shape = batch_and_shape(is_packed=False)
    with FlopCounterMode(display=False) as counter:
        model(**batch, use_cache=False).loss.backward()
    estimated = training_flops(model, [shape], is_checkpointed)
    assert estimated == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert training_flops(model, [shape, shape], is_checkpointed) == 2 * estimated


def test_measured_rate_is_operations_by_seconds(monkeypatch):
    model = training_model()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    batches, shapes = zip(*(batch_and_shape(True, pairs) for pairs in (2, 4, 8, 16)), strict=True)
    # Beginning and end of each step, in seconds.
    times = iter([0, 50, 50, 51, 51, 151, 151, 153])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    # The first batch warms up; the rate of the second lies between the others'.
    rates = [training_flops(model, [shape]) / seconds for shape, seconds in zip(shapes[1:], (1, 100, 2), strict=True)]
    assert measure_flops_per_second(model, batches, bf16=True) == sorted(rates)[1]
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
