import contextlib
import logging

import pytest
from other_families import other_model
from tiny_models import tiny_model
from transformers import Seq2SeqTrainingArguments

from metaphrase.techniques.partial_training import freeze
from metaphrase.training.trainer import MetaphraseTrainer, check_optimizer

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
        (["encoder.layers.1"], ["encoder.layers.1"]),
        (["encoder.layers.0-1"], ["encoder.layers.0", "encoder.layers.1"]),
        (["decoder.layers.1-2.mlp"], ["decoder.layers.1.mlp", "decoder.layers.2.mlp"]),
        (["decoder.layers.*.cross_attn"], [f"decoder.layers.{index}.cross_attn" for index in range(12)]),
        (["*.10"], ["decoder.layers.10"]),
        (["embeddings"], ["encoder.embed_tokens", "decoder.embed_tokens"]),
        (["encoder", "!embeddings"], ["encoder.layers", "encoder.norm"]),
        (["encoder.layers", "!encoder.layers.0", "encoder.layers.0.mlp"], ["encoder.layers.1", "encoder.layers.0.mlp"]),
        (["lm_head"], ["lm_head"]),
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
        ({"optim": "adafactor", "optim_args": "garbage"}, "optim_args"),
        ({"optim": "adafactor", "optim_args": "scale=true"}, "optim_args"),
        ({"optim": "adafactor", "optim_args": "decay_rate=fast"}, "optim_args"),
        ({"lr_scheduler_kwargs": {"junk": 1}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}, None),
        ({"lr_scheduler_type": "cosine", "optim": "sgd", "optim_args": "momentum=0.9"}, None),
        ({"lr_scheduler_type": "polynomial", "optim": "adafactor", "optim_args": "clip_threshold=0.5"}, None),
    ],
)
def test_wrong_options_of_optimizer_and_schedule_are_refused(fields, named, tmp_path):
    with contextlib.nullcontext() if named is None else pytest.raises(ValueError, match=f"`{named}`"):
        check_optimizer(arguments_of(tmp_path, **fields))
