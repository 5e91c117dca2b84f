"""Tests of `metaphrase.modeling.layers` and `normalization`: activations, dropout, norms, and limits of float16."""

import pytest
import torch
from tiny_models import randomize, tiny_config
from torch import nn

from metaphrase.modeling.layers import MetaphraseAttention, MetaphraseEncoderLayer
from metaphrase.modeling.operators import MetaphraseRMSNorm


def make_layer(layer_class, *args, **fields):
    config = tiny_config(position_embedding_type="none", **fields)
    config._attn_implementation = "eager"
    layer = layer_class(config, *args)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return randomize(layer).eval()


@torch.no_grad()
@pytest.mark.parametrize("silent", ["mlp.down_proj", "self_attn.o_proj"])
def test_dropout_falls_on_the_output_of_each_sublayer_and_spares_the_residual(silent):
    layer = make_layer(MetaphraseEncoderLayer, 0, norm_position="pre", dropout=0.25)
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


# Attention, against loops over heads and tokens


def make_attention(heads=4, seed=0, is_causal=False, is_cross=False, dtype=torch.float32, **fields):
    """An attention in evaluation mode with weights so large that it is far from uniform."""
    defaults = {"hidden_size": 16, "encoder_attention_heads": heads, "decoder_attention_heads": heads}
    defaults |= {"position_embedding_type": "none", "attention_bias": False}
    config = tiny_config(**(defaults | fields))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    source_size = config.hidden_size if is_cross else None
    attention = MetaphraseAttention(config, config.stack_sizes("decoder"), 0, is_causal, source_size)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention.eval().to(dtype)


def attend_by_loops(attention, states, encoder_output=None, scale=None):
    """Compute attention for one head and one query at a time."""
    encoder_output = states if encoder_output is None else encoder_output
    head_dim, groups = attention.head_dim, attention.num_key_value_groups
    scale = head_dim**-0.5 if scale is None else scale
    query, key, value = attention.q_proj(states), attention.k_proj(encoder_output), attention.v_proj(encoder_output)
    if attention.config.qk_norm:
        query, key = (
            norm(projected.unflatten(-1, (-1, head_dim))).flatten(-2)
            for norm, projected in ((attention.q_norm, query), (attention.k_norm, key))
        )
    output = torch.zeros(query.shape)
    for row in range(states.shape[0]):
        for head in range(query.shape[-1] // head_dim):
            head_columns = slice(head * head_dim, (head + 1) * head_dim)
            shared = slice(head // groups * head_dim, (head // groups + 1) * head_dim)
            for token in range(states.shape[1]):
                vector = query[row, token, head_columns]
                scores = torch.stack([vector @ row_key for row_key in key[row, :, shared]]) * scale
                output[row, token, head_columns] = scores.softmax(-1) @ value[row, :, shared]
    return attention.o_proj(output)


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
def test_attention_equals_loops(is_cross, fields):
    attention = make_attention(is_cross=is_cross, **fields)
    states, encoder_output = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    output, weights = attention(states, encoder_hidden_states=encoder_output if is_cross else None)
    scale = fields.get("attention_scale")
    expected = attend_by_loops(attention, states, encoder_output if is_cross else None, scale)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    assert weights.shape == (2, 4, 3, 5 if is_cross else 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
