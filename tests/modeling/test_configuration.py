"""Tests of `metaphrase.modeling.configuration_metaphrase`: saving, copies, and rules."""

import copy
import inspect

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_models import fields_of, tiny_config, tiny_model
from transformers import AutoConfig

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import STACKS

# For each field that the class itself declares, another value than the default. All are valid together.
FLAGS = [name for name, kind in inspect.get_annotations(MetaphraseConfig).items() if kind in (bool, bool | None)]
SLIDES, IS_FULL = "sliding_attention", "full_attention"
DIFFERENT = {name: not getattr(MetaphraseConfig, name) for name in FLAGS} | {"is_encoder_decoder": True}
DIFFERENT |= {"vocab_size": 41, "decoder_vocab_size": 43, "hidden_size": 48, "decoder_hidden_size": 18, "head_dim": 10}
DIFFERENT |= {"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 6}
DIFFERENT |= {"encoder_ffn_dim": 20, "decoder_ffn_dim": 22, "num_key_value_heads": 2, "decoder_num_key_value_heads": 3}
DIFFERENT |= {"activation_function": "relu", "position_embedding_type": "learned", "sinusoidal_layout": "half_split"}
DIFFERENT |= {"max_position_embeddings": 17, "decoder_max_position_embeddings": 19, "position_offset": 3}
DIFFERENT |= {"encoder_layer_types": [SLIDES, IS_FULL, SLIDES], "decoder_layer_types": [SLIDES], "type_vocab_size": 4}
DIFFERENT |= {"encoder_window": [4, 5], "decoder_window": 6, "sliding_rope_theta": 7.0, "logits_scale": 0.25}
DIFFERENT |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}, "norm_eps": 1e-3}
DIFFERENT |= {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 33, "initializer_range": 0.05}
DIFFERENT |= {"norm_type": "layernorm", "norm_position": "post", "attention_scale": 0.5, "activation_dropout": 0.4}
DIFFERENT |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "dropout": 0.2, "attention_dropout": 0.3}
DIFFERENT |= {"classifier_dropout": 0.6, "classifier_hidden_layer": False, "classifier_pooling": "last"}
DIFFERENT |= {"pad_token_id": 5, "bos_token_id": 6, "eos_token_id": [7, 8], "decoder_start_token_id": 9}
# Such fields need no explanation.
COMMON = {"use_cache", "is_encoder_decoder", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
# Fields of every configuration of transformers.
INHERITED = {"output_attentions": True, "output_hidden_states": True, "return_dict": False, "architectures": ["X"]}


def test_every_field_survives_saving_and_copying(tmp_path):
    # A merged attention excludes the different width and the position bias, and a recurrence windows.
    excluded = {"merged_attention", "decoder_self_attention"}
    different = {name: value for name, value in DIFFERENT.items() if name not in excluded}
    assert set(different) == set(inspect.get_annotations(MetaphraseConfig)) - excluded
    assert all(f" {field}" in MetaphraseConfig.__doc__ for field in different.keys() - COMMON)
    config = MetaphraseConfig(**different, **INHERITED, dtype="float16", attn_implementation="eager")
    config.to_json_file(tmp_path / "config.json")
    config.save_pretrained(tmp_path / "below")
    copies = [
        MetaphraseConfig.from_dict(config.to_dict()),
        # Derived values are derived again from the fields that differ from the defaults.
        MetaphraseConfig.from_dict(config.to_diff_dict()),
        MetaphraseConfig.from_json_file(tmp_path / "config.json"),
        MetaphraseConfig.from_pretrained(tmp_path, subfolder="below"),
        AutoConfig.from_pretrained(tmp_path / "below"),
        copy.deepcopy(config),
    ]
    for other in copies:
        assert type(other) is MetaphraseConfig and other.dtype == torch.float16
        assert {field: getattr(other, field) for field in (different | INHERITED)} == different | INHERITED
        assert fields_of(other) == fields_of(config)
    copies[-1].dropout = 0.9
    assert config.dropout == 0.2


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        *(({}, "decoder_vocab_size", 37), ({"num_key_value_heads": 2}, "head_dim", 8)),
        *(({"head_dim": 6}, "num_key_value_heads", 4), ({"norm_position": "pre"}, "final_norm", True)),
        ({"norm_position": "post"}, "final_norm", False),
        ({"norm_position": "post", "final_norm": True}, "final_norm", True),
        ({}, "rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
    ],
)
def test_none_is_filled_in(fields, field, expected):
    config = tiny_config(**fields)
    assert {name: getattr(config, name) for name in (*fields, field)} == fields | {field: expected}


def test_sizes_of_two_different_stacks_stay_none(tmp_path):
    fields = {"decoder_attention_heads": 2, "decoder_layers": 3}
    config = tiny_config(**fields)
    config.save_pretrained(tmp_path)
    encoder, decoder = config.get_text_config(encoder=True), config.get_text_config(decoder=True)
    sizes = [
        (part.num_key_value_heads, part.head_dim, part.num_hidden_layers, part.num_attention_heads)
        for part in (config, MetaphraseConfig.from_pretrained(tmp_path), encoder, decoder)
    ]
    assert sizes == [(None, None, 2, 4)] * 2 + [(4, 8, 2, 4), (2, 16, 3, 2)]
    # The rotary embedding of a model works on a configuration of its own.
    assert tiny_model(**fields).config == config


