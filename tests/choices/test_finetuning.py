import json

import numpy as np
import pytest
from other_families import other_model
from small_runs import write_pairs
from subcommands import execute
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair
from transformers import T5Config

from metaphrase.choices import completion, rules
from metaphrase.choices.completion import complete
from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.scripts import train
from metaphrase.training.model_setup import longest_sequences
from metaphrase.training.recipe.recipe import Recipe, load_recipe

PAIRS = [(f"{source} {noun}", target) for noun in map(chr, range(ord("a"), ord("a") + 40))
         for source, target in zip(SOURCES, TARGETS, strict=True)]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.tsv", PAIRS)
    return tmp_path


def save_base(family, folder, **decoding):
    model = other_model(family)
    for name, value in decoding.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tiny_pair().save_pretrained(folder)
    return str(folder)


def completed(folder, base, **fields):
    fields |= {"train_file": "pairs.tsv", "output_dir": "run", "use_cpu": True, "model_name_or_path": base}
    recipe = Recipe.from_mapping(fields, "the test")
    experiment, choices = complete(recipe, is_dry_run=True)
    return experiment.recipe, " ".join(choices)


def test_a_base_is_fine_tuned_without_a_recipe_and_resumed(folder):
    base = save_generator(tiny_generator(kind="byte", layers=1), folder / "base")
    words = ["--model_name_or_path", str(base), "--max_steps", "3", "--disable_tqdm", "--use_cpu"]
    words += ["--generation_max_length", "9"]
    execute(train, ["pairs.tsv", *words])
    run = folder / "runs" / "pairs"
    recipe = load_recipe(run / "recipe.yaml")
    assert recipe.num_validation > 0 and recipe.average_best and recipe.metrics
    assert recipe.learning_rate > 2e-4 and not recipe.is_set("tokenizer_kind") and not recipe.is_set("preset")
    assert "# a metaphrase of width" in (run / "recipe.yaml").read_text(encoding="utf-8")
    assert len(Generator.from_pretrained(run).generate(["a cat"])) == 1
    execute(train, ["pairs.tsv", *words, "--resume", "--max_steps", "4"])
    again = load_recipe(run / "recipe.yaml")
    assert json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] == 4
    for name in ("learning_rate", "warmup_steps", "max_source_length", "max_tokens_per_batch", "num_validation"):
        assert getattr(again, name) == getattr(recipe, name), name


@pytest.mark.parametrize(
    ("family", "smoothing", "bounds"),
    [("t5", 0.0, (3e-4, 2e-3)), ("bart", 0.1, (3e-5, 2e-4)), ("marian", 0.1, (1e-4, 1e-3))],
)
def test_rates_follow_the_family_also_of_a_converted_model(family, smoothing, bounds, folder):
    theirs = save_base(family, folder / "theirs", num_beams=3)
    recipe, text = completed(folder, theirs)
    assert bounds[0] < recipe.learning_rate < bounds[1] and recipe.label_smoothing_factor == smoothing
    assert recipe.num_beams == 3 and "the base model has them" in text
    assert recipe.max_source_length % 16 == 0 and 32 <= recipe.max_source_length <= 64
    convert(theirs, folder / "ours")
    ours, _ = completed(folder, str(folder / "ours"))
    for name in ("learning_rate", "label_smoothing_factor", "weight_decay", "num_beams"):
        assert getattr(ours, name) == getattr(recipe, name), name


def test_given_fields_stay(folder):
    given = {"learning_rate": 1.0, "num_train_epochs": 2.0, "max_source_length": 40, "num_validation": 10}
    given |= {"per_device_train_batch_size": 4, "label_smoothing_factor": 0.3, "eval_strategy": "no"}
    recipe, _ = completed(folder, save_base("t5", folder / "base"), **given)
    assert {name: getattr(recipe, name) for name in given} == given
    assert recipe.max_tokens_per_batch is None and recipe.max_steps == -1


