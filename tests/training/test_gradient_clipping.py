"""Gradient clipping: as torch does it, without a pass over gradients that are short enough."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from arrangements import assert_same, train
from torch import nn

from metaphrase.training import optimizer as gradient_clipping
from metaphrase.training.optimizer import GradientClippingMixin


@pytest.fixture
def calls(monkeypatch):
    """The norms that were too large."""
    found, clip = [], gradient_clipping.clip_grads_with_norm_

    def note(parameters, limit, norm):
        found.append(norm.item())
        clip(parameters, limit, norm)

    monkeypatch.setattr(gradient_clipping, "clip_grads_with_norm_", note)
    return found


@pytest.mark.parametrize(("limit", "least", "most"), [(0.01, 6, 6), (2.5, 1, 5), (100.0, 0, 0)])
def test_weights_are_those_of_the_parent(limit, least, most, calls, tmp_path, monkeypatch):
    actual = train(tmp_path / "ours", max_grad_norm=limit, per_device_train_batch_size=8)
    assert least <= len(calls) <= most, calls
    monkeypatch.delattr(GradientClippingMixin, "_clip_grad_norm")
    expected = train(tmp_path / "parent", max_grad_norm=limit, per_device_train_batch_size=8)
    assert_same(actual, expected, rtol=0, atol=0)


class _Parent:
    args = SimpleNamespace(device=torch.device("cpu"), max_grad_norm=1.0)
    accelerator = SimpleNamespace(distributed_type=DistributedType.NO, unscale_gradients=lambda: None)

    def _clip_grad_norm(self, model):
        return "the parent's"


class _Clipping(GradientClippingMixin, _Parent):
    pass


def module(*gradients):
    model = nn.Module()
    for number, gradient in enumerate(gradients):
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = None if gradient is None else torch.tensor(gradient)
        model.register_parameter(f"weight{number}", weight)
    return model


@pytest.mark.parametrize(
    ("gradients", "is_clipped"),
    [
        (([0.6, 0.0], None, [0.0, 0.7]), False),
        (([0.6, 0.0], None, [0.0, 0.8]), True),  # by a millionth: what torch divides by is this much larger
        (([3.0, 0.0], [0.0, 4.0]), True),
        (([0.0, 0.0], [0.0, 0.0]), False),
        (([float("nan"), 0.0], [0.5, 0.5]), True),
        (([float("inf"), 0.0], [0.5, 0.5]), True),
        ((None, None), False),
    ],
)
def test_gradients_and_norm_are_those_of_torch(gradients, is_clipped, calls):
    actual, expected = module(*gradients), module(*gradients)
    norm = _Clipping()._clip_grad_norm(actual)
    expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    assert len(calls) == is_clipped
    torch.testing.assert_close(norm, expected_norm, rtol=0, atol=0, equal_nan=True)
    for weight, other in zip(actual.parameters(), expected.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None)
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, other.grad, rtol=0, atol=0, equal_nan=True)


class _Sharded(torch.Tensor):
    """Stands for gradients that other processes hold parts of."""


def test_what_is_not_whole_or_not_on_a_cpu_is_left_to_the_parent(monkeypatch):
    model = module([3.0, 4.0])
    model.weight0.grad = model.weight0.grad.as_subclass(_Sharded)
    assert _Clipping()._clip_grad_norm(model) == "the parent's"
    model = module([3.0, 4.0])
    for name, value in (
        ("args", SimpleNamespace(device=torch.device("cuda"), max_grad_norm=1.0)),
        ("accelerator", SimpleNamespace(distributed_type="FSDP")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(_Clipping, name, value, raising=False)
            assert _Clipping()._clip_grad_norm(model) == "the parent's"
    assert model.weight0.grad.tolist() == [3.0, 4.0]
