"""Tests of `metaphrase.modeling.normalization`: both norms against their formula, and finite numbers in float16."""

import pytest
import torch
from torch import nn

from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.normalization import HeadRMSNorm, MetaphraseRMSNorm, clamp_float16, make_norm


def test_rms_norm_equals_values_by_hand():
    norm = MetaphraseRMSNorm(2, eps=0.5)
    norm.weight.data = torch.tensor([2.0, -1.0])
    # The mean square of (3, 4) is 12.5; with eps its root is 13 ** 0.5.
    expected = torch.tensor([[2 * 3 / 13**0.5, -4 / 13**0.5]])
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), expected)


def test_layer_norm_equals_values_by_hand():
    norm = make_norm(MetaphraseConfig(hidden_size=16, norm_type="layernorm", norm_eps=3.0))
    norm.weight.data[:] = 2.0
    norm.bias.data[:] = 1.0
    # Mean 1 and variance 1; with eps the root is 2.
    expected = torch.tensor([[0.0, 2.0] * 8])
    torch.testing.assert_close(norm(torch.tensor([[0.0, 2.0] * 8])), expected)


@pytest.mark.parametrize(("norm_type", "kind"), [("layernorm", nn.LayerNorm), ("rmsnorm", MetaphraseRMSNorm)])
def test_norm_type_names_the_norm(norm_type, kind):
    norm = make_norm(MetaphraseConfig(hidden_size=16, norm_type=norm_type))
    assert type(norm) is kind
    assert norm.weight.shape == (16,)
    states = torch.full((1, 16), 3.0)
    # What is constant has no variance, but it has a mean square.
    expected = torch.zeros_like(states) if norm_type == "layernorm" else torch.ones_like(states)
    torch.testing.assert_close(norm(states), expected)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("norm_eps", [1e-6, 1.0])
def test_norm_eps_reaches_the_norm(norm_type, norm_eps):
    norm = make_norm(MetaphraseConfig(hidden_size=16, norm_type=norm_type, norm_eps=norm_eps))
    states = torch.tensor([[-1.0, 1.0] * 8])
    torch.testing.assert_close(norm(states), states / (1 + norm_eps) ** 0.5, atol=1e-7, rtol=1e-6)


def test_head_norm_is_an_rms_norm_over_the_last_dimension():
    torch.manual_seed(0)
    states = torch.randn(2, 3, 5, 4)
    expected = states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(HeadRMSNorm(4, 1e-6)(states), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_computes_in_float32(dtype):
    torch.manual_seed(0)
    norm = MetaphraseRMSNorm(16, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight)
    # Squared, these are above the largest float16.
    states = (torch.randn(4, 16) * 10_000).to(dtype)
    expected = states.float() / states.float().square().mean(-1, keepdim=True).sqrt() * norm.weight.float()
    normed = norm(states)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, expected.to(dtype), atol=0, rtol=1e-2)


def test_clamp_float16_brings_infinity_back():
    largest = torch.finfo(torch.float16).max
    states = torch.tensor([float("inf"), -float("inf"), 1.0, -largest], dtype=torch.float16)
    assert clamp_float16(states).tolist() == [largest, -largest, 1.0, -largest]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamp_float16_leaves_other_types_alone(dtype):
    states = torch.tensor([float("inf"), 1e6, -3.0], dtype=dtype)
    assert clamp_float16(states) is states
