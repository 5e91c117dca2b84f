"""Tests of `metaphrase.modeling.configuration_metaphrase`: defaults, rules, and that every option has a test."""

import ast
import copy
import functools
import inspect
import json
from pathlib import Path

import pytest
from tiny_models import tiny_config, tiny_model
from transformers import AutoConfig

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

# For each option a test that fails when the network ignores it. A new option must be entered, and so be tested.
TESTS_OF_OPTIONS = {
    "vocab_size": "test_stacks.py::test_vocabularies_of_the_stacks_may_differ",
    "decoder_vocab_size": "test_stacks.py::test_vocabularies_of_the_stacks_may_differ",
    "hidden_size": "test_stacks.py::test_hidden_size_is_the_width_of_everything_between_sublayers",
    "encoder_layers": "test_common.py::test_attentions_and_hidden_states",
    "decoder_layers": "test_common.py::test_attentions_and_hidden_states",
    "encoder_attention_heads": "test_stacks.py::test_heads_of_the_stacks_may_differ",
    "decoder_attention_heads": "test_stacks.py::test_heads_of_the_stacks_may_differ",
    "encoder_ffn_dim": "test_stacks.py::test_feed_forward_widths_of_the_stacks_may_differ",
    "decoder_ffn_dim": "test_stacks.py::test_feed_forward_widths_of_the_stacks_may_differ",
    "num_key_value_heads": "test_attention.py::test_attention_equals_loops",
    "head_dim": "test_attention.py::test_head_dim_is_free_of_hidden_size",
    "activation_function": "test_layers.py::test_activation_function_is_the_named_one",
    "gated_mlp": "test_layers.py::test_gated_mlp_multiplies_a_second_projection",
    "position_embedding_type": "test_stack_positions.py::test_only_positions_tell_the_encoder_an_order",
    "sinusoidal_layout": "test_positions.py::test_sinusoidal_layout_equals_values_by_hand",
    "max_position_embeddings": "test_stack_positions.py::test_learned_positions_refuse_what_is_longer",
    "position_offset": "test_positions.py::test_position_offset_is_the_number_of_the_first_position",
    "rope_parameters": "test_stack_positions.py::test_rotary_parameters_reach_both_stacks",
    "relative_attention_num_buckets": "test_stack_positions.py::test_relative_bucket_options_reach_both_stacks",
    "relative_attention_max_distance": "test_stack_positions.py::test_relative_bucket_options_reach_both_stacks",
    "relative_attention_shared": "test_stack_positions.py::test_relative_bias_is_shared_by_the_layers_or_is_not",
    "norm_type": "test_normalization.py::test_norm_type_names_the_norm",
    "norm_position": "test_layers.py::test_post_norm_norms_the_residual_sum",
    "norm_eps": "test_stacks.py::test_norm_eps_reaches_every_norm",
    "embedding_norm": "test_stacks.py::test_embedding_norm_norms_the_sum_of_embeddings_and_positions",
    "final_norm": "test_stacks.py::test_final_norm_norms_the_output_of_each_stack",
    "qk_norm": "test_attention.py::test_qk_norm_norms_queries_and_keys_in_each_head",
    "scale_embedding": "test_stacks.py::test_scale_embedding_multiplies_the_tokens_alone",
    "attention_scale": "test_attention.py::test_attention_scale_multiplies_the_scores",
    "attention_bias": "test_attention.py::test_attention_bias_is_in_all_four_projections",
    "mlp_bias": "test_layers.py::test_plain_mlp_is_two_projections",
    "logits_bias": "test_modeling.py::test_logits_bias_is_added_to_the_logits",
    "logits_scale": "test_modeling.py::test_logits_scale_multiplies_what_the_projection_reads",
    "tie_word_embeddings": "test_modeling.py::test_ties_are_those_of_the_configuration",
    "share_embeddings": "test_modeling.py::test_ties_are_those_of_the_configuration",
    "train_padding_embedding": "test_stacks.py::test_padding_embedding_learns_where_it_is_read_or_does_not",
    "decoder_start_from_labels": "test_loss.py::test_decoder_starts_from_the_labels_where_it_should",
    "dropout": "test_layers.py::test_dropout_falls_on_the_output_of_each_sublayer_and_spares_the_residual",
    "attention_dropout": "test_attention.py::test_attention_dropout_drops_weights_in_training_alone",
    "activation_dropout": "test_layers.py::test_activation_dropout_falls_on_the_inner_states",
    "initializer_range": "test_stacks.py::test_initializer_range_is_the_deviation_of_every_weight",
    "use_cache": "test_modeling.py::test_use_cache_decides_whether_a_cache_comes_back",
    "is_encoder_decoder": "test_modeling.py::test_generation_starts_with_the_start_token_and_ends_with_the_end_token",
    "pad_token_id": "test_modeling.py::test_labels_are_shifted_with_the_ids_of_the_configuration",
    "bos_token_id": "test_modeling.py::test_generation_takes_the_special_ids_of_the_configuration",
    "eos_token_id": "test_modeling.py::test_generation_starts_with_the_start_token_and_ends_with_the_end_token",
    "decoder_start_token_id": "test_modeling.py::test_labels_are_shifted_with_the_ids_of_the_configuration",
}