def test_texts_beyond_the_positions_are_truncated(folder):
    long = "a cat " * 30
    pairs = [(f"{long}{source}", f"{target} {number:04}") for number, (source, target) in enumerate(PAIRS)]
    write_pairs(folder / "pairs.tsv", pairs)
    recipe, text = completed(folder, save_base("bart", folder / "base"))
    assert recipe.max_source_length == 64 and longest_sequences(recipe) == (64, 64) and recipe.too_long == "truncate"
    assert recipe.metrics == ["rouge", "chrf"] and "their beginnings are read" in text


def test_memory_decides_on_batches(folder, monkeypatch, caplog):
    base = save_base("bart", folder / "base")
    peaks, estimate = [], completion.estimate_recipe

    def recorded(recipe, data, **options):
        peaks.append(estimate(recipe, data, devices=1).peak)
        return estimate(recipe, data, devices=1)

    monkeypatch.setattr(completion, "estimate_recipe", recorded)
    full, _ = completed(folder, base)
    assert full.max_tokens_per_batch == 1024
    monkeypatch.setattr(completion, "free_memory", lambda: completion._HEAP * (peaks[0] - 1))
    small, text = completed(folder, base)
    assert small.max_tokens_per_batch < 1024
    assert small.max_tokens_per_batch * small.gradient_accumulation_steps == 1024 and peaks[-1] < peaks[0]
    assert "memory holds no more in one batch" in text
    monkeypatch.setattr(completion, "free_memory", lambda: 0)
    pytest.importorskip("peft")
    adapted, _ = completed(folder, base, lora_rank=2)
    assert "Training takes about" in caplog.text
    assert adapted.load_best_model_at_end and adapted.average_best is None
    assert adapted.learning_rate == min(1e-3, 10 * full.learning_rate)


@pytest.mark.parametrize("seconds", [None, 1000.0, 0.001])
def test_time_shortens_the_run(seconds):
    tokens, before = rules.TokenProfile(1000, 15_000, 15_000, 60), Recipe(train_file="pairs.tsv")
    usual = rules.finetuning_updates(tokens, 1024)
    recipe, total = rules.choose_finetuning(before, tokens, T5Config(), 1, rules.StepCost(10.0), seconds)
    updates = usual if seconds is None else max(1, int(seconds / 10))
    text = " ".join(rules.describe_choices(before, recipe))
    assert recipe.max_steps == updates and total == 10 * updates
    assert ("of them fit into the time" in text) is (seconds is not None)
    assert recipe.warmup_steps == updates // 10 and recipe.lr_scheduler_type == "cosine"
    for name, value in (("reward", "bleu"), ("rejected_column", 2)):
        changed, _ = rules.choose_finetuning(
            before.replace(**{name: value}), tokens, T5Config(), 1, rules.StepCost(1.0), None
        )
        assert changed.learning_rate == pytest.approx(recipe.learning_rate / 10, rel=0.05)


def test_several_devices_have_larger_updates_with_a_higher_rate():
    def chosen(pairs, devices):
        tokens = rules.TokenProfile(pairs, 15 * pairs, 15 * pairs, 60, devices)
        return rules.choose_finetuning(
            Recipe(train_file="pairs.tsv"), tokens, T5Config(), 1, rules.StepCost(0.0), None
        )[0]

    few, many = ([chosen(pairs, devices) for devices in (1, 4)] for pairs in (1000, 100_000))
    assert [recipe.max_tokens_per_batch for recipe in few + many] == [1024, 1024, 8192, 2048]
    for alone, shared, factor in ((*few, 2), (*many, 1)):
        assert shared.learning_rate == pytest.approx(factor * alone.learning_rate)
        assert shared.max_steps == alone.max_steps


def test_wider_models_have_lower_rates():
    for rule in rules.RULES.values():
        rates = [rule.learning_rate(width) for width in (16, 512, 768, 1024, 4096)]
        assert rates == sorted(rates, reverse=True)
        assert np.isclose(rule.learning_rate(rule.width), rule.rate) and rates[0] <= 4 * rule.rate