RELATIVE, SEPARATE = {"position_embedding_type": "relative"}, {"share_embeddings": False}
# The error names the first field.
RULES = [
    *({field: 0} for field in ("vocab_size", "num_key_value_heads", "decoder_hidden_size", "sliding_rope_theta")),
    *({"norm_eps": 0.0}, {"initializer_range": -1}, {"dropout": -0.1}, {"activation_dropout": float("nan")}),
    *({"activation_function": "swoosh"}, {"hidden_size": 34}, {"head_dim": 7}, {"decoder_num_key_value_heads": 3}),
    {"num_key_value_heads": 4, "decoder_attention_heads": 2},
    *({"rope_parameters": {"rope_type": rope_type}} for rope_type in ("swoosh", None)),
    *({"rope_parameters": {"rope_theta": theta}} for theta in (None, 0, "large")),
    {"pad_token_id": None, "train_padding_embedding": False},
    *({"decoder_hidden_size": 24}, {"decoder_hidden_size": 24, "merged_attention": True} | SEPARATE),
    *(RELATIVE | {"merged_attention": True}, {"position_embedding_type": "alibi", "decoder_self_attention": "ssru"}),
    {"merged_attention": True, "decoder_self_attention": "ssru"},
    *({"encoder_layer_types": kinds} for kinds in (["full_attention"], ["sliding_attention", "none"])),
    *({f"{stack}_window": None, f"{stack}_layer_types": ["sliding_attention"] * 2} for stack in STACKS),
    *({"encoder_window": window, "encoder_layer_types": ["sliding_attention"] * 2} for window in ([1], [1, -1])),
    *({name: window} for name, window in (("encoder_window", [1, 1]), ("decoder_window", 2))),
    *({"relative_attention_num_buckets": buckets} | RELATIVE for buckets in (2, 7)),
    {"relative_attention_max_distance": 8, "relative_attention_num_buckets": 16} | RELATIVE,
    {"decoder_vocab_size": 30},
    *({field: value} for field in ("pad_token_id", "decoder_start_token_id") for value in (-1, 37)),
    # The shift to the right writes both tokens into the target.
    *({field: 30, "decoder_vocab_size": 20} | SEPARATE for field in ("decoder_start_token_id", "pad_token_id")),
]


@pytest.mark.parametrize("fields", RULES, ids=str)
def test_a_broken_rule_names_its_field(fields):
    field = next(iter(fields))
    with pytest.raises(ValueError) as error:
        tiny_config(**fields)
    assert type(error.value) is ValueError and f"`{field}`" in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [{"position_embedding_type": "other"}, {"hidden_size": "32"}, {"rope_parameters": {"rope_type": "llama3"}}],
    ids=str,
)
def test_types_and_choices_are_checked_by_transformers(fields):
    with pytest.raises((StrictDataclassError, KeyError), match=next(iter(fields))):
        tiny_config(**fields)


# With every field that transformers' checks read or add.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"relative_attention_num_buckets": 7, "dropout": 0},
        {"head_dim": 7, "rope_parameters": {"rope_type": "swoosh"}, "position_embedding_type": "alibi"},
        {"hidden_size": 33, "head_dim": 8, "position_embedding_type": "learned"},
        {"pad_token_id": None, "bos_token_id": None, "decoder_start_token_id": None, "eos_token_id": None},
        {"rope_parameters": LONGROPE},
        {"vocab_size": 20, "decoder_vocab_size": 30, "share_embeddings": False, "decoder_start_token_id": 25},
    ],
)
def test_rules_of_other_designs_do_not_apply(fields):
    model = MetaphraseForConditionalGeneration(tiny_config(**fields))
    assert {name: getattr(model.config, name) for name in fields} == fields


# Presets

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
    "metaphrase-long": (16_209_664, (6, 3), (4, 4), "silu", 0.1),
    "student-tiny": (17_110_016, (6, 2), (4, 4), "silu", 0.1),
    "student-ssru": (16_848_384, (6, 2), (4, 4), "silu", 0.1),
    "student-marian": (16_907_008, (6, 2), (8, 8), "relu", 0.1),
    "student-base": (44_181_504, (6, 2), (8, 8), "silu", 0.1),
}


@pytest.mark.parametrize("name", MetaphraseConfig.presets())
def test_presets_are_the_published_architectures(name):
    config = MetaphraseConfig.from_preset(name)
    with torch.device("meta"):
        model = MetaphraseForConditionalGeneration(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    layers = len(model.get_encoder().layers), len(model.get_decoder().layers)
    heads = config.encoder_attention_heads, config.decoder_attention_heads
    assert (size, layers, heads, config.activation_function, config.dropout) == PRESETS[name]
    is_vaswani = name.startswith(("transformer", "bart", "marian", "student-marian"))
    design = ("post", "layernorm", False) if is_vaswani else ("pre", "rmsnorm", True)
    assert (config.norm_position, config.norm_type, config.final_norm) == design
    assert config.attention_scale == (1.0 if name.startswith("t5") else None)
    if name.startswith("metaphrase"):
        assert config.position_embedding_type == "rotary" and config.head_dim == 64


def test_configurations_of_a_preset_share_no_list():
    first, second = (MetaphraseConfig.from_preset("metaphrase-long") for _ in range(2))
    first.encoder_window[0] = 1
    assert second.encoder_window == [127, 127] and second.position_limit >= 16_000


def test_from_preset_takes_overrides():
    config = MetaphraseConfig.from_preset("transformer-tiny", d_model=64, num_hidden_layers=2, vocab_size=99)
    assert (config.hidden_size, config.encoder_layers, config.decoder_vocab_size, config.dropout) == (64, 2, 99, 0.3)
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


# The base class takes any value of the last.
@pytest.mark.parametrize("field", ["name", "hiden_size", "output_hidden_states"])
def test_from_preset_refuses_unknown_names(field):
    with pytest.raises(ValueError, match="`preset`" if field == "name" else f"`{field}`"):
        MetaphraseConfig.from_preset(**{"name": "t5-small", field: "t5-smal"})
