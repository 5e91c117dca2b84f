"""Tests of `metaphrase.decoding.prepared_linear`: joined products are those of the layers."""

import pytest
import torch
from torch import nn

from metaphrase.decoding.prepared_linear import PreparedLinear


def linears(*sizes, bias=True):
    return [nn.Linear(6, size, bias=bias) for size in sizes]


@torch.no_grad()
@pytest.mark.parametrize("rows", [(1,), (5,), (100,), (3, 5)])
@pytest.mark.parametrize("sizes", [(4,), (4, 2, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("copies", [True, False])
def test_product_is_that_of_the_layers_side_by_side(copies, bias, sizes, rows):
    layers, states = linears(*sizes, bias=bias), torch.randn(*rows, 6)
    product = PreparedLinear(layers, copies)(states)
    assert torch.allclose(product, torch.cat([layer(states) for layer in layers], dim=-1), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 0), (torch.float64, 0)])
def test_single_weight_is_copied_in_float32_only(dtype, count):
    layer, states = nn.Linear(6, 4).to(dtype), torch.randn(3, 6, dtype=dtype)
    linear = PreparedLinear([layer])
    assert len(linear.copied) == count
    assert torch.allclose(linear(states), layer(states), atol=1e-6)


def test_large_single_weight_is_not_transposed():
    assert len(PreparedLinear(linears(4), largest_transposed=4 * 6).copied) == 1
    assert PreparedLinear(linears(5), largest_transposed=4 * 6).copied == []
    assert len(PreparedLinear(linears(5, 5), largest_transposed=4 * 6).copied) == 4


def test_large_weights_are_not_joined():
    layers = linears(4, 5)
    assert not PreparedLinear(layers, largest=4 * 6)._reads_weights
    assert PreparedLinear(linears(4, 3), largest=4 * 6)._weight.shape == (7, 6)
    assert PreparedLinear(layers, largest=4 * 6)(torch.ones(1, 6)).shape == (1, 9)


def test_weight_that_is_not_contiguous_is_not_copied():
    layer, states = nn.Linear(6, 4), torch.randn(3, 6)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    linear = PreparedLinear([layer])
    assert linear.copied == []
    assert torch.equal(linear(states), layer(states))


def test_layer_of_another_class_is_called():
    class Doubled(nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    layers, states = [*linears(4, 2), Doubled(6, 3)], torch.randn(5, 6)
    assert torch.equal(PreparedLinear(layers)(states), torch.cat([layer(states) for layer in layers], dim=-1))
