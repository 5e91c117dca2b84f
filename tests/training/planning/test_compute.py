"""The estimate of operations against those that torch counts, and the rate that is measured."""

import pytest
import torch
from estimated_runs import DESIGNS, WIDTHS, batch_and_shape, training_model
from tiny_models import tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from metaphrase.training.planning import compute as compute_estimate
from metaphrase.training.planning.compute import measure_flops_per_second, measure_step_seconds, training_flops
from metaphrase.training.planning.estimate import meta_model


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


def test_timed_steps_change_nothing():
    model = tiny_model(**WIDTHS)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batches = [batch_and_shape(True)[0]] * 3
    state = torch.get_rng_state()
    seconds = measure_step_seconds(model, batches)
    assert len(seconds) == 2 and min(seconds) > 0
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measured_rate_is_operations_by_seconds(monkeypatch):
    model = tiny_model(**WIDTHS)
    batches, shapes = zip(*(batch_and_shape(True, pairs) for pairs in (2, 4, 8, 16)), strict=True)
    monkeypatch.setattr(compute_estimate, "measure_step_seconds", lambda *_, bf16: [1.0, 100.0, 2.0] if bf16 else [])
    # The first batch warms up; the rate of the second lies between the others'.
    expected = training_flops(model, [shapes[1]], is_checkpointed=True) / 1.0
    assert measure_flops_per_second(model, batches, is_checkpointed=True, bf16=True) == expected


def test_steps_are_timed_on_real_weights_and_enough_batches():
    with pytest.raises(ValueError, match="must have real weights to be timed"):
        measure_step_seconds(meta_model(tiny_config()), [])
    with pytest.raises(ValueError, match="`batches` must be at least 2, of which one warms up, got 1"):
        measure_step_seconds(tiny_model(**WIDTHS), [batch_and_shape(False)[0]])
