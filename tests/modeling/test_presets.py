"""Tests of `metaphrase.modeling.presets`: every architecture builds, and the published ones have the published size."""

import pytest
import torch
from tiny_models import random_batch

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

# Parameters (tied weights once), layers and heads of encoder and decoder, activation, and dropout, as published. Of BART without
# the two unused rows of its tables of positions, of Marian with the bias of the logits and without the fixed tables.
PRESETS = {
    "t5-small": (60_506_624, (6, 6), (8, 8), "relu", 0.1),
    "t5-base": (222_903_552, (12, 12), (12, 12), "relu", 0.1),
    "t5-large": (737_668_096, (24, 24), (16, 16), "relu", 0.1),
    "t5-3b": (2_851_598_336, (24, 24), (32, 32), "relu", 0.1),
    "t5-11b": (11_307_321_344, (24, 24), (128, 128), "relu", 0.1),
    "t5-v1.1-small": (76_961_152, (8, 8), (6, 6), "gelu_new", 0.1),
    "t5-v1.1-base": (247_577_856, (12, 12), (12, 12), "gelu_new", 0.1),
    "t5-v1.1-large": (783_150_080, (24, 24), (16, 16), "gelu_new", 0.1),
    "t5-v1.1-xl": (2_849_757_184, (24, 24), (32, 32), "gelu_new", 0.1),
    "t5-v1.1-xxl": (11_135_332_352, (24, 24), (64, 64), "gelu_new", 0.1),
    "transformer-base": (63_082_496, (6, 6), (8, 8), "relu", 0.1),
    "transformer-big": (214_245_376, (6, 6), (16, 16), "relu", 0.3),
    "transformer-iwslt": (36_663_296, (6, 6), (4, 4), "relu", 0.3),
    "transformer-tiny": (2_605_056, (4, 4), (4, 4), "relu", 0.3),
    "bart-base": (139_417_344, (6, 6), (12, 12), "gelu", 0.1),
    "bart-large": (406_287_360, (12, 12), (16, 16), "gelu", 0.1),
    "marian": (73_944_309, (6, 6), (8, 8), "silu", 0.1),
    "metaphrase-tiny": (14_489_088, (4, 4), (4, 4), "silu", 0.1),
    "metaphrase-small": (48_442_880, (6, 3), (8, 8), "silu", 0.1),
    "metaphrase-base": (166_167_552, (12, 6), (12, 12), "silu", 0.1),
    "metaphrase-large": (477_440_000, (24, 8), (16, 16), "silu", 0.1),
    "student-tiny": (17_110_016, (6, 2), (4, 4), "silu", 0.1),
    "student-base": (44_181_504, (6, 2), (8, 8), "silu", 0.1),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_architectures(name):
    config = MetaphraseConfig.from_preset(name)
    with torch.device("meta"):
        model = MetaphraseForConditionalGeneration(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    layers = len(model.get_encoder().layers), len(model.get_decoder().layers)
    heads = config.encoder_attention_heads, config.decoder_attention_heads
    assert (size, layers, heads, config.activation_function, config.dropout) == PRESETS[name]
    is_vaswani = name.startswith(("transformer", "bart", "marian"))
    design = ("post", "layernorm", False) if is_vaswani else ("pre", "rmsnorm", True)
    assert (config.norm_position, config.norm_type, config.final_norm) == design
    assert config.attention_scale == (1.0 if name.startswith("t5") else None)
    if name.startswith("metaphrase"):
        assert config.position_embedding_type == "rotary" and config.head_dim == 64


def test_presets_are_the_promised_ones():
    assert MetaphraseConfig.presets() == list(PRESETS)


@pytest.mark.parametrize(
    "name",
    ["t5-small", "t5-v1.1-small", "transformer-iwslt", "transformer-tiny", "bart-base", "marian", "metaphrase-tiny"],
)
def test_small_presets_run(name):
    """With the widths of the preset, but few layers and a vocabulary that costs nothing."""
    fields = {"vocab_size": 50, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name != "t5-small":
        # Of a single layer T5's output, with embeddings as large as they are, says the token that it reads.
        fields |= {"encoder_layers": 1, "decoder_layers": 1}
    config = MetaphraseConfig.from_preset(name, **fields)
    model = MetaphraseForConditionalGeneration(config).train()
    outputs = model(**random_batch(config, with_labels=True), return_logits=True)
    assert outputs.logits.shape == (3, 5, 50)
    assert outputs.loss.isfinite()
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    # A fresh model is close to knowing nothing: not confident in anything wrong.
    assert outputs.loss < 3 * torch.tensor(50.0).log()


def test_from_preset_takes_overrides():
    config = MetaphraseConfig.from_preset("transformer-tiny", vocab_size=99, dropout=0.0)
    assert (config.vocab_size, config.decoder_vocab_size, config.dropout, config.hidden_size) == (99, 99, 0.0, 128)
    config = MetaphraseConfig.from_preset("transformer-tiny", d_model=64, num_hidden_layers=2, num_attention_heads=8)
    assert (config.hidden_size, config.encoder_layers, config.encoder_attention_heads) == (64, 2, 8)
    assert MetaphraseConfig.from_preset("transformer-tiny").hidden_size == 128


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, 512**-0.5),
        ({"hidden_size": 64}, 1 / 8),
        ({"d_model": 64}, 1 / 8),
        ({"hidden_size": 64, "tie_word_embeddings": False}, 1.0),
        ({"hidden_size": 64, "logits_scale": 0.5}, 0.5),
    ],
)
def test_t5_scales_its_logits_by_the_width_that_it_has(overrides, expected):
    assert MetaphraseConfig.from_preset("t5-small", **overrides).logits_scale == expected


@pytest.mark.parametrize(
    ("name", "overrides", "word"), [("t5-smal", {}, "`preset`"), ("t5-small", {"hiden_size": 8}, "`hiden_size`")]
)
def test_from_preset_refuses_unknown_names(name, overrides, word):
    with pytest.raises(ValueError, match=word):
        MetaphraseConfig.from_preset(name, **overrides)
