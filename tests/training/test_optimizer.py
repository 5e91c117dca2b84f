"""Optimizer: frozen weights, learning rates by part, weight decay as in transformers, and Adafactor's options."""

import logging

import pytest
import torch
from small_runs import make_trainer
from small_trainers import make_sgd_trainer
from tiny_models import DESIGNS, tiny_model
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from metaphrase.training.optimizer import adafactor_options, check_optimizer, freeze, parameter_groups
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
    assert model.lm_head.weight is model.get_encoder().embed_tokens.weight
    assert not model.lm_head.weight.requires_grad
    assert (
        "encoder.embed_tokens.weight is frozen, and with it, being the same weight: decoder.embed_tokens.weight, "
        "lm_head.weight." in caplog.text
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"Frozen: {count:,} of {total:,} parameters (encoder)." in caplog.text
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
    missing = {"encoder.layers.0-2": "encoder.layers.2"}.get(pattern, pattern.removeprefix("!"))
    message = (
        f"`freeze` must name parts of the model, got .*, and there is no '{missing}'. At the top there are decoder, enc"
    )
    with pytest.raises(ValueError, match=message):
        freeze(model, ["encoder", pattern])
    with pytest.raises(ValueError, match="`freeze` must leave something to train, got encoder, decoder"):
        freeze(model, ["encoder", "decoder"])
    assert frozen_names(model) == set()


# Groups


def described(model, groups):
    """Rate and decay by parameter name."""
    name_of = {parameter: name.removeprefix("model.") for name, parameter in model.named_parameters()}
    found = [
        (name_of[parameter], (group["lr"], group["weight_decay"])) for group in groups for parameter in group["params"]
    ]
    assert len(found) == len(dict(found))
    return dict(found)


def test_rates_by_pattern_of_which_the_last_holds():
    model = tiny_model(**UNTIED)
    rates = {"encoder": 0.1, "encoder.layers.1": 0.5, "*.cross_attn": 2.0}
    found = described(model, parameter_groups(model, 0.01, 0.0, rates))
    assert found.keys() == {name.removeprefix("model.") for name, _ in model.named_parameters()}
    for name, (rate, _) in found.items():
        factor = 0.5 if name.startswith("encoder.layers.1.") else 0.1 if name.startswith("encoder.") else 1.0
        assert rate == pytest.approx(0.01 * (2.0 if ".cross_attn." in name else factor)), name


def test_tied_weight_learns_as_any_of_its_names_says_and_is_told_of(caplog):
    model = tiny_model()
    with caplog.at_level(logging.WARNING):
        found = described(model, parameter_groups(model, 1.0, 0.0, {"encoder": 0.1}))
    assert found["encoder.embed_tokens.weight"][0] == pytest.approx(0.1)
    assert "encoder.embed_tokens.weight learns at 0.1 times the rate, and with it, being the same weight" in caplog.text
    found = described(model, parameter_groups(model, 1.0, 0.0, {"encoder": 0.1, "lm_head": 3.0}))
    assert found["encoder.embed_tokens.weight"][0] == 3.0
    caplog.clear()
    parameter_groups(model, 1.0, 0.0, {"encoder": 0.1, "lm_head": 1.0})
    freeze(model, ["embeddings", "lm_head"])
    parameter_groups(model, 1.0, 0.0, {"encoder": 0.1})
    assert "same weight" not in caplog.text


@pytest.mark.parametrize("design", DESIGNS)
def test_the_same_weights_decay_as_in_transformers(design, tmp_path):
    model = tiny_model(**DESIGNS[design])
    trainer = Trainer(model, Seq2SeqTrainingArguments(str(tmp_path), weight_decay=0.3, use_cpu=True))
    expected = described(model, trainer.create_optimizer().param_groups)
    found = described(model, parameter_groups(model, 1.0, 0.3, {"encoder": 0.5, "lm_head": 0.2}))
    assert {name: decay for name, (_, decay) in found.items()} == {name: decay for name, (_, decay) in expected.items()}
    norms = [name for name, (_, decay) in found.items() if decay == 0]
    assert {name for name in found if "norm" in name or "bias" in name} == set(norms)


def test_layers_learn_the_more_slowly_the_lower_they_are():
    model = tiny_model(encoder_layers=3, decoder_layers=1, position_embedding_type="relative", **UNTIED)
    found = described(model, parameter_groups(model, 1.0, 0.0, {"decoder": 10.0}, layer_decay=0.5))
    rates = {"encoder.layers.0": 0.25, "encoder.layers.1": 0.5, "encoder.layers.2": 1.0, "encoder.norm": 1.0}
    rates |= {"decoder.layers.0": 10.0, "decoder.norm": 10.0, "lm_head": 1.0}
    for part in ("embed_tokens", "position_bias"):
        rates |= {f"encoder.{part}": 0.125, f"decoder.{part}": 5.0}
    for part, rate in rates.items():
        assert {found[name][0] for name in names_below(model, part)} == {rate}, part
    # A weight in several places learns at the lowest rate: that of the embedding of the deeper stack.
    model = tiny_model(encoder_layers=3, decoder_layers=1)
    found = described(model, parameter_groups(model, 1.0, layer_decay=0.5))
    assert found["encoder.embed_tokens.weight"][0] == 0.125


def test_layers_of_other_families():
    for model, layers, rates in (
        (tiny_t5(), "block", {"shared": 0.125, "encoder.final_layer_norm": 1.0, "decoder.block.0": 0.25}),
        (tiny_bart(), "layers", {"shared": 0.25, "encoder.layernorm_embedding": 0.25, "decoder.embed_positions": 0.25}),
    ):
        found = described(model, parameter_groups(model, 1.0, layer_decay=0.5))
        for part, rate in {**rates, f"encoder.{layers}.0": 0.5, f"encoder.{layers}.1": 1.0}.items():
            assert {found[name][0] for name in names_below(model, part)} == {rate}, part


def test_what_is_frozen_is_in_no_group():
    model = tiny_model(**UNTIED)
    freeze(model, ["encoder"])
    groups = parameter_groups(model, 1.0, 0.1, {"encoder.layers.0": 0.5, "lm_head": 0.5})
    assert described(model, groups).keys() == names_below(model, "decoder", "lm_head")
    # Of the full rate first: the trainer logs the rate of the first group.
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1.0, 0.1), (1.0, 0.0), (0.5, 0.1)]


