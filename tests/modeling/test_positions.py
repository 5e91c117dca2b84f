"""Tests of `metaphrase.modeling.positions`: each position type against values worked out by hand or by its formula."""

import math

import pytest
import torch
from tiny_models import DESIGNS, tiny_config, tiny_model
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from metaphrase.modeling.positions import (
    LearnedPositionEmbedding,
    RelativePositionBias,
    RotaryPositionEmbedding,
    SinusoidalPositionEmbedding,
    alibi_slopes,
    positions_from_mask,
    rotate,
    sinusoids,
)


def make_config(**fields):
    """Two heads of width 8."""
    defaults = {"hidden_size": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return tiny_config(**(defaults | fields))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([1, 1, 0, 0], [0, 1, 1, 1]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 0, 1, 1], [0, 0, 1, 2]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float16])
def test_positions_from_mask_count_tokens_and_skip_padding(mask, expected, dtype):
    positions = positions_from_mask(torch.tensor([mask]).to(dtype))
    assert positions.dtype == torch.long
    assert positions.tolist() == [expected]


@pytest.mark.parametrize("hidden_size", [4, 5, 16])
@pytest.mark.parametrize(
    ("layout", "position"), [("interleaved", 100_000), ("half_split", 100_000), ("half_split", 1), ("fairseq", 7)]
)
def test_sinusoidal_layout_equals_the_formula(layout, position, hidden_size):
    half = hidden_size // 2
    exponents = [index / hidden_size for index in range(0, hidden_size, 2)]
    if layout == "fairseq":
        exponents = [index / (half - 1) for index in range(half)]
    angles = [position / 10_000**exponent for exponent in exponents]
    expected = [*map(math.sin, angles), *map(math.cos, angles[:half]), 0.0][:hidden_size]
    if layout == "interleaved":
        expected = [function(angle) for angle in angles for function in (math.sin, math.cos)][:hidden_size]
    row = sinusoids(torch.tensor(position), hidden_size, layout)
    torch.testing.assert_close(row, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_position_offset_is_the_number_of_the_first_position(kind):
    config = make_config(position_embedding_type=kind, max_position_embeddings=5, position_offset=3)
    if kind == "learned":
        embedding = LearnedPositionEmbedding(config)
        table = embedding.weight
    else:
        embedding = SinusoidalPositionEmbedding(config)
        table = sinusoids(torch.arange(9), 16, "interleaved")
    torch.testing.assert_close(embedding(torch.tensor([[4, 0, 2]]), 5)[0], table[[7, 3, 5]])
    if kind == "learned":
        # Padding takes no position: a row of 5 tokens fits, however wide its batch is.
        torch.testing.assert_close(embedding(torch.tensor([[0, 1, 2, 3, 4, 4, 4]]), 7)[0, :5], table[3:])
        with pytest.raises(ValueError, match=r"longer than `max_position_embeddings`.*got 6 tokens and 5 positions"):
            embedding(torch.arange(6)[None], 6)
    else:
        torch.testing.assert_close(embedding(torch.tensor([[5]]), 6)[0], table[[8]])


@pytest.mark.parametrize("offset", [0, 3])
def test_sinusoids_go_on_past_max_position_embeddings(offset):
    fields = {"position_embedding_type": "sinusoidal", "sinusoidal_layout": "half_split", "max_position_embeddings": 4}
    embedding = SinusoidalPositionEmbedding(make_config(**fields, position_offset=offset))
    expected = sinusoids(torch.arange(91) + offset, 16, "half_split")
    # With fewer tokens than positions, with more, and without a known length.
    for positions, length in (([[0, 3, 4, 5, 90]], 91), ([[3, 1, 2], [0, 0, 2]], 4), ([[3, 90]], None)):
        torch.testing.assert_close(
            embedding(torch.tensor(positions), length), expected[torch.tensor(positions)], atol=0, rtol=0
        )


def rotary(parameters=None, **fields):
    return RotaryPositionEmbedding(make_config(rope_parameters=parameters, **fields), heads=2)


def expected_rotation(frequencies, positions):
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * torch.tensor(frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "factor": 4.0,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
@pytest.mark.parametrize("length", [10, 100])
def test_rotary_tables_equal_llama(parameters, length):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(parameters)))
    ours = rotary(dict(parameters), max_position_embeddings=64)
    states, positions = torch.zeros(1, length, 16), torch.arange(length)[None]
    expected = theirs(states, positions)
    torch.testing.assert_close(ours(states, positions), expected, atol=1e-5, rtol=0)


