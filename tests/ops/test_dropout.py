"""Dropout: what torch's own does, from fewer random bits."""

import pytest
import torch

from metaphrase.ops.linear_and_dropout import add_dropout, dropout, random_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_share_scale_and_gradient(p, dtype):
    states = torch.ones(1000, 300, dtype=dtype, requires_grad=True)
    dropped = dropout(states, p, training=True)
    kept = dropped != 0
    # Five standard errors of a share in 300 000 draws.
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=5 * (p * (1 - p) / 300_000) ** 0.5)
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - p)), rtol=1e-2, atol=0)
    dropped.backward(torch.full_like(dropped, 2.0))
    torch.testing.assert_close(states.grad, 2 * dropped.detach())


@pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.3, 0.5, 0.99, 0.999])
def test_the_mean_stays_exactly_what_it_was(p):
    mask, kept = random_mask((4_000_000,), p, torch.device("cpu"))
    assert kept == 1 - p
    # Five standard errors, of the decisions and of the thresholds that 1,024 of them share.
    error = (p * (1 - p) / 4_000_000 + (0.5 / 256) ** 2 / 3906) ** 0.5
    assert mask.double().mean().item() == pytest.approx(kept, abs=5 * error)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_decisions_are_independent_of_their_neighbours(p):
    mask, _ = random_mask((1000, 1000), p, torch.device("cpu"))
    values = (mask.double() - (1 - p)) / (p * (1 - p)) ** 0.5
    for shift in (1, 2, 3, 4, 5, 8, 512):
        correlation = (values[:, shift:] * values[:, :-shift]).mean().item()
        assert abs(correlation) < 0.006
    assert not torch.equal(mask[0], mask[1])


def test_the_seed_decides():
    states = torch.ones(50, 7)
    torch.manual_seed(5)
    first, second = dropout(states, 0.5, True), dropout(states, 0.5, True)
    torch.manual_seed(5)
    assert torch.equal(dropout(states, 0.5, True), first)
    assert not torch.equal(first, second)


def test_nothing_happens_outside_training_or_without_probability():
    states = torch.ones(5)
    assert dropout(states, 0.5, training=False) is states
    assert dropout(states, 0.0, training=True) is states


@pytest.mark.parametrize("of_states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_residual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("p", "training"), [(0.3, True), (1e-4, True), (0.0, True), (0.3, False)])
def test_a_sum_with_what_is_dropped_has_the_values_and_gradients_of_the_two_steps(p, training, of_residual, of_states):
    leaves = [torch.randn(40, 30, dtype=dtype, requires_grad=True) for dtype in (of_residual, of_states)]
    weight = torch.randn(40, 30)
    found = []
    for compute in (add_dropout, lambda residual, *rest: residual + dropout(*rest)):
        torch.manual_seed(5)
        total = compute(*leaves, p, training)
        gradients = torch.autograd.grad((total * weight).sum(), leaves)
        assert [gradient.dtype for gradient in gradients] == [of_residual, of_states]
        found.append((total.detach(), *gradients))
    is_half = torch.bfloat16 in (of_residual, of_states)
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2 if is_half else 1e-6, atol=1e-2 if is_half else 1e-6)


@pytest.mark.parametrize("p", [1e-4, 0.99999, 1.0])
def test_probabilities_that_few_bits_cannot_express_are_torchs(p):
    dropped = dropout(torch.ones(200_000), p, training=True)
    assert (dropped == 0).double().mean().item() == pytest.approx(p, abs=2e-4)