def test_what_is_out_of_range_is_refused():
    for model, options, message in (
        (tiny_model(), {"rates": {"encoder": 0}}, "must be above 0, got 0 for 'encoder': freeze it instead"),
        (tiny_model(), {"rates": {"coder": 1}}, "`learning_rate_factors` must name parts of the model, got 'coder'"),
        (tiny_model(), {"layer_decay": 0}, "`layer_decay` must be above 0 and at most 1, got 0"),
        (tiny_model(), {"layer_decay": 1.1}, "`layer_decay` must be above 0 and at most 1, got 1.1"),
        (nn.Linear(2, 2), {"layer_decay": 0.5}, r"`layer_decay` must come with a model with `encoder\.layers`"),
        (tiny_model().requires_grad_(False), {}, "`model` must have something to train"),
    ):
        with pytest.raises(ValueError, match=message):
            parameter_groups(model, 1.0, **options)


# The trainer


def moves_of(folder, factors=None, frozen=(), **options):
    model = tiny_model(initializer_range=0.2, **UNTIED)
    start = {name.removeprefix("model."): weight.detach().clone() for name, weight in model.named_parameters()}
    if frozen:
        freeze(model, frozen)
    make_sgd_trainer(model, folder, learning_rate_factors=factors, **options).train()
    return {
        name.removeprefix("model."): weight - start[name.removeprefix("model.")]
        for name, weight in model.named_parameters()
    }


def test_steps_are_as_long_as_the_rates_say(tmp_path):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plain = moves_of(tmp_path, per_device_train_batch_size=8)
    moves = moves_of(tmp_path, {"encoder": 0.5, "lm_head": 3.0}, ["decoder.layers.0"], layer_decay=0.5, **options)
    for name, move in moves.items():
        factor = 3.0 if name.startswith("lm_head") else 0.5 if name.startswith("encoder") else 1.0
        factor *= 0.5 if ".layers.0." in name else 0.25 if "embed" in name else 1.0
        factor = 0.0 if name.startswith("decoder.layers.0.") else factor
        torch.testing.assert_close(move, factor * plain[name], atol=1e-6, rtol=1e-4, msg=name)
    assert plain["encoder.layers.0.mlp.up_proj.weight"].abs().max() > 1e-3


