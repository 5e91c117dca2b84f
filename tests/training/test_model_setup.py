import contextlib
import copy
import json
import logging

import pytest
import torch
from other_families import other_model
from small_experiments import make_recipe
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Seq2SeqTrainingArguments

from metaphrase.evaluation.evaluate import corpus_loss
from metaphrase.techniques.partial_training import freeze
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.experiment import Experiment
from metaphrase.training.model_setup import check_special_ids, fit_vocabulary, load_base, make_model
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.trainer import MetaphraseTrainer, check_optimizer


def pair_of(*specials):
    vocabulary = {word: index for index, word in enumerate(specials)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    bos = {"bos_token": "<s>"} if "<s>" in vocabulary else {}
    tokens = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"} | bos
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    return TokenizerPair(tokenizer, tokenizer)


@pytest.mark.parametrize("rank", [None, 2])
def test_weights_in_half_precision_stay_so_beside_adapters_alone(rank, tmp_path):
    other_model("t5").half().save_pretrained(tmp_path)
    recipe = Recipe(train_file="a", model_name_or_path=str(tmp_path), lora_rank=rank)
    for with_weights in (True, False):
        model = load_base(recipe, with_weights)
        assert next(model.get_decoder().parameters()).dtype == (torch.float16 if rank else torch.float32)


@pytest.mark.parametrize("specials", [["<x>", "<pad>", "</s>"], ["<pad>", "</s>"]], ids=" ".join)
def test_special_ids_of_a_tokenizer_must_be_those_of_the_base(specials):
    model = other_model("t5")
    check_special_ids(model, tiny_pair())
    # Its model knows of no beginning.
    model.config.bos_token_id = None
    names = {model.config.pad_token_id: "<pad>", model.config.eos_token_id: "</s>"}
    check_special_ids(model, pair_of(*(names.get(row, f"<{row}>") for row in range(4)), "<s>", "<unk>"))
    with pytest.raises(ValueError, match=r"`tokenizer_name_or_path` must have the model's `.*_token_id` ., got ."):
        check_special_ids(model, pair_of(*specials, "<unk>"))


def test_a_target_tokenizer_that_is_larger_lets_its_side_grow():
    pair, recipe = tiny_pair(joint=False), Recipe(train_file="a")
    sizes = (len(pair.source), len(pair.target))
    for fields in ({"share_embeddings": False}, {"share_embeddings": True}):
        model = tiny_generator(joint=fields["share_embeddings"]).model
        small = {"vocab_size": 12, "decoder_vocab_size": 12}
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **fields, **small}))
        fit_vocabulary(model, recipe, pair)
        source = model.get_input_embeddings().num_embeddings
        assert (source, model.lm_head.out_features) == ((max(sizes),) * 2 if fields["share_embeddings"] else sizes)
    for family in ("t5", "marian"):
        model = other_model(family)
        model.resize_token_embeddings(12)
        fit_vocabulary(model, recipe, pair)
        assert model.get_output_embeddings().weight.shape[0] == max(sizes)
        encode = (pair.encode_sources(SOURCES), pair.encode_targets(TARGETS))
        assert corpus_loss(model, *encode)["loss"] > 0


def test_larger_targets_are_refused_beside_an_adapter():
    model = tiny_generator(joint=False).model
    rows = model.lm_head.out_features
    pair = copy.deepcopy(tiny_pair(joint=False))
    pair.target.add_tokens([f"<{number}>" for number in range(9)])
    recipe = Recipe(train_file="a", model_name_or_path="x", lora_rank=2)
    with pytest.raises(ValueError, match=f"`lora_rank` must come with .*, got {rows + 9} .* and {rows} rows"):
        fit_vocabulary(model, recipe, pair)


FEW = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
BEAMS = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}


@pytest.fixture
def settled(data, tmp_path):
    """The generation settings of the model of a run, from the settings of its base and the fields of the recipe."""
    folder = save_generator(tiny_generator(), tmp_path / "base")

    def settle(inherited, **own):
        config = GenerationConfig.from_pretrained(folder)
        (folder / "generation_config.json").unlink()
        for name, value in inherited.items():
            setattr(config, name, value)
        config.to_json_file(folder / "generation_config.json")
        experiment = Experiment(make_recipe(data, tmp_path / "run", **FEW, model_name_or_path=folder, **own))
        config = make_model(experiment.recipe, experiment.prepare(), with_weights=False).generation_config
        # transformers saves it.
        config.validate(strict=True)
        return config

    return settle


