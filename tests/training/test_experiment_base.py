"""The experiment that starts from a model that is there."""

import math

import pytest
import torch
from other_families import other_model
from small_experiments import SMALL, make_recipe, weights
from tiny_generator import tiny_pair
from transformers import AutoModelForSeq2SeqLM

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.experiment import Experiment


def test_fine_tuning_starts_from_the_given_weights(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "first")).train()
    fields = {"model_name_or_path": str(tmp_path / "first"), "preset": None, "vocab_size": None, "learning_rate": 0.0}
    Experiment(make_recipe(data, tmp_path / "second", **fields)).train()
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["fsmt", "marian", "t5"])
def test_other_families_are_fine_tuned(family, data, tmp_path):
    base = tmp_path / "base"
    other_model(family).save_pretrained(base)
    tiny_pair().save_pretrained(base)
    # FSMT lengthens its table of positions for what is longer, and cannot be loaded with that.
    (data / "short.tsv").write_text("a cat\tein Hund\n", encoding="utf-8")
    fields = {"preset": None, "vocab_size": None, "max_steps": 2, "model_name_or_path": base, "num_beams": 2}
    fields |= {"max_source_length": 60, "max_target_length": 60}
    fields |= {"validation_file": "short.tsv", "test_file": "short.tsv"}
    result = Experiment(make_recipe(data, tmp_path / "run", save_strategy="no", **fields)).train()
    assert math.isfinite(result["loss"]) and result["num_examples"] == 1
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (base, tmp_path / "run"))
    assert type(after) is type(before)
    assert any(not torch.equal(weight, after.state_dict()[name]) for name, weight in before.state_dict().items())


def test_weights_in_half_precision_are_trained_in_float32(data, tmp_path, caplog):
    base, fields = tmp_path / "base", {"eval_strategy": "no", "test_file": None, "validation_file": None}
    Experiment(make_recipe(data, base, max_steps=1, save_strategy="no", **fields)).train()
    AutoModelForSeq2SeqLM.from_pretrained(base).half().save_pretrained(base)
    assert {weight.dtype for weight in weights(base).values()} == {torch.float16}
    # A step so small that it is lost in half precision.
    fields |= {"model_name_or_path": base, "preset": None, "vocab_size": None, "learning_rate": 1e-6}
    with caplog.at_level("INFO"):
        Experiment(make_recipe(data, tmp_path / "fine", max_steps=1, save_strategy="no", **fields)).train()
    assert "which are in torch.float16, are trained in float32" in caplog.text
    before, after = weights(base), weights(tmp_path / "fine")
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert any(not torch.equal(after[name], weight.float()) for name, weight in before.items())


def test_fine_tuning_adds_special_tokens(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "first", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"model_name_or_path": tmp_path / "first", "preset": None, "vocab_size": None, "max_steps": 1}
    fields |= {"additional_special_tokens": ["<2de>", "<2fr>"], "source_prefix": "<2de> "}
    Experiment(make_recipe(data, tmp_path / "second", save_steps=1, eval_steps=1, **fields)).train()
    first, second = (TokenizerPair.from_pretrained(tmp_path / name) for name in ("first", "second"))
    assert len(second.source) == len(first.source) + 2
    [ids] = second.encode_sources(["<2de> the cat"])
    assert ids[0] == second.source.convert_tokens_to_ids("<2de>") == len(first.source)
    assert second.decode_targets([ids]) == ["<2de> the cat"]
    assert weights(tmp_path / "second")["lm_head.weight"].shape[0] == len(second.source)


def test_frozen_parts_stay(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "first", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"freeze": ["encoder.layers", "decoder.layers.0"], "model_name_or_path": tmp_path / "first"}
    Experiment(make_recipe(data, tmp_path / "second", **fields | {"preset": None, "vocab_size": None})).train()
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("encoder.layers" in name or "decoder.layers.0" in name for name in changed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze": ["encodr"]}, "`freeze` must name parts of the model, got 'encodr'"),
        (
            {"freeze": ["encoder.layers", "decoder.layers.0-9"]},
            "got 'decoder.layers.0-9', and there is no 'decoder.layers.1'",
        ),
        ({"freeze": ["*"]}, r"`freeze` must leave something to train, got \*"),
        ({"learning_rate_factors.decoder.mlp": 0.1}, "`learning_rate_factors` must name parts .* got 'decoder.mlp'"),
        ({"lora_rank": 4, "lora_target_modules": ["q_porj"]}, "`lora_target_modules` must name .* got 'q_porj'"),
        (
            {"lora_rank": 4, "lora_target_modules": ["lm_head"]},
            "`lora_target_modules` must name weights that are not tied",
        ),
    ],
    ids=str,
)
def test_parts_that_the_model_lacks_are_told_before_the_corpus_is_read(fields, message, data, tmp_path, caplog):
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset("transformer-tiny", vocab_size=50, **SMALL))
    model.save_pretrained(tmp_path / "base")
    of_model = {"model_name_or_path": tmp_path / "base", "preset": None, "vocab_size": None}
    for base in [of_model] if "lora_rank" in fields else [of_model, {}]:
        with caplog.at_level("INFO"), pytest.raises(ValueError, match=message):
            Experiment(make_recipe(data, tmp_path / "run", **fields, **base))
    assert "Frozen" not in caplog.text


def test_parts_of_adapters_may_have_rates_of_their_own(data, tmp_path):
    pytest.importorskip("peft")
    Experiment(make_recipe(data, tmp_path / "base", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {
        "model_name_or_path": tmp_path / "base",
        "preset": None,
        "vocab_size": None,
        "lora_rank": 4,
        "max_steps": 1,
    }
    fields |= {"learning_rate_factors.*.lora_B": 4.0, "save_steps": 1, "eval_steps": 1}
    assert Experiment(make_recipe(data, tmp_path / "run", **fields)).train()["num_examples"] == 8


def test_lora_trains_adapters_and_leaves_a_plain_model(data, tmp_path):
    pytest.importorskip("peft")
    Experiment(make_recipe(data, tmp_path / "base", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"model_name_or_path": tmp_path / "base", "preset": None, "vocab_size": None, "lora_rank": 4}
    fields |= {"learning_rate": 1e-2, "lora_target_modules": ["q_proj", "v_proj"]}
    result = Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert result["num_examples"] == 8
    before, after = weights(tmp_path / "base"), weights(tmp_path / "run")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj"}
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "run" / "adapter_model.safetensors").exists()