def own_fields():
    """Names that the class itself declares, not what it inherits."""
    return set(inspect.get_annotations(MetaphraseConfig))


@functools.cache
def functions_of(file):
    """The source of each test of a file, by name."""
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_option_has_a_test():
    assert own_fields() <= set(MetaphraseConfig.__dataclass_fields__)
    assert own_fields() == set(TESTS_OF_OPTIONS)


@pytest.mark.parametrize("option", TESTS_OF_OPTIONS)
def test_the_test_of_an_option_exists(option):
    """The test is in its file and names the option, in its cases or in what it says of itself."""
    file, name = TESTS_OF_OPTIONS[option].split("::")
    functions = functions_of(file)
    assert name in functions
    assert option in functions[name], f"{name} never mentions {option}"


def test_defaults_are_the_recommended_design():
    config = MetaphraseConfig()
    assert config.model_type == "metaphrase"
    design = (config.position_embedding_type, config.norm_type, config.norm_position, config.activation_function)
    assert design == ("rotary", "rmsnorm", "pre", "silu")
    assert config.gated_mlp and config.final_norm and config.tie_word_embeddings and config.share_embeddings
    assert not (config.attention_bias or config.mlp_bias or config.logits_bias or config.qk_norm)
    assert config.decoder_vocab_size == config.vocab_size == 32_000
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.decoder_start_token_id == 1
    assert config.is_encoder_decoder is True
    assert config.use_cache is True


def test_defaults_are_stated_in_the_docstring():
    """Every field but the ones that transformers documents has its line."""
    inherited = {"use_cache", "is_encoder_decoder", "pad_token_id", "bos_token_id", "eos_token_id"}
    arguments = inspect.getdoc(MetaphraseConfig).split("Args:")[1].split("Raises:")[0]
    documented = [
        line.split(":")[0].strip() for line in arguments.splitlines() if line.startswith("    ") and ":" in line
    ]
    for field in own_fields() - inherited - {"decoder_start_token_id"}:
        assert field in documented, field


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("decoder_vocab_size", None, 37),
        ("num_key_value_heads", None, 4),
        ("head_dim", None, 8),
        ("rope_parameters", None, {"rope_type": "default", "rope_theta": 10_000.0}),
    ],
)
def test_none_is_filled_in(field, value, expected):
    assert getattr(tiny_config(**{field: value}), field) == expected


@pytest.mark.parametrize(
    ("norm_position", "value", "expected"),
    [("pre", None, True), ("post", None, False), ("pre", False, False), ("post", True, True)],
)
def test_final_norm_follows_norm_position_unless_given(norm_position, value, expected):
    assert tiny_config(norm_position=norm_position, final_norm=value).final_norm is expected


def test_get_head_dim():
    assert tiny_config().get_head_dim(4) == 8
    assert tiny_config(head_dim=6).get_head_dim(4) == 6


def head_sizes(config):
    return config.num_key_value_heads, config.head_dim


@pytest.mark.parametrize(("value", "expected"), [({"num_key_value_heads": 2}, (2, 8)), ({"head_dim": 6}, (4, 6))])
def test_given_head_sizes_stay(value, expected):
    assert head_sizes(tiny_config(**value)) == expected


def test_head_sizes_of_two_different_stacks_stay_none(tmp_path):
    config = tiny_config(decoder_attention_heads=2)
    config.save_pretrained(tmp_path)
    assert head_sizes(config) == head_sizes(MetaphraseConfig.from_pretrained(tmp_path)) == (None, None)
    assert head_sizes(config.get_text_config(decoder=True)) == (2, 16)
    assert head_sizes(config.get_text_config(encoder=True)) == (4, 8)