def test_a_reward_keeps_the_length_limit_of_its_base(settled):
    fields = {"generation_max_length": None, "label_smoothing_factor": 0.0}
    limits = [settled({"max_length": 999}, **own, **fields).max_length for own in ({"reward": "bleu"}, {})]
    assert limits[0] == 999 > limits[1]


def test_suppressed_tokens_join_those_of_the_base(settled):
    assert settled({"suppress_tokens": [7, 9]}, suppress_tokens=["<s>"]).suppress_tokens == [1, 7, 9]
    with pytest.raises(ValueError, match="`suppress_tokens` must be tokens of the target tokenizer, got '<x>'"):
        settled({}, suppress_tokens=["<s>", "<x>"])


@pytest.mark.parametrize(
    ("inherited", "own", "left_out"),
    [
        ({**BEAMS, "no_repeat_ngram_size": 3}, {"num_beams": 1}, ("length_penalty 2.0", "early_stopping True")),
        ({"temperature": 0.3, "top_k": 7}, {}, ("temperature 0.3", "top_k 7")),
        ({**BEAMS, "do_sample": False}, {"length_penalty": 1.5}, ()),
        ({"do_sample": True, "temperature": 0.3}, {}, ()),
        # transformers refuses an integer at the first decoding.
        ({}, {"repetition_penalty": 2}, ()),
    ],
    ids=str,
)
def test_settings_of_a_base_that_do_not_apply_are_left_out(inherited, own, left_out, settled, caplog):
    config = settled(inherited, **own)
    assert all(setting in caplog.text for setting in left_out) and bool(left_out) == ("have no effect" in caplog.text)
    names = {setting.split()[0] for setting in left_out}
    expected = {name: None if name in names else value for name, value in (inherited | own).items()}
    assert {name: getattr(config, name) for name in expected} == expected
    assert isinstance(config.repetition_penalty, float | None)


def test_a_length_penalty_has_no_effect_without_beams(settled, caplog):
    assert settled({}, length_penalty=2.0).length_penalty is None
    assert "no effect beside the others and are removed: length_penalty 2.0" in caplog.text


@pytest.mark.parametrize("given", [True, False])
def test_the_recipes_length_goes_over_that_of_the_base(given, settled):
    config = settled({"max_new_tokens": 5}, generation_max_length=3 if given else None)
    assert (config.max_length, config.max_new_tokens) == ((3, None) if given else (257, 5))


def test_longer_sources_may_have_longer_targets(settled):
    config = settled({}, usual_source_length=30, generation_max_length=None)
    # Settings stay when they are saved and loaded.
    loaded = GenerationConfig.from_dict(json.loads(config.to_json_string()))
    assert (loaded.usual_source_length, loaded.max_length_limit, loaded.max_length) == (30, 256, 257)
    assert not hasattr(settled({"usual_source_length": 3}), "usual_source_length")


# Source and target have vocabularies of their own, and nothing is tied.
UNTIED = {"decoder_vocab_size": 31, "share_embeddings": False, "tie_word_embeddings": False}


def frozen_names(model):
    return {name.removeprefix("model.") for name, weight in model.named_parameters() if not weight.requires_grad}


def names_below(model, *parts):
    names = {name.removeprefix("model.") for name, _ in model.named_parameters()}
    found = {name for name in names if name.startswith(tuple(f"{part}." for part in parts))}
    assert all(any(name.startswith(f"{part}.") for name in found) for part in parts)
    return found


