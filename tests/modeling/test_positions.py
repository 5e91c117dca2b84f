"""Tests of `metaphrase.modeling.positions`: each position type against values worked out by hand or by its formula."""

import math

import pytest
import torch
from tiny_models import DESIGNS, tiny_config, tiny_model
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from metaphrase.modeling import MetaphraseModel
from metaphrase.modeling.positions import (
    AlibiPositionBias,
    RotaryPositionEmbedding,
    positions_from_mask,
    rotate,
    sinusoids,
)


def make_config(**fields):
    """Two heads of width 8."""
    defaults = {"hidden_size": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return tiny_config(**(defaults | fields))


MASKS = {(1, 1, 1, 1): [0, 1, 2, 3], (1, 1, 0, 0): [0, 1, 1, 1], (0, 0, 1, 1): [0, 0, 0, 1]}
MASKS |= {(0, 0, 0, 0): [0, 0, 0, 0], (1, 0, 1, 1): [0, 0, 1, 2]}


@pytest.mark.parametrize(("mask", "expected"), MASKS.items())
def test_positions_from_mask_count_tokens_and_skip_padding(mask, expected):
    for dtype in (torch.long, torch.bool, torch.float16):
        assert positions_from_mask(torch.tensor([mask]).to(dtype)).tolist() == [expected]


@pytest.mark.parametrize("hidden_size", [5, 16])
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


def rotary(parameters=None, **fields):
    return RotaryPositionEmbedding(make_config(rope_parameters=parameters, **fields))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
        | {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]},
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
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.01, 1.0, 0.01])
    torch.testing.assert_close((cosine[0], sine[0]), (angles.cos(), angles.sin()))
    states = torch.randn(1, 2, 5, 8)
    turned = rotate(states, cosine, sine)
    torch.testing.assert_close(turned[..., 4:], states[..., 4:], atol=0, rtol=0)
    # Entries i and i + 2 are the two sides of a complex number that is turned by the angle.
    as_complex = torch.complex(states[..., :2], states[..., 2:4]) * torch.complex(cosine[..., :2], sine[..., :2])
    torch.testing.assert_close(turned[..., :4], torch.cat((as_complex.real, as_complex.imag), dim=-1))


def test_rotary_width_follows_the_heads_of_its_stack():
    config = make_config(encoder_attention_heads=4, decoder_attention_heads=2)
    model = MetaphraseModel(config)
    assert [stack.rotary_emb.inv_freq.shape[0] for stack in (model.encoder, model.decoder)] == [2, 4]


def test_rotate_keeps_float16_finite():
    states = torch.full((1, 1, 1, 8), torch.finfo(torch.float16).max, dtype=torch.float16)
    states[..., 4:] *= -1
    angle = torch.full((1, 1, 1, 8), math.pi / 4)
    assert rotate(states, angle.cos().half(), angle.sin().half()).isfinite().all()


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20])
def test_alibi_slopes_equal_bloom(heads):
    # With a mask of two tokens, the value at the second is the slope itself.
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(AlibiPositionBias(heads).slopes), expected)


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