def test_configuration_with_null_head_sizes_loads(tmp_path):
    """Files of earlier versions have null there."""
    tiny_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    assert (fields["num_key_value_heads"], fields["head_dim"]) == (4, 8)
    file.write_text(json.dumps(fields | {"num_key_value_heads": None, "head_dim": None}), encoding="utf-8")
    assert head_sizes(MetaphraseConfig.from_pretrained(tmp_path)) == (4, 8)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    changed = MetaphraseConfig.from_pretrained(tmp_path, **heads, num_key_value_heads=None, head_dim=None)
    assert head_sizes(changed) == (2, 16)


def different_values():
    """For every option a value that is not the default and makes a valid configuration."""
    return {
        "vocab_size": 41,
        "decoder_vocab_size": 43,
        "hidden_size": 48,
        "encoder_layers": 3,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 20,
        "decoder_ffn_dim": 22,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "activation_function": "relu",
        "gated_mlp": False,
        "position_embedding_type": "relative",
        "sinusoidal_layout": "half_split",
        "max_position_embeddings": 17,
        "position_offset": 3,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0},
        "relative_attention_num_buckets": 6,
        "relative_attention_max_distance": 33,
        "relative_attention_shared": False,
        "norm_type": "layernorm",
        "norm_position": "post",
        "norm_eps": 1e-3,
        "embedding_norm": True,
        "final_norm": True,
        "qk_norm": True,
        "scale_embedding": False,
        "attention_scale": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
        "logits_bias": True,
        "logits_scale": 0.25,
        "tie_word_embeddings": False,
        "share_embeddings": False,
        "train_padding_embedding": False,
        "decoder_start_from_labels": True,
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "activation_dropout": 0.4,
        "initializer_range": 0.05,
        "use_cache": False,
        "is_encoder_decoder": True,
        "pad_token_id": 5,
        "bos_token_id": 6,
        "eos_token_id": [7, 8],
        "decoder_start_token_id": 9,
    }