@pytest.mark.parametrize(
    ("patterns", "parts"),
    [
        (["encoder"], ["encoder"]),
        (["model.encoder"], ["encoder"]),
        (["encoder.layers.0-1"], ["encoder.layers.0", "encoder.layers.1"]),
        (["decoder.layers.1-2.mlp"], ["decoder.layers.1.mlp", "decoder.layers.2.mlp"]),
        (["decoder.layers.*.cross_attn"], [f"decoder.layers.{index}.cross_attn" for index in range(12)]),
        (["embeddings"], ["encoder.embed_tokens", "decoder.embed_tokens"]),
        (["encoder", "!embeddings"], ["encoder.layers", "encoder.norm"]),
        (["encoder.layers", "!encoder.layers.0", "encoder.layers.0.mlp"], ["encoder.layers.1", "encoder.layers.0.mlp"]),
        (["encoder.norm.weight", "lm_head"], ["encoder.norm", "lm_head"]),
    ],
)
def test_patterns_mean_what_they_say(patterns, parts):
    model = tiny_model(encoder_layers=2, decoder_layers=12, norm_type="rmsnorm", **UNTIED)
    freeze(model, patterns)
    assert frozen_names(model) == names_below(model, *parts)


def test_other_families_have_the_same_parts():
    model = other_model("t5")
    freeze(model, ["embeddings", "encoder", "!encoder.block.0", "!embeddings"])
    assert frozen_names(model) == names_below(model, "encoder.block.1", "encoder.final_layer_norm")
    model = other_model("bart")
    freeze(model, ["embeddings"])
    positions = names_below(model, "encoder.embed_positions", "decoder.embed_positions")
    assert frozen_names(model) == {"shared.weight"} | positions


def test_tied_weights_that_go_with_a_part_are_told_of(caplog):
    model = tiny_model()
    with caplog.at_level(logging.INFO):
        freeze(model, ["encoder"])
    count = sum(parameter.numel() for parameter in model.get_encoder().parameters())
    assert not model.lm_head.weight.requires_grad and f"Frozen: {count:,} of " in caplog.text
    assert "same weight: decoder.embed_tokens.weight, lm_head.weight" in caplog.text
    caplog.clear()
    freeze(tiny_model(), ["embeddings", "lm_head"])
    assert "same weight" not in caplog.text
    model = tiny_model()
    freeze(model, ["encoder", "!lm_head"])
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("pattern", ["encoders", "encoder.layers.2", "encoder.layers.0-2", "!lm_heads", "", "decoder"])
def test_pattern_that_means_nothing_is_refused(pattern):
    model = tiny_model()
    said = "leave something to train" if pattern == "decoder" else f".*got '{pattern.removeprefix('!')}'"
    with pytest.raises(ValueError, match=f"`freeze` must {said}"):
        freeze(model, ["encoder", pattern])
    assert frozen_names(model) == set()


def arguments_of(folder, **fields):
    return Seq2SeqTrainingArguments(output_dir=str(folder), use_cpu=True, **fields)


def test_adafactor_gets_its_options(tmp_path):
    options = {"optim": "adafactor", "optim_args": "scale_parameter=True, clip_threshold=0.5,decay_rate=-7e-1"}
    expected = {"scale_parameter": True, "clip_threshold": 0.5, "decay_rate": -0.7, "relative_step": False}
    arguments = arguments_of(tmp_path, **options)
    assert MetaphraseTrainer.get_optimizer_cls_and_kwargs(arguments)[1].items() >= expected.items()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"optim_args": "garbage"}, "optim_args"),
        ({"optim": "adafactor", "optim_args": "scale=true"}, "optim_args"),
        ({"lr_scheduler_kwargs": {"junk": 1}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}, None),
        ({"lr_scheduler_type": "polynomial", "optim": "adafactor", "optim_args": "clip_threshold=0.5"}, None),
    ],
)
def test_wrong_options_of_optimizer_and_schedule_are_refused(fields, named, tmp_path):
    with contextlib.nullcontext() if named is None else pytest.raises(ValueError, match=f"`{named}`"):
        check_optimizer(arguments_of(tmp_path, **fields))


def test_a_new_network_grows_to_hold_its_tokenizers(data, tmp_path):
    # In the recipe, null means the size of the source vocabulary.
    fields = FEW | {"joint_vocabulary": "false", "target_vocab_size": 700, "model.decoder_vocab_size": "null"}
    experiment = Experiment(make_recipe(data, tmp_path / "run", **fields))
    assert experiment.make_model().config.decoder_vocab_size == len(experiment.prepare().tokenizers.target)
