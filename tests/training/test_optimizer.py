"""Optimizer: frozen weights, and Adafactor's options."""

import logging

import pytest
import torch
from small_runs import make_trainer
from tiny_models import tiny_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from metaphrase.training.optimizer import adafactor_options, check_optimizer, freeze
from metaphrase.training.trainer import MetaphraseTrainer

# Source and target have vocabularies of their own, and nothing is tied.
UNTIED = {"decoder_vocab_size": 31, "share_embeddings": False, "tie_word_embeddings": False}


def frozen_names(model):
    return {name.removeprefix("model.") for name, weight in model.named_parameters() if not weight.requires_grad}


def names_below(model, *parts):
    names = {name.removeprefix("model.") for name, _ in model.named_parameters()}
    found = {name for name in names if name.startswith(tuple(f"{part}." for part in parts))}
    assert all(any(name.startswith(f"{part}.") for name in found) for part in parts)
    return found


def tiny_t5():
    config = T5Config(d_model=8, d_kv=2, d_ff=8, num_layers=2, num_heads=2, vocab_size=10, num_decoder_layers=3)
    return T5ForConditionalGeneration(config)


def tiny_bart():
    names = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in names}
    return BartForConditionalGeneration(BartConfig(d_model=8, vocab_size=10, max_position_embeddings=9, **sizes))


# Freezing


@pytest.mark.parametrize(
    ("patterns", "parts"),
    [
        (["encoder"], ["encoder"]),
        (["model.encoder"], ["encoder"]),
        (["encoder.layers.1"], ["encoder.layers.1"]),
        (["encoder.layers.0-1"], ["encoder.layers.0", "encoder.layers.1"]),
        (["decoder.layers.1-2.mlp"], ["decoder.layers.1.mlp", "decoder.layers.2.mlp"]),
        (["decoder.layers.*.cross_attn"], [f"decoder.layers.{index}.cross_attn" for index in range(12)]),
        (["*.10"], ["decoder.layers.10"]),
        (["embeddings"], ["encoder.embed_tokens", "decoder.embed_tokens"]),
        (["encoder", "!embeddings"], ["encoder.layers", "encoder.norm"]),
        (
            ["encoder", "!encoder.layers.0", "encoder.layers.0.mlp"],
            ["encoder.layers.1", "encoder.layers.0.mlp", "encoder.norm", "encoder.embed_tokens"],
        ),
        (["lm_head"], ["lm_head"]),
        (["encoder.norm.weight", "lm_head"], ["encoder.norm", "lm_head"]),
    ],
)
def test_patterns_mean_what_they_say(patterns, parts):
    model = tiny_model(encoder_layers=2, decoder_layers=12, norm_type="rmsnorm", **UNTIED)
    count = freeze(model, patterns)
    expected = names_below(model, *parts)
    assert frozen_names(model) == expected
    weights = dict(model.named_parameters())
    assert count == sum(weights[name if name in weights else f"model.{name}"].numel() for name in expected)


def test_other_families_have_the_same_parts():
    model = tiny_t5()
    freeze(model, ["embeddings", "encoder.block.1", "encoder", "!encoder.block.0", "!embeddings"])
    assert frozen_names(model) == names_below(model, "encoder.block.1", "encoder.final_layer_norm")
    model = tiny_bart()
    freeze(model, ["embeddings"])
    assert frozen_names(model) == {"shared.weight"} | names_below(
        model, "encoder.embed_positions", "decoder.embed_positions"
    )


def test_tied_weights_that_go_with_a_part_are_told_of(caplog):
    model = tiny_model()
    with caplog.at_level(logging.INFO):
        count = freeze(model, ["encoder"])
    assert count == sum(parameter.numel() for parameter in model.get_encoder().parameters())
    assert not model.lm_head.weight.requires_grad
    assert "same weight: decoder.embed_tokens.weight, lm_head.weight" in caplog.text
    assert f"Frozen: {count:,} of " in caplog.text
    caplog.clear()
    for patterns in (["embeddings", "lm_head"], ["encoder", "!embeddings"], ["encoder.layers"]):
        freeze(tiny_model(), patterns)
        assert "same weight" not in caplog.text
    # The weight is taken out under any of its names.
    model = tiny_model()
    freeze(model, ["encoder", "!lm_head"])
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("pattern", ["encoders", "encoder.layers.2", "encoder.layers.0-2", "!lm_heads", "", "layers.0"])
def test_pattern_that_means_nothing_is_refused(pattern):
    model = tiny_model()
    with pytest.raises(ValueError, match=f"`freeze` .*got '{pattern.removeprefix('!')}'"):
        freeze(model, ["encoder", pattern])
    with pytest.raises(ValueError, match="`freeze` must leave something to train"):
        freeze(model, ["encoder", "decoder"])
    assert frozen_names(model) == set()


def test_options_reach_every_group(tmp_path):
    options = {"optim": "adafactor", "optim_args": "scale_parameter=True, clip_threshold=0.5,decay_rate=-0.7"}
    trainer = make_trainer(tmp_path, MetaphraseTrainer, **options)
    groups = trainer.create_optimizer().param_groups
    expected = {"scale_parameter": True, "clip_threshold": 0.5, "decay_rate": -0.7, "relative_step": False}
    assert all({name: group[name] for name in expected} == expected for group in groups)


def test_options_of_another_optimizer_are_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, MetaphraseTrainer, optim="sgd", optim_args="momentum=0.9")
    assert trainer.create_optimizer().param_groups[0]["momentum"] == 0.9
    assert type(trainer.optimizer) is torch.optim.SGD
    assert adafactor_options(None) == adafactor_options(" ") == {}


@pytest.mark.parametrize("options", ["scale=true", "scale_parameter", "scale_parameter=1", "decay_rate=fast"])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match="`optim_args`"):
        adafactor_options(options)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"optim_args": "garbage"}, "optim_args"),
        ({"optim": "adafactor", "optim_args": "garbage"}, "optim_args"),
        ({"lr_scheduler_kwargs": {"junk": 1}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs"),
    ],
)
def test_options_of_optimizer_and_schedule_are_refused_before_any_data_is_read(fields, named, tmp_path):
    with pytest.raises(ValueError, match=f"`{named}`"):
        check_optimizer(Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields))


def test_usual_optimizers_and_schedules_are_accepted(tmp_path):
    for fields in (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"mode": "max"}, "eval_strategy": "steps"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
        {"lr_scheduler_type": "cosine", "optim": "sgd", "optim_args": "momentum=0.9"},
        {"lr_scheduler_type": "polynomial", "optim": "adafactor", "optim_args": "clip_threshold=0.5"},
    ):
        check_optimizer(Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields))
