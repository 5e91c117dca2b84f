"""Tests of `metaphrase.modeling.layers`, against attention written out with loops over heads and tokens."""

import pytest
import torch
from tiny_models import tiny_config

from metaphrase.modeling.layers import MetaphraseAttention


def make_attention(heads=4, seed=0, is_causal=False, is_cross=False, dtype=torch.float32, **fields):
    """An attention in evaluation mode with weights so large that it is far from uniform."""
    defaults = {"hidden_size": 16, "encoder_attention_heads": heads, "decoder_attention_heads": heads}
    defaults |= {"position_embedding_type": "none", "attention_bias": False}
    config = tiny_config(**(defaults | fields))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    attention = MetaphraseAttention(config, heads, layer_idx=0, is_causal=is_causal, is_cross=is_cross)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention.eval().to(dtype)


def attend_by_loops(attention, states, encoder_output=None, scale=None, visible=None):
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
                if visible is not None:
                    scores[~visible[row, token]] = -float("inf")
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
    output, weights = attention(states, encoder_output)
    scale = fields.get("attention_scale")
    expected = attend_by_loops(attention, states, encoder_output if is_cross else None, scale)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    assert weights.shape == (2, 4, 3, 5 if is_cross else 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))


@torch.no_grad()
@pytest.mark.parametrize("as_boolean", [True, False])
def test_mask_hides_keys(as_boolean):
    attention = make_attention()
    states = torch.randn(2, 4, 16)
    visible = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)[:, None, :] & torch.ones(4, 4).bool()
    visible[0] &= torch.ones(4, 4).tril().bool()
    mask = visible[:, None]
    if not as_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = attend_by_loops(attention, states, visible=visible)
    torch.testing.assert_close(attention(states, attention_mask=mask)[0], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_qk_norm_comes_before_the_rotation():
    """With unequal norm weights the two do not commute."""
    attention = make_attention(qk_norm=True, head_dim=4)
    angles = torch.tensor([0.0, 1.0, 2.0])[None, None, :, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    states = torch.randn(1, 3, 16)
    _, weights = attention(states, rotation=(angles.cos(), angles.sin()))

    def turned(projected, norm):
        heads = norm(projected.view(1, 3, 4, 4)).transpose(1, 2)
        pairs = torch.complex(heads[..., :2], heads[..., 2:]) * torch.polar(torch.ones(()), angles[..., :2])
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    query = turned(attention.q_proj(states), attention.q_norm)
    key = turned(attention.k_proj(states), attention.k_norm)
    torch.testing.assert_close(weights, (query @ key.transpose(2, 3) * 0.5).softmax(-1), atol=1e-5, rtol=0)


@torch.no_grad()
def test_attention_dropout_drops_weights_in_training_alone():
    states = torch.randn(2, 8, 16)
    exact_output, exact = make_attention()(states)
    attention = make_attention(attention_dropout=0.25)
    torch.testing.assert_close(attention(states)[0], exact_output)
    attention.train()
    _, weights = attention(states)
    dropped = weights == 0
    assert 0.1 < dropped.float().mean() < 0.4
    torch.testing.assert_close(weights[~dropped], exact[~dropped] / 0.75)
    assert not torch.equal(attention(states)[0], attention(states)[0])
