"""Linear layers that write their bias and a ReLU with the product: as torch's own, forward and backward."""

import pytest
import torch
from torch import nn

from metaphrase.modeling import fused_linear
from metaphrase.modeling.fused_linear import linear

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no products in bfloat16"
)


@pytest.fixture
def calls(monkeypatch):
    """Layers of any size are fused, and the products that were are counted."""
    found, apply = [], fused_linear._FusedLinear.apply
    monkeypatch.setattr(fused_linear, "_LEAST_SIZE", 0)
    monkeypatch.setattr(fused_linear._FusedLinear, "apply", lambda *parts: found.append(parts) or apply(*parts))
    return found


def run(layer, states, is_rectified, call):
    states = states.detach().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = call(layer, states, is_rectified)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    gradients = {"states": states.grad} | {name: value.grad for name, value in layer.named_parameters()}
    return output.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def plain(layer, states, is_rectified):
    output = layer(states)
    return nn.functional.relu(output) if is_rectified else output


@pytest.mark.parametrize("is_rectified", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_products_and_gradients_are_those_of_torch(shape, dtype, has_bias, is_rectified, calls):
    layer, states = nn.Linear(24, 40, bias=has_bias, dtype=dtype), torch.randn(shape).bfloat16()
    output, gradients = run(layer, states, is_rectified, linear)
    expected, expected_gradients = run(layer, states, is_rectified, plain)
    assert len(calls) == 1 and output.dtype == torch.bfloat16
    # A rounding in bfloat16 apart.
    torch.testing.assert_close(output, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(gradients, expected_gradients, rtol=2**-6, atol=2**-5)


def test_what_is_frozen_has_no_gradient(calls):
    layer = nn.Linear(24, 40)
    layer.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        linear(layer, torch.randn(7, 24).bfloat16()).sum().backward()
    assert len(calls) == 1 and layer.weight.grad is None and layer.bias.grad is not None


class _Doubled(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


def _hooked():
    layer = nn.Linear(24, 40)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return layer


def _replaced():
    layer = nn.Linear(24, 40)
    layer.forward = lambda states: 2 * nn.functional.linear(states, layer.weight, layer.bias)
    return layer


@pytest.mark.parametrize("make", [lambda: _Doubled(24, 40), _hooked, _replaced])
def test_what_wraps_a_layer_is_called(make, calls):
    layer, states = make(), torch.randn(7, 24).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(layer, states)
    expected = 2 * nn.functional.linear(states, layer.weight.bfloat16(), layer.bias.bfloat16())
    torch.testing.assert_close(output, expected, rtol=2**-7, atol=2**-7)
    assert calls == []


def test_float32_small_layers_and_inference_are_torchs_own(calls, monkeypatch):
    layer, states = nn.Linear(24, 40), torch.randn(7, 24)
    linear(layer, states)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        linear(layer, states.bfloat16())
    monkeypatch.undo()
    found = []
    monkeypatch.setattr(fused_linear._FusedLinear, "apply", lambda *parts: found.append(parts))
    with torch.autocast("cpu", torch.bfloat16):
        linear(layer, states.bfloat16())
    assert calls == found == []
