"""Tests of `metaphrase.modeling.layers` and `normalization`: activations, dropout, norms, and limits of float16."""

import pytest
import torch
from tiny_models import randomize, tiny_config
from torch import nn

from metaphrase.modeling.layers import MetaphraseEncoderLayer, MetaphraseMLP
from metaphrase.modeling.operators import MetaphraseRMSNorm


def make_layer(layer_class, *args, **fields):
    config = tiny_config(position_embedding_type="none", **fields)
    config._attn_implementation = "eager"
    layer = layer_class(config, *args)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return randomize(layer).eval()


def make_mlp(ffn_dim=24, **fields):
    return make_layer(MetaphraseMLP, ffn_dim, **fields)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", nn.functional.relu),
        ("gelu", nn.functional.gelu),
        ("gelu_new", lambda states: nn.functional.gelu(states, approximate="tanh")),
        ("silu", lambda states: states * torch.sigmoid(states)),
        ("tanh", torch.tanh),
    ],
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_activation_function_is_the_named_one(name, function, is_gated):
    mlp = make_mlp(activation_function=name, gated_mlp=is_gated)
    states = torch.randn(2, 3, 32)
    inner = function(mlp.gate_proj(states)) * mlp.up_proj(states) if is_gated else function(mlp.up_proj(states))
    torch.testing.assert_close(mlp(states), mlp.down_proj(inner), atol=1e-4, rtol=0)


@torch.no_grad()
def test_activation_dropout_falls_on_the_inner_states():
    mlp = make_mlp(ffn_dim=32, activation_dropout=0.25, mlp_bias=False)
    mlp.down_proj.weight.data = torch.eye(32)
    states = torch.randn(4, 16, 32)
    exact = mlp(states)
    mlp.train()
    inner = mlp(states)
    dropped = inner == 0
    assert 0.2 < dropped.float().mean() < 0.3
    torch.testing.assert_close(inner[~dropped], exact[~dropped] / 0.75)
    torch.testing.assert_close(mlp.eval()(states), exact)


@torch.no_grad()
def test_dropout_falls_on_the_output_of_each_sublayer_and_spares_the_residual():
    layer = make_layer(MetaphraseEncoderLayer, 0, norm_position="pre", dropout=0.25)
    states = torch.randn(4, 16, 32)
    for silent in (layer.mlp, layer.self_attn):
        heard = layer.self_attn if silent is layer.mlp else layer.mlp
        output_projections = [getattr(silent, name, None) for name in ("down_proj", "o_proj")]
        saved = {}
        for projection in filter(None, output_projections):
            for name, parameter in projection.named_parameters():
                saved[projection, name] = parameter.data
                parameter.data = torch.zeros_like(parameter)
        norm = layer.self_attn_norm if heard is layer.self_attn else layer.mlp_norm
        output = heard(norm(states))
        output = output[0] if isinstance(output, tuple) else output
        difference = layer.train()(states) - states
        dropped = difference.abs() < 1e-6
        assert 0.2 < dropped.float().mean() < 0.3
        torch.testing.assert_close(difference[~dropped], output[~dropped] / 0.75, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.eval()(states), states + output)
        for (projection, name), value in saved.items():
            getattr(projection, name).data = value


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation_function", ["relu", "silu", "gelu", "gelu_new"])
def test_mlp_stays_finite_in_float16(is_gated, activation_function):
    """Projections that overflow float16: an infinite gate times nothing would not be a number."""
    mlp = make_mlp(gated_mlp=is_gated, activation_function=activation_function, mlp_bias=False).half()
    states = torch.randn(2, 8, 32).clamp(-3, 3).half() * 20_000
    states.requires_grad_()
    output = mlp(states)
    assert output.isfinite().all()
    (output.float() * 1e-6).sum().backward()
    # A gradient of this size may overflow, for which there is loss scaling, but it is a number.
    assert not any(parameter.grad.isnan().any() for parameter in mlp.parameters())


def test_rms_norm_equals_values_by_hand():
    norm = MetaphraseRMSNorm(2, eps=0.5)
    norm.weight.data = torch.tensor([2.0, -1.0])
    # The mean square of (3, 4) is 12.5; with eps its root is 13 ** 0.5.
    expected = torch.tensor([[2 * 3 / 13**0.5, -4 / 13**0.5]])
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), expected)


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
