"""Tests of `metaphrase.modeling.attention`: every option against attention written out with loops over heads and tokens."""

import pytest
import torch
from tiny_models import tiny_config
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from metaphrase.modeling.attention import MetaphraseAttention, combine_bias, eager_attention_forward, kernel_takes_bias


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
@pytest.mark.parametrize("key_value_heads", [None, 1, 2])
@pytest.mark.parametrize("head_dim", [None, 6])
def test_attention_equals_loops(is_cross, key_value_heads, head_dim):
    attention = make_attention(is_cross=is_cross, num_key_value_heads=key_value_heads, head_dim=head_dim)
    states, encoder_output = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    output, weights = attention(states, encoder_output)
    expected = attend_by_loops(attention, states, encoder_output if is_cross else None)
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
def test_head_dim_is_free_of_hidden_size():
    attention = make_attention(hidden_size=15, head_dim=6)
    shapes = [tuple(getattr(attention, name).weight.shape) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert shapes == [(24, 15), (24, 15), (24, 15), (15, 24)]
    assert attention.scaling == 6**-0.5
    states = torch.randn(1, 3, 15)
    torch.testing.assert_close(attention(states)[0], attend_by_loops(attention, states), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("scale", [1, 1.0, 0.25])
def test_attention_scale_multiplies_the_scores(scale):
    attention = make_attention(attention_scale=scale)
    states = torch.randn(2, 4, 16)
    expected = attend_by_loops(attention, states, scale=scale)
    torch.testing.assert_close(attention(states)[0], expected, atol=1e-5, rtol=0)
    assert not torch.allclose(attention(states)[0], attend_by_loops(attention, states), atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_bias_is_in_all_four_projections(has_bias):
    attention = make_attention(attention_bias=has_bias)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert [getattr(attention, name).bias is not None for name in names] == [has_bias] * 4
    if has_bias:
        states = torch.randn(1, 4, 16)
        torch.testing.assert_close(attention(states)[0], attend_by_loops(attention, states), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("is_cross", [False, True])
def test_qk_norm_norms_queries_and_keys_in_each_head(is_cross):
    attention = make_attention(qk_norm=True, norm_eps=1e-2, is_cross=is_cross)
    states, encoder_output = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    source = encoder_output if is_cross else states

    def normed(projected, weight):
        heads = projected.view(*projected.shape[:-1], 4, 4)
        return (heads / (heads.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight).transpose(1, 2)

    query = normed(attention.q_proj(states), attention.q_norm.weight)
    key = normed(attention.k_proj(source), attention.k_norm.weight)
    value = attention.v_proj(source).view(2, -1, 4, 4).transpose(1, 2)
    weights = (query @ key.transpose(2, 3) * 0.5).softmax(-1)
    expected = attention.o_proj((weights @ value).transpose(1, 2).reshape(2, 3, 16))
    torch.testing.assert_close(attention(states, encoder_output)[0], expected, atol=1e-5, rtol=0)
    assert not hasattr(make_attention(qk_norm=False), "q_norm")


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


def test_cross_attention_computes_keys_and_values_once_per_source():
    attention = make_attention(is_cross=True, is_causal=False)
    calls = []
    attention.k_proj.register_forward_hook(lambda *_: calls.append("key"))
    attention.v_proj.register_forward_hook(lambda *_: calls.append("value"))
    states, encoder_output = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        steps = [attention(states[:, i : i + 1], encoder_output, past_key_values=cache)[0] for i in range(3)]
        assert calls == ["key", "value"]
        torch.testing.assert_close(torch.cat(steps, dim=1), attention(states, encoder_output)[0], atol=1e-5, rtol=0)
    assert cache.cross_attention_cache.get_seq_length() == 5
    assert cache.self_attention_cache.get_seq_length() == 0


def test_self_attention_appends_to_its_cache():
    attention = make_attention(is_causal=True)
    states = torch.randn(2, 3, 16)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    visible = torch.ones(3, 3).tril().bool().expand(2, 3, 3)
    with torch.no_grad():
        steps = [attention(states[:, i : i + 1], past_key_values=cache)[0] for i in range(3)]
        expected = attend_by_loops(attention, states, visible=visible)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=1e-5, rtol=0)
    assert cache.self_attention_cache.get_seq_length() == 3


LOWEST = torch.finfo(torch.float32).min


def test_combine_bias_without_mask():
    bias = torch.randn(1, 2, 2, 3)
    assert combine_bias(bias, None, is_causal=False, query_offset=0) is bias
    # The queries are the second and third token: nothing but the third key is hidden, from the second token.
    combined = combine_bias(bias, None, is_causal=True, query_offset=1)
    hidden = torch.tensor([[0, 0, 1], [0, 0, 0]]).bool().expand_as(bias)
    assert (combined[hidden] <= LOWEST).all()
    torch.testing.assert_close(combined[~hidden], bias[~hidden])


@pytest.mark.parametrize("as_boolean", [True, False])
def test_combine_bias_with_mask_leaves_a_row_without_keys_finite(as_boolean):
    bias = torch.tensor([-3.0, 5.0])[None, :, None, None].expand(1, 2, 2, 2)
    visible = torch.tensor([[[[1, 0], [0, 0]]], [[[1, 1], [1, 1]]]]).bool()
    mask = visible if as_boolean else torch.zeros(2, 1, 2, 2).masked_fill(~visible, LOWEST)
    combined = combine_bias(bias, mask, is_causal=True, query_offset=0)
    assert combined.shape == (2, 2, 2, 2)
    torch.testing.assert_close(combined[:, :, 0, 0], bias[:, :, 0, 0].expand(2, 2))
    assert (combined[0, :, 0, 1] <= LOWEST).all()
    torch.testing.assert_close(combined[1], bias[0])
    # The second query of the first row has no key.
    assert combined.softmax(-1).isfinite().all()


@pytest.mark.parametrize("as_boolean", [True, False])
def test_combine_bias_hides_in_float16_however_large_the_bias(as_boolean):
    bias = torch.full((1, 2, 1, 2), 300.0, dtype=torch.float16)
    lowest = torch.finfo(torch.float16).min
    mask = torch.tensor([True, False]) if as_boolean else torch.tensor([0, lowest], dtype=torch.float16)
    combined = combine_bias(bias, mask[None, None, None], is_causal=False, query_offset=0)
    assert (combined[..., 0] == 300).all()
    assert (combined[..., 1] <= lowest).all()


def test_float16_mask_hides_however_large_the_scores():
    """The lowest float16 is no match for a score of float16 activations, which may be a million."""
    attention = make_attention(heads=1, hidden_size=4, head_dim=4)
    query = torch.full((1, 1, 1, 4), 1000.0, dtype=torch.float16)
    key = torch.stack((query[0, 0, 0] * 0, query[0, 0, 0]))[None, None]
    value = torch.tensor([[1.0] * 4, [2.0] * 4], dtype=torch.float16)[None, None]
    lowest = torch.finfo(torch.float16).min
    for mask in (torch.tensor([True, False])[None, None, None], torch.tensor([0, lowest]).half()[None, None, None]):
        output, weights = eager_attention_forward(attention, query, key, value, mask, scaling=0.5)
        assert weights.tolist() == [[[[1.0, 0.0]]]]
        assert output.tolist() == [[[[1.0] * 4]]]


def test_float16_scores_do_not_overflow():
    attention = make_attention(heads=1, hidden_size=4, head_dim=4)
    query = torch.full((1, 1, 1, 4), 1000.0, dtype=torch.float16)
    key = torch.stack((query[0, 0, 0], query[0, 0, 0] * 0.5))[None, None]
    value = torch.tensor([[1.0] * 4, [2.0] * 4], dtype=torch.float16)[None, None]
    output, _ = eager_attention_forward(attention, query, key, value, None, scaling=0.5)
    assert output.tolist() == [[[[1.0] * 4]]]


def test_kernel_takes_bias_says_which_kernel_adds_it():
    assert [kernel_takes_bias(name) for name in ("eager", "sdpa", "flex_attention")] == [False, False, True]
    for name in ("flash_attention_2", "no_such_kernel"):
        with pytest.raises(ValueError, match=f"`attn_implementation` must take a position bias.*{name}"):
            kernel_takes_bias(name)
