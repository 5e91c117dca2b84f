"""Tests of `metaphrase.modeling.layers` and `normalization`: activations, dropout, norms, and limits of float16."""

import pytest
import torch
from tiny_models import randomize, tiny_config
from torch import nn

from metaphrase.modeling.layers import MetaphraseAttention, MetaphraseEncoderLayer
from metaphrase.modeling.operators import MetaphraseRMSNorm


@torch.no_grad()
@pytest.mark.parametrize("silent", ["mlp.down_proj", "self_attn.o_proj"])
def test_dropout_falls_on_the_output_of_each_sublayer_and_spares_the_residual(silent):
    config = tiny_config(position_embedding_type="none", norm_position="pre", dropout=0.25)
    config._attn_implementation = "eager"
    layer = MetaphraseEncoderLayer(config, 0)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    randomize(layer).eval()
    for parameter in layer.get_submodule(silent).parameters():
        parameter.zero_()
    states = torch.randn(4, 16, 32)
    output = layer(states) - states
    difference = layer.train()(states) - states
    dropped = difference.abs() < 1e-6
    assert 0.2 < dropped.float().mean() < 0.3
    torch.testing.assert_close(difference[~dropped], output[~dropped] / 0.75, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_computes_in_float32(dtype):
    norm = MetaphraseRMSNorm(16, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight)
    # Squared, these are above the largest float16.
    states = (torch.randn(4, 16) * 10_000).to(dtype)
    expected = states.float() / states.float().square().mean(-1, keepdim=True).sqrt() * norm.weight.float()
    torch.testing.assert_close(norm(states), expected.to(dtype), atol=0, rtol=1e-2)


# Attention, against that of torch


@torch.no_grad()
@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 2, "head_dim": 6},
        {"attention_scale": 1},
        {"attention_scale": 0.25, "attention_bias": True},
        {"qk_norm": True, "norm_eps": 1e-2},
    ],
    ids=str,
)
def test_attention_equals_that_of_torch(is_cross, fields):
    config = tiny_config(**{"hidden_size": 16, "position_embedding_type": "none", "attention_bias": False} | fields)
    config._attn_implementation = "eager"
    attention = MetaphraseAttention(config, config.stack_sizes("decoder"), 0, source_size=16 if is_cross else None)
    for parameter in attention.eval().parameters():
        # Weights so large that attention is far from uniform.
        nn.init.normal_(parameter, std=0.5)
    states, encoder_output = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    output, weights = attention(states, encoder_hidden_states=encoder_output if is_cross else None)
    read = encoder_output if is_cross else states
    query, key, value = (
        projection(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projection, inputs in ((attention.q_proj, states), (attention.k_proj, read), (attention.v_proj, read))
    )
    if config.qk_norm:
        query, key = attention.q_norm(query), attention.k_norm(key)
    options = {"scale": fields.get("attention_scale"), "enable_gqa": True}
    expected = nn.functional.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, attention.o_proj(expected), atol=1e-5, rtol=0)
    assert weights.shape == (2, 4, 3, 5 if is_cross else 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
