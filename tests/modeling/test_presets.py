"""Tests of `metaphrase.modeling.presets`: every architecture builds, and the published ones have the published size."""

import pytest
import torch
from tiny_models import random_batch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.presets import PRESETS


def meta_model(name, **overrides):
    with torch.device("meta"):
        return MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset(name, **overrides))


def count_parameters(model):
    """Tied weights are one parameter."""
    return sum(parameter.numel() for parameter in model.parameters())


def stacks_of(layers, heads, inner):
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    return {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}


# The dimensions of the released configurations, written down apart from the presets.
T5_SIZES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
    "t5-v1.1-small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "t5-v1.1-base": {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "t5-v1.1-large": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16},
    "t5-v1.1-xl": {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32},
    "t5-v1.1-xxl": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
}


@pytest.mark.parametrize("name", T5_SIZES)
def test_t5_presets_have_the_parameters_of_transformers(name):
    is_v1_1 = "v1.1" in name
    config = T5Config(
        vocab_size=32128,
        feed_forward_proj="gated-gelu" if is_v1_1 else "relu",
        tie_word_embeddings=not is_v1_1,
        **T5_SIZES[name],
    )
    with torch.device("meta"):
        theirs = T5ForConditionalGeneration(config)
        if is_v1_1:
            # transformers unties the projection only while it loads a checkpoint that has one.
            theirs.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
    ours = meta_model(name)
    assert count_parameters(ours) == count_parameters(theirs)
    shapes = [sorted(tuple(parameter.shape) for parameter in model.parameters()) for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert ours.config.activation_function == config.dense_act_fn
    assert ours.config.logits_scale == (1.0 if is_v1_1 else config.d_model**-0.5)
    assert ours.config.attention_scale == 1.0
    assert ours.config.norm_eps == config.layer_norm_epsilon
    assert ours.config.relative_attention_num_buckets == config.relative_attention_num_buckets
    assert ours.config.relative_attention_max_distance == config.relative_attention_max_distance


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "heads", "inner"),
    [("bart-base", 768, 6, 12, 3072), ("bart-large", 1024, 12, 16, 4096)],
)
def test_bart_presets_have_the_parameters_of_transformers(name, hidden, layers, heads, inner):
    config = BartConfig(d_model=hidden, vocab_size=50265, **stacks_of(layers, heads, inner))
    with torch.device("meta"):
        theirs = BartForConditionalGeneration(config)
    # BART has two rows too many in each table of positions.
    assert count_parameters(meta_model(name)) == count_parameters(theirs) - 2 * 2 * hidden


def test_marian_preset_has_the_parameters_of_transformers():
    config = MarianConfig(d_model=512, vocab_size=58101, max_position_embeddings=512, **stacks_of(6, 8, 2048))
    with torch.device("meta"):
        theirs = MarianMTModel(config)
    # Theirs holds the two fixed tables as parameters, and the bias of the output as a buffer.
    assert count_parameters(meta_model("marian")) == count_parameters(theirs) - 2 * 512 * 512 + 58101


def vaswani_parameters(vocab, hidden, inner, layers):
    """By hand: four projections to an attention, two to a feed-forward, a norm to each sub-layer, one embedding."""
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * hidden * inner + inner + hidden
    norm = 2 * hidden
    encoder = layers * (attention + feed_forward + 2 * norm)
    decoder = layers * (2 * attention + feed_forward + 3 * norm)
    return vocab * hidden + encoder + decoder


@pytest.mark.parametrize(
    ("name", "dimensions", "heads", "dropout"),
    [
        ("transformer-base", (37_000, 512, 2048, 6), 8, 0.1),
        ("transformer-big", (37_000, 1024, 4096, 6), 16, 0.3),
        ("transformer-iwslt", (10_000, 512, 1024, 6), 4, 0.3),
        ("transformer-tiny", (10_000, 128, 256, 4), 4, 0.3),
    ],
)
def test_vaswani_presets_equal_a_count_by_hand(name, dimensions, heads, dropout):
    model = meta_model(name)
    assert count_parameters(model) == vaswani_parameters(*dimensions)
    assert model.config.encoder_attention_heads == model.config.decoder_attention_heads == heads
    assert model.config.dropout == dropout
    assert (model.config.norm_position, model.config.norm_type) == ("post", "layernorm")
    assert model.config.final_norm is False


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "inner"),
    [
        ("metaphrase-tiny", 256, (4, 4), 512),
        ("metaphrase-small", 512, (6, 3), 1408),
        ("metaphrase-base", 768, (12, 6), 2048),
        ("metaphrase-large", 1024, (24, 8), 2816),
    ],
)
def test_own_presets_equal_a_count_by_hand(name, hidden, layers, inner):
    model = meta_model(name)
    attention, feed_forward = 4 * hidden * hidden, 3 * hidden * inner
    encoder = layers[0] * (attention + feed_forward + 2 * hidden) + hidden
    decoder = layers[1] * (2 * attention + feed_forward + 3 * hidden) + hidden
    assert count_parameters(model) == 32_000 * hidden + encoder + decoder
    assert model.config.get_head_dim(model.config.encoder_attention_heads) == 64
    assert (model.config.encoder_layers, model.config.decoder_layers) == layers


@pytest.mark.parametrize("name", MetaphraseConfig.presets())
def test_every_preset_builds_and_lists_only_fields(name):
    assert set(PRESETS[name]) <= set(MetaphraseConfig.__dataclass_fields__)
    config = MetaphraseConfig.from_preset(name)
    for field, value in PRESETS[name].items():
        assert getattr(config, field) == value, field
    assert len(meta_model(name).model.encoder.layers) == config.encoder_layers


def test_presets_are_the_promised_ones():
    assert MetaphraseConfig.presets() == [
        *(f"t5-{size}" for size in ("small", "base", "large", "3b", "11b")),
        *(f"t5-v1.1-{size}" for size in ("small", "base", "large", "xl", "xxl")),
        *(f"transformer-{size}" for size in ("base", "big", "iwslt", "tiny")),
        *("bart-base", "bart-large", "marian"),
        *(f"metaphrase-{size}" for size in ("tiny", "small", "base", "large")),
    ]


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
    ("name", "overrides", "message"),
    [
        (
            "t5-smal",
            {},
            r"`preset` must be one of t5-small, .*metaphrase-large, got 't5-smal'\. Did you mean 't5-small'\?",
        ),
        ("zzz", {}, r"`preset` must be one of .*, got 'zzz'\.$"),
        (
            "t5-small",
            {"hiden_size": 8},
            r"`hiden_size` is not a field of MetaphraseConfig\. Did you mean 'hidden_size'\?",
        ),
        ("t5-small", {"dropout": 2}, r"`dropout` must be a probability in \[0, 1\), got 2"),
        ("t5-small", {"qqqq": 1}, r"`qqqq` is not a field of MetaphraseConfig\.$"),
    ],
)
def test_from_preset_refuses_what_it_does_not_know(name, overrides, message):
    with pytest.raises(ValueError, match=message) as error:
        MetaphraseConfig.from_preset(name, **overrides)
    assert type(error.value) is ValueError
