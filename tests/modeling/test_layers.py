"""Tests of `metaphrase.modeling.layers`: the feed-forward, the two norm positions, and where dropout falls."""

import pytest
import torch
from tiny_models import randomize, tiny_config
from torch import nn

from metaphrase.modeling.layers import MetaphraseDecoderLayer, MetaphraseEncoderLayer, MetaphraseMLP


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
@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_mlp_is_two_projections(has_bias):
    mlp = make_mlp(gated_mlp=False, mlp_bias=has_bias, activation_function="relu")
    states = torch.randn(2, 3, 32)
    bias = {name: value for name, value in mlp.named_parameters() if name.endswith("bias")}
    assert sorted(bias) == (["down_proj.bias", "up_proj.bias"] if has_bias else [])
    inner = states @ mlp.up_proj.weight.T + bias.get("up_proj.bias", 0)
    expected = inner.clamp(min=0) @ mlp.down_proj.weight.T + bias.get("down_proj.bias", 0)
    torch.testing.assert_close(mlp(states), expected, atol=1e-5, rtol=0)
    assert not hasattr(mlp, "gate_proj")


@torch.no_grad()
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_mlp_multiplies_a_second_projection(has_bias):
    mlp = make_mlp(gated_mlp=True, mlp_bias=has_bias, activation_function="relu")
    states = torch.randn(2, 3, 32)
    bias = {name: value for name, value in mlp.named_parameters() if name.endswith("bias")}
    assert sorted(bias) == (["down_proj.bias", "gate_proj.bias", "up_proj.bias"] if has_bias else [])
    # The activation is the gate's; the other projection is linear.
    gate = (states @ mlp.gate_proj.weight.T + bias.get("gate_proj.bias", 0)).clamp(min=0)
    inner = gate * (states @ mlp.up_proj.weight.T + bias.get("up_proj.bias", 0))
    expected = inner @ mlp.down_proj.weight.T + bias.get("down_proj.bias", 0)
    torch.testing.assert_close(mlp(states), expected, atol=1e-5, rtol=0)


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
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_pre_norm_norms_what_enters_a_sublayer(norm_type):
    layer = make_layer(MetaphraseDecoderLayer, 0, norm_position="pre", norm_type=norm_type)
    states, encoder_output = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    expected = states + layer.self_attn(layer.self_attn_norm(states))[0]
    expected = expected + layer.cross_attn(layer.cross_attn_norm(expected), encoder_output)[0]
    expected = expected + layer.mlp(layer.mlp_norm(expected))
    torch.testing.assert_close(layer(states, encoder_output), expected)


@torch.no_grad()
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_post_norm_norms_the_residual_sum(norm_type):
    layer = make_layer(MetaphraseDecoderLayer, 0, norm_position="post", norm_type=norm_type)
    states, encoder_output = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    expected = layer.self_attn_norm(states + layer.self_attn(states)[0])
    expected = layer.cross_attn_norm(expected + layer.cross_attn(expected, encoder_output)[0])
    expected = layer.mlp_norm(expected + layer.mlp(expected))
    torch.testing.assert_close(layer(states, encoder_output), expected)


@torch.no_grad()
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_encoder_layer_has_no_cross_attention(norm_position):
    layer = make_layer(MetaphraseEncoderLayer, 0, norm_position=norm_position)
    assert not hasattr(layer, "cross_attn")
    states = torch.randn(2, 3, 32)
    if norm_position == "pre":
        expected = states + layer.self_attn(layer.self_attn_norm(states))[0]
        expected = expected + layer.mlp(layer.mlp_norm(expected))
    else:
        expected = layer.self_attn_norm(states + layer.self_attn(states)[0])
        expected = layer.mlp_norm(expected + layer.mlp(expected))
    torch.testing.assert_close(layer(states), expected)


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


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_layer_stays_finite_in_float16(norm_position):
    layer = make_layer(MetaphraseEncoderLayer, 0, norm_position=norm_position, norm_type="rmsnorm").half()
    states = torch.full((1, 4, 32), 60_000.0, dtype=torch.float16)
    assert layer(states).isfinite().all()