def test_schedule_keeps_the_proportions_and_the_log_shows_the_full_rate(tmp_path):
    options = {"max_steps": 4, "lr_scheduler_type": "linear", "optim": "adamw_torch", "weight_decay": 0.1}
    trainer = make_sgd_trainer(tiny_model(**UNTIED), tmp_path, learning_rate_factors={"encoder": 0.5}, **options)
    trainer.train()
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx([0.1, 0.075, 0.05, 0.025])
    groups = trainer.optimizer.param_groups
    expected = [(rate, decay) for rate in (0.1, 0.05) for decay in (0.1, 0.0)]
    assert [(group["initial_lr"], group["weight_decay"]) for group in groups] == expected
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    assert trainer.optimizer_cls_and_kwargs is None


def test_resumed_run_keeps_its_rates(tmp_path):
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "seed": 3}
    options |= {"learning_rate_factors": {"encoder": 0.1}, "layer_decay": 0.5, "lr_scheduler_type": "linear"}
    whole = make_sgd_trainer(tiny_model(initializer_range=0.2), tmp_path, **options)
    whole.train()
    resumed = make_sgd_trainer(tiny_model(seed=9), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, dict(resumed.model.named_parameters())[name]), name


@pytest.mark.parametrize(
    "optimizer", [(torch.optim.SGD, {"lr": 0.1, "params": []}), (lambda: torch.optim.SGD, {"lr": 0.1})]
)
def test_optimizer_that_makes_its_own_groups_is_refused(optimizer, tmp_path):
    trainer = make_sgd_trainer(tiny_model(), tmp_path, learning_rate_factors={"encoder": 0.1})
    trainer.optimizer_cls_and_kwargs = optimizer
    with pytest.raises(
        ValueError, match="`optim` must be an optimizer that takes groups, got sgd, which makes its own"
    ):
        trainer.create_optimizer()


def test_options_reach_every_group(tmp_path):
    options = {"optim": "adafactor", "optim_args": "scale_parameter=True, clip_threshold=0.5,decay_rate=-0.7"}
    trainer = make_trainer(tmp_path, MetaphraseTrainer, **options)
    trainer.layer_decay = 0.5
    groups = trainer.create_optimizer().param_groups
    expected = {"scale_parameter": True, "clip_threshold": 0.5, "decay_rate": -0.7, "relative_step": False}
    assert all({name: group[name] for name in expected} == expected for group in groups)
    assert len(groups) > 2


def test_options_of_another_optimizer_are_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, MetaphraseTrainer, optim="sgd", optim_args="momentum=0.9")
    assert trainer.create_optimizer().param_groups[0]["momentum"] == 0.9
    assert type(trainer.optimizer) is torch.optim.SGD
    assert adafactor_options(None) == adafactor_options(" ") == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("scale=true", "`optim_args` of adafactor must be some of scale_parameter, .*, got 'scale=true'"),
        ("scale_parameter", "`scale_parameter` in `optim_args` must be true or false, got ''"),
        ("scale_parameter=1", "`scale_parameter` in `optim_args` must be true or false, got '1'"),
        ("decay_rate=fast", "`decay_rate` in `optim_args` must be a number, got 'fast'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adafactor_options(options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optim_args": "garbage"}, "`optim_args` must be options of `optim` adamw_torch_fused, .* got 'garbage': "),
        ({"optim": "adafactor", "optim_args": "garbage"}, "`optim_args` must be .* got 'garbage': "),
        ({"lr_scheduler_kwargs": {"junk": 1}}, "`lr_scheduler_kwargs` must be .* linear, got {'junk': 1}: "),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": "x"}},
            "`lr_scheduler_kwargs` must be .* cosine_with_restarts, got {'num_cycles': 'x'}: ",
        ),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "`lr_scheduler_kwargs` must be .* got "),
    ],
)
def test_options_of_optimizer_and_schedule_are_refused_before_any_data_is_read(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_optimizer(Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields))


@pytest.mark.parametrize("optim", ["galore_adamw_8bit", "lomo", "apollo_adamw"])
def test_optimizer_of_a_missing_package_is_refused_before_any_data_is_read(optim, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"^`optim` {optim} needs the package .*_"):
        check_optimizer(Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=optim))


def test_usual_optimizers_and_schedules_are_accepted(tmp_path):
    for fields in (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"mode": "max"}, "eval_strategy": "steps"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
        {"lr_scheduler_type": "cosine", "optim": "sgd", "optim_args": "momentum=0.9"},
        {"lr_scheduler_type": "polynomial", "optim": "adafactor", "optim_args": "clip_threshold=0.5"},
    ):
        check_optimizer(Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields))
