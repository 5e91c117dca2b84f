"""Tests of `metaphrase.ops.linear_and_dropout`: the operators compute the same as torch's, forward and backward."""

import pytest
import torch
from packed_rows import gradients, packed
from tiny_models import tiny_model
from torch import nn

from metaphrase.ops import linear_and_dropout as fused_linear
from metaphrase.ops.linear_and_dropout import add_dropout, linear, random_mask


@pytest.fixture
def calls(monkeypatch):
    """Fuse layers of any size, and collect the fused products."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("the processor has no products in bfloat16")
    found, apply = [], fused_linear._FusedLinear.apply
    monkeypatch.setattr(fused_linear, "_LEAST_SIZE", 0)
    monkeypatch.setattr(fused_linear._FusedLinear, "apply", lambda *parts: found.append(parts) or apply(*parts))
    return found


def run(layer, states, activation, call, gradient=None):
    states = states.detach().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = call(layer, states, activation)
    if gradient is None:
        gradient = torch.linspace(-1, 1, output.numel()).view(output.shape)
    output.backward(gradient.to(output.dtype))
    gradients = {"states": states.grad} | {name: value.grad for name, value in layer.named_parameters()}
    return output.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def plain(layer, states, activation):
    output = layer(states)
    return output if activation is None else activation(output)


@pytest.mark.parametrize("activation", [None, nn.ReLU()])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_products_and_gradients_are_those_of_torch(shape, dtype, has_bias, activation, calls):
    layer, states = nn.Linear(24, 40, bias=has_bias, dtype=dtype), torch.randn(shape).bfloat16()
    output, gradients = run(layer, states, activation, linear)
    expected, expected_gradients = run(layer, states, activation, plain)
    assert len(calls) == 1 and output.dtype == torch.bfloat16
    # A rounding in bfloat16 apart.
    torch.testing.assert_close(output, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(gradients, expected_gradients, rtol=2**-6, atol=2**-5)


class _Doubled(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


def _hooked(layer, register="register_forward_hook", hook=lambda module, inputs, output: 2 * output):
    getattr(layer, register)(hook)
    return layer


def _replaced(layer):
    layer.forward = lambda states: 2 * nn.functional.linear(states, layer.weight, layer.bias)
    return layer


def _doubled(module, inputs, *outputs):
    return tuple(2 * states for states in inputs)


WRAPPED = {
    "replaced": _replaced,
    "hooked": _hooked,
    "hooked before": lambda layer: _hooked(layer, "register_forward_pre_hook", _doubled),
    "hooked behind": lambda layer: _hooked(layer, "register_full_backward_hook", _doubled),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_what_wraps_a_layer_is_called(wrap, calls):
    layer, states = wrap(nn.Linear(24, 40, bias=False)), torch.randn(7, 24).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(layer, states)
    output.sum().backward()
    expected = 2 * layer.weight.bfloat16().sum(dim=0).expand(7, -1)
    torch.testing.assert_close(states.grad, expected, rtol=2**-6, atol=2**-6)
    assert calls == []


def test_other_classes_and_other_activations_are_called(calls):
    states = torch.randn(7, 24).bfloat16()
    layer, other = nn.Linear(24, 40), _Doubled(24, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(other, states), other(states))
        assert torch.equal(linear(layer, states, nn.GELU()), nn.functional.gelu(layer(states)))
        assert torch.equal(linear(layer, states, _hooked(nn.ReLU())), 2 * layer(states).relu())
    # The layer before an activation is fused, the activation is called.
    assert [part[1] for part in calls] == [False, False]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 256, 600])
def test_gradients_through_a_relu_are_summed_strip_by_strip(rows, has_bias, calls):
    layer, states, gradient = nn.Linear(24, 40, bias=has_bias), torch.randn(rows, 24).bfloat16(), torch.randn(rows, 40)
    _, gradients = run(layer, states, nn.ReLU(), linear, gradient)
    _, expected = run(layer, states, nn.ReLU(), plain, gradient)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 0.01 * gradient.norm(), name


ROTARY = {"position_embedding_type": "rotary"}


@pytest.mark.parametrize(
    "fields",
    [
        {"activation_function": "relu", "gated_mlp": False, "mlp_bias": True, "attention_bias": True},
        {"activation_function": "gelu", "gated_mlp": False, "attention_dropout": 0.1},
        {"activation_function": "silu", "gated_mlp": True, "position_embedding_type": "relative"},
        {"activation_function": "silu", "gated_mlp": True, **ROTARY},
        {"qk_norm": True},
        {"num_key_value_heads": 2},
    ],
)
def test_a_model_learns_the_same_from_fused_layers(fields, calls, monkeypatch):
    fields = {"position_embedding_type": "sinusoidal"} | fields
    model = tiny_model(initializer_range=0.2, **fields).train()
    # Layers that are computed again read the same.
    is_checkpointed = "attention_dropout" in fields
    if is_checkpointed:
        model.gradient_checkpointing_enable()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(5)
            return gradients(model, packed(model.config))

    output, actual = step()
    inner = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    assert len(calls) == len(inner) * (2 if is_checkpointed else 1)
    monkeypatch.setattr(fused_linear, "_LEAST_SIZE", 2**60)
    plain_output, expected = step()
    assert output.loss.item() == pytest.approx(plain_output.loss.item(), rel=2e-3)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 0.03 * gradient.norm() + 5e-4, name


class _Quantized(torch.Tensor):
    """Stands for the weights of libraries that answer to a product in their own way."""


def test_other_weights_dtypes_and_modes_are_torchs_own(calls, monkeypatch):
    layer, states = nn.Linear(24, 40), torch.randn(7, 24)
    linear(layer, states)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            linear(layer, states.bfloat16())
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            linear(layer, states.bfloat16())
        with monkeypatch.context() as patch:
            patch.setattr(fused_linear, "_LEAST_SIZE", 2**18)
            linear(layer, states.bfloat16())
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(_Quantized))
        linear(layer, states.bfloat16())
    assert calls == []


# Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_share_scale_and_gradient(p, dtype):
    states = torch.ones(1000, 300, dtype=dtype, requires_grad=True)
    dropped = add_dropout(None, states, p, training=True)
    kept = dropped != 0
    # Five standard errors of a share in 300 000 draws.
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=5 * (p * (1 - p) / 300_000) ** 0.5)
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - p)), rtol=1e-2, atol=0)
    dropped.backward(torch.full_like(dropped, 2.0))
    torch.testing.assert_close(states.grad, 2 * dropped.detach())


@pytest.mark.parametrize("p", [0.001, 0.01, 0.3, 0.99])
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


@pytest.mark.parametrize("of_states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_residual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("p", "training"), [(0.3, True), (1e-4, True), (0.0, True), (0.3, False)])
def test_a_sum_with_what_is_dropped_has_the_values_and_gradients_of_the_two_steps(p, training, of_residual, of_states):
    leaves = [torch.randn(40, 30, dtype=dtype, requires_grad=True) for dtype in (of_residual, of_states)]
    weight = torch.randn(40, 30)
    found = []
    for compute in (add_dropout, lambda residual, *rest: residual + add_dropout(None, *rest)):
        torch.manual_seed(5)
        total = compute(*leaves, p, training)
        gradients = torch.autograd.grad((total * weight).sum(), leaves)
        assert [gradient.dtype for gradient in gradients] == [of_residual, of_states]
        found.append((total.detach(), *gradients))
    is_half = torch.bfloat16 in (of_residual, of_states)
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2 if is_half else 1e-6, atol=1e-2 if is_half else 1e-6)