def test_every_option_survives_saving(tmp_path):
    values = different_values()
    assert set(values) == own_fields()
    defaults = MetaphraseConfig()
    same = {field for field, value in values.items() if getattr(defaults, field) == value}
    assert same <= {"is_encoder_decoder", "final_norm"}
    MetaphraseConfig(**values).save_pretrained(tmp_path)
    for loaded in (MetaphraseConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert isinstance(loaded, MetaphraseConfig)
        assert {field: getattr(loaded, field) for field in values} == values
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert {field: written[field] for field in values} == values
    assert written["auto_map"] == {
        "AutoConfig": "configuration_metaphrase.MetaphraseConfig",
        "AutoModel": "modeling_metaphrase.MetaphraseModel",
        "AutoModelForSeq2SeqLM": "modeling_metaphrase.MetaphraseForConditionalGeneration",
        "AutoModelForTextEncoding": "modeling_metaphrase.MetaphraseEncoderModel",
    }


def test_copies_are_equal_and_independent():
    config = MetaphraseConfig(**different_values())
    twin = copy.deepcopy(config)
    assert twin == config
    twin.dropout = 0.9
    assert config.dropout == 0.2


def test_a_given_configuration_is_not_shared_between_models():
    """The rotary embedding works on a configuration of its own: the model's keeps its `head_dim`."""
    model = tiny_model(decoder_attention_heads=2)
    assert model.config.head_dim is None
    assert model.config == tiny_config(decoder_attention_heads=2)


POSITIVE = [
    *("vocab_size", "decoder_vocab_size", "hidden_size", "encoder_layers", "decoder_layers"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "relative_attention_max_distance"),
    *("attention_scale", "initializer_range"),
]
CHOICES = {
    "position_embedding_type": "sinusoidal, learned, relative, rotary, alibi, none",
    "sinusoidal_layout": "interleaved, half_split, fairseq",
    "norm_type": "layernorm, rmsnorm",
    "norm_position": "pre, post",
}
RULES = [
    *(({field: value}, f"`{field}` must be above 0, got {value}.") for field in POSITIVE for value in (0, -1)),
    *(({"norm_eps": value}, f"`norm_eps` must be above 0, got {value}.") for value in (0.0, -1e-6)),
    *(
        ({field: value}, f"`{field}` must be a probability in [0, 1), got {value}.")
        for field in ("dropout", "attention_dropout", "activation_dropout")
        for value in (-0.1, 1, 1.0, 2, float("nan"))
    ),
    *(({field: "other"}, f"`{field}` must be one of {names}, got 'other'.") for field, names in CHOICES.items()),
    ({"activation_function": "swoosh"}, "`activation_function` must be a key of ACT2FN, got 'swoosh'."),
    (
        {"hidden_size": 34, "position_embedding_type": "none"},
        "`hidden_size` must be a multiple of `encoder_attention_heads`, got 34 and 4. "
        "Set `head_dim` to have heads of another width.",
    ),
    (
        {"decoder_attention_heads": 5},
        "`hidden_size` must be a multiple of `decoder_attention_heads`, got 32 and 5. "
        "Set `head_dim` to have heads of another width.",
    ),
    (
        {"num_key_value_heads": 3},
        "`encoder_attention_heads` must be a multiple of `num_key_value_heads`, got 4 and 3.",
    ),
    (
        {"num_key_value_heads": 4, "decoder_attention_heads": 2},
        "`decoder_attention_heads` must be a multiple of `num_key_value_heads`, got 2 and 4.",
    ),
    (
        {"head_dim": 7},
        "`head_dim` must be even for rotary positions, got 7 (from `encoder_attention_heads`).",
    ),
    (
        {"decoder_attention_heads": 32},
        "`head_dim` must be even for rotary positions, got 1 (from `decoder_attention_heads`).",
    ),
    (
        {"position_embedding_type": "sinusoidal", "hidden_size": 3, "head_dim": 8},
        "`hidden_size` must be at least 4 for sinusoidal positions, got 3.",
    ),
    ({"position_offset": -1}, "`position_offset` must not be negative, got -1."),
    (
        {"train_padding_embedding": False, "pad_token_id": None},
        "`pad_token_id` must be set when `train_padding_embedding` is false, got None.",
    ),
    *(
        (
            {"position_embedding_type": "relative", "relative_attention_num_buckets": buckets},
            f"`relative_attention_num_buckets` must be even and at least 4, got {buckets}.",
        )
        for buckets in (-4, 0, 2, 7)
    ),
    *(
        (
            {
                "position_embedding_type": "relative",
                "relative_attention_num_buckets": 16,
                "relative_attention_max_distance": distance,
            },
            "`relative_attention_max_distance` must be above half of `relative_attention_num_buckets`, "
            f"got {distance} and 16.",
        )
        for distance in (7, 8)
    ),
    (
        {"decoder_vocab_size": 30},
        "`decoder_vocab_size` must equal `vocab_size` when `share_embeddings` is true, got 30 and 37.",
    ),
    *(
        ({field: value}, f"`{field}` must be an id of the vocabulary, from 0 to 36, got {value}.")
        for field in ("pad_token_id", "decoder_start_token_id")
        for value in (-1, 37)
    ),
    (
        {"decoder_start_token_id": 30, "share_embeddings": False, "decoder_vocab_size": 20},
        "`decoder_start_token_id` must be an id of the vocabulary, from 0 to 19, got 30.",
    ),
    # The shift to the right writes the padding token into the target.
    (
        {"pad_token_id": 30, "share_embeddings": False, "decoder_vocab_size": 20},
        "`pad_token_id` must be an id of the vocabulary, from 0 to 19, got 30.",
    ),
]


@pytest.mark.parametrize(("fields", "message"), RULES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_broken_rule_is_named_with_field_rule_and_value(fields, message):
    with pytest.raises(ValueError) as error:
        tiny_config(**fields)
    assert type(error.value) is ValueError
    assert str(error.value) == message


@pytest.mark.parametrize(
    "parameters", [{"rope_type": "linear"}, {"rope_type": "no_such_type", "factor": 2.0, "rope_theta": 1e4}]
)
def test_rope_parameters_are_checked_at_the_entrance(parameters):
    with pytest.raises(ValueError, match="rope_parameters"):
        tiny_config(rope_parameters=parameters)


@pytest.mark.parametrize(
    "fields",
    [
        {"relative_attention_num_buckets": 7},
        {"relative_attention_max_distance": 1},
        {"head_dim": 7, "position_embedding_type": "alibi"},
        {"hidden_size": 33, "head_dim": 8, "position_embedding_type": "learned"},
        {"pad_token_id": None, "bos_token_id": None, "decoder_start_token_id": None, "eos_token_id": None},
        {"dropout": 0},
        {"vocab_size": 20, "decoder_vocab_size": 30, "share_embeddings": False, "decoder_start_token_id": 25},
    ],
)
def test_rules_of_other_designs_do_not_apply(fields):
    model = MetaphraseForConditionalGeneration(tiny_config(**fields))
    assert {name: getattr(model.config, name) for name in fields} == fields


@pytest.mark.parametrize("fields", [{"hidden_size": "32"}, {"dropout": "0.1"}, {"gated_mlp": 1}, {"norm_type": None}])
def test_types_are_strict(fields):
    (field,) = fields
    with pytest.raises(Exception, match=f"'{field}'"):
        tiny_config(**fields)