def test_rotary_partial_factor_leaves_the_rest_of_a_head_alone():
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    cosine, sine = rotary(parameters)(torch.zeros(1, 5, 16), torch.arange(5)[None])
    assert cosine.shape == (1, 5, 4)
    expected = expected_rotation([1.0, 0.01], range(5))
    torch.testing.assert_close((cosine[0], sine[0]), expected)
    states = torch.randn(1, 2, 5, 8)
    turned = rotate(states, cosine, sine)
    torch.testing.assert_close(turned[..., 4:], states[..., 4:], atol=0, rtol=0)
    # Entries i and i + 2 are the two sides of a complex number that is turned by the angle.
    as_complex = torch.complex(states[..., :2], states[..., 2:4]) * torch.complex(cosine[..., :2], sine[..., :2])
    torch.testing.assert_close(turned[..., :4], torch.cat((as_complex.real, as_complex.imag), dim=-1))


def test_rotary_width_follows_the_heads_of_its_stack():
    config = make_config(encoder_attention_heads=4, decoder_attention_heads=2)
    assert [RotaryPositionEmbedding(config, heads).inv_freq.shape[0] for heads in (4, 2)] == [2, 4]
    one_stack = RotaryPositionEmbedding(config=config.get_text_config(decoder=True))
    assert one_stack.inv_freq.shape == one_stack.original_inv_freq.shape == (4,)
    assert (one_stack.rope_type, one_stack.attention_scaling) == ("default", 1.0)


@pytest.mark.parametrize("parameters", [None, {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}])
def test_rotate_equals_llama(parameters):
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 6, 8), torch.randn(2, 1, 6, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 300]])
    cosine, sine = rotary(parameters)(query, positions)
    expected = apply_rotary_pos_emb(query, key, cosine, sine)
    cosine, sine = cosine[:, None], sine[:, None]
    torch.testing.assert_close((rotate(query, cosine, sine), rotate(key, cosine, sine)), expected, atol=1e-5, rtol=0)


def test_rotate_keeps_float16_finite():
    states = torch.full((1, 1, 1, 8), torch.finfo(torch.float16).max, dtype=torch.float16)
    states[..., 4:] *= -1
    angle = torch.full((1, 1, 1, 8), math.pi / 4)
    assert rotate(states, angle.cos().half(), angle.sin().half()).isfinite().all()


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (64, 500)])
def test_relative_buckets_equal_t5(is_bidirectional, buckets, max_distance):
    config = make_config(
        position_embedding_type="relative",
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
    )
    distance = torch.arange(-200, 201)
    expected = T5Attention._relative_position_bucket(distance, is_bidirectional, buckets, max_distance)
    bucket = RelativePositionBias(config, 2, is_bidirectional).bucket(distance)
    assert bucket.tolist() == expected.tolist()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 12, 16, 20, 24])
def test_alibi_slopes_equal_bloom(heads):
    # With a mask of two tokens, the value at the second is the slope itself.
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_cast_keeps_its_angles_exact(dtype):
    model = tiny_model(**DESIGNS["rotary"])
    tables = [module for module in model.modules() if isinstance(module, RotaryPositionEmbedding)]
    expected = [table.inv_freq.clone() for table in tables]
    model.to(dtype)
    assert tables and all(
        torch.equal(table.inv_freq, frequencies) for table, frequencies in zip(tables, expected, strict=True)
    )
    assert model.dtype == dtype
    assert all(table.to("meta").inv_freq.device.type == "meta" for table in tables)
