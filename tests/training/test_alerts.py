"""Tests of alerts: each one is said in a run that deserves it, and not in a run that does not."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from small_experiments import make_recipe, train
from small_trainers import make_trainer, small_pairs
from tiny_models import tiny_model
from transformers import TrainerState, TrainingArguments

from metaphrase.data.profile import SideProfile
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.evaluation.evaluate import TaskScores, ValidationSample
from metaphrase.training.alerts import (
    TrainingAlerts,
    frequency_loss,
    rate_alerts,
    score_alerts,
)
from metaphrase.training.experiment import Experiment

CURVES = Path(__file__).parents[2] / "benchmarks" / "results" / "choices.json"
SYMBOLS = SideProfile.of(["jump left walk", "walk right", "jump", "run right walk"] * 1000)
TEXT = SideProfile.of([f"the word {number} is new and stands in a sentence" for number in range(1000)])


@pytest.fixture(scope="module")
def pairs():
    return make_demo_corpus(num_train=300, num_validation=60, num_test=60)


def alerts_of_data(folder, pairs, caplog, **fields):
    """Return the alerts when a corpus is read and encoded."""
    for split, rows in pairs.items():
        (folder / f"{split}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows), encoding="utf-8")
    caplog.clear()
    Experiment(make_recipe(folder, folder / "run", **fields), is_dry_run=True).prepare()
    return [record.getMessage() for record in caplog.records if record.name == "metaphrase.training.alerts"]


def swapped(rows):
    return [(target, source) for source, target in rows]


# Pairs and vocabulary


def test_good_pairs_raise_no_alert(tmp_path, pairs, caplog):
    assert alerts_of_data(tmp_path, pairs, caplog) == []
    # Half of the pairs of a text normalizer are equal on both sides.
    rows = pairs["train"]
    normalization = {**pairs, "train": [(s, s if number % 2 else t) for number, (s, t) in enumerate(rows)]}
    assert alerts_of_data(tmp_path, normalization, caplog) == []
    # A classifier has few targets.
    classes = {
        split: [(s, "good" if number % 3 else "bad") for number, (s, _) in enumerate(rows)]
        for split, rows in pairs.items()
    }
    assert alerts_of_data(tmp_path, classes, caplog) == []


@pytest.mark.parametrize(
    ("change", "alert"),
    [
        (lambda p: {"train": [(s, s) for s, _ in p["train"]]}, "train: source and target are the same text in 100 %"),
        (
            lambda p: {"train": [(s, t if number % 5 == 0 else "Nein.") for number, (s, t) in enumerate(p["train"])]},
            "train: 80 % of the targets are the same text, 'Nein.'",
        ),
        (lambda p: {"validation": swapped(p["validation"])}, "validation: sides seem swapped"),
        (lambda p: {"test": swapped(p["test"])}, "test: sides seem swapped"),
        (
            lambda p: {"validation": p["validation"][:48] + p["train"][:12]},
            "validation: 12 of 60 sources occur in training too",
        ),
    ],
)
def test_bad_pairs_raise_one_alert(change, alert, tmp_path, pairs, caplog):
    [message] = alerts_of_data(tmp_path, pairs | change(pairs), caplog)
    assert message.startswith(alert)


def test_a_vocabulary_that_is_too_large_is_named(tmp_path, pairs, caplog):
    [message] = alerts_of_data(tmp_path, pairs, caplog, vocab_size=8000)
    assert "is too large for the training pairs" in message and "Set `vocab_size` to about 500" in message


@pytest.mark.parametrize("languages", [("en", "de"), ("de", "en")])
def test_files_of_other_languages_than_the_fields_are_named(languages, data, caplog):
    fields = {f"train_{side}_file": f"train.{name}" for side, name in (("source", "en"), ("target", "de"))}
    fields |= dict(zip(("source_language", "target_language"), languages, strict=True)) | {"train_file": None}
    Experiment(make_recipe(data, data / "run", **fields), is_dry_run=True).prepare()
    assert ("Exchange the sides, or the languages" in caplog.text) is (languages == ("de", "en"))


# Settings


@pytest.mark.parametrize(
    ("fields", "width", "direction"),
    [
        ({"learning_rate": 5e-5}, 512, "low for a new network"),
        ({"learning_rate": 1e-2}, 128, "high for a new network"),
        ({"learning_rate": 1e-3}, 512, None),
        ({"learning_rate": 1e-2, "optim": "adafactor"}, 512, None),
        ({"learning_rate": 5e-3, "model_name_or_path": "base"}, 128, "high for fine-tuning"),
        ({"learning_rate": 1e-7, "model_name_or_path": "base"}, 512, "low for fine-tuning"),
        ({"learning_rate": 1e-3, "model_name_or_path": "base"}, 512, None),
        ({"learning_rate": 5e-3, "model_name_or_path": "base", "lora_rank": 4}, 512, None),
    ],
)
def test_a_learning_rate_of_another_order_is_named(fields, width, direction, tmp_path):
    recipe = make_recipe(tmp_path, tmp_path, **fields)
    messages = list(rate_alerts(recipe, recipe.training_arguments(), width))
    assert len(messages) == (direction is not None)
    assert all(f"is far too {direction} of width {width}" in message for message in messages)


# Training and scores


def test_a_run_that_deserves_them_gets_all_alerts(data, tmp_path, caplog):
    """A new network with the rate of fine-tuning, untrained, with room to run away."""
    fields = {"max_steps": 6, "eval_steps": 2, "save_strategy": "no", "generation_max_length": 60}
    train(data, tmp_path / "run", **fields)
    for text in ("far too low for a new network", "Scores stay at zero: bleu 0.0", "they repeat themselves"):
        assert caplog.text.count(text) == 1
    assert caplog.text.count("100 % of the validation outputs run to the length limit and do not end.") == 1
    assert "never scored" not in caplog.text


def test_references_beyond_the_limit_are_named(data, tmp_path, caplog):
    fields = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "generation_max_length": 3}
    train(data, tmp_path / "run", **fields)
    assert "validation: 8 of 8 references are longer than the length limit of outputs (2)" in caplog.text
    assert "8 of 8 outputs met the length limit (2) before their end, and 8 references are longer." in caplog.text
    assert "repeat themselves" not in caplog.text
    assert caplog.text.count("The validation pairs are never scored") == 1


def test_a_sample_counts_outputs_that_run_away(generator):
    tokenizers, texts = generator.tokenizers, ["one word", "two words", "three words", "four words"]
    pairs = Dataset.from_dict({"source": texts, "target": texts})
    sample = ValidationSample(pairs, None, False, tokenizers, TaskScores(["exact_match"]))
    labels = tokenizers.encode_targets(texts)
    # Right, without an end and long, without an end but shorter than the reference, and wrong.
    sample([labels[0], labels[1][:-1] * 2, labels[2][:1], labels[0]], labels)
    assert (sample.exact, sample.unfinished) == (0.25, 0.25)


@pytest.mark.parametrize(("rate", "falls"), [(1e-9, False), (1e-2, True)])
def test_a_loss_that_does_not_fall_is_named_once(rate, falls, tmp_path, caplog):
    pairs_of_ids = small_pairs()
    counts = np.bincount(np.concatenate([pair["labels"] for pair in pairs_of_ids]))
    callback = TrainingAlerts([], None, None, frequency_loss(counts, 60, 0.0))
    options = {"max_steps": 100, "logging_steps": 20, "per_device_train_batch_size": 12, "learning_rate": rate}
    model = tiny_model(dropout=0.0, vocab_size=60, encoder_layers=1, decoder_layers=1)
    make_trainer(model, pairs_of_ids, tmp_path, callbacks=[callback], **options).train()
    assert caplog.text.count("The loss does not fall") == (not falls)


def test_the_loss_of_frequencies():
    assert frequency_loss(np.array([0, 4, 4]), 3, 0.0) == pytest.approx(np.log(2))
    # With smoothing over four entries: 0.475 twice, and 0.025 twice.
    expected = -2 * (0.475 * np.log(0.475) + 0.025 * np.log(0.025))
    assert frequency_loss(np.array([0, 4, 4]), 4, 0.1) == pytest.approx(expected)


def replay(evaluations, caplog, updates, metrics, best=None, targets=TEXT, unfinished=0.0):
    """Return the alerts of a run with these scores by update."""
    caplog.clear()
    sample = SimpleNamespace(exact=0.0, unfinished=unfinished)
    callback = TrainingAlerts(metrics, sample, targets, None)
    state = TrainerState(max_steps=updates)
    arguments = TrainingArguments(use_cpu=True, metric_for_best_model=best)
    for step, scores in evaluations:
        state.global_step, sample.exact = step, scores.get("exact_match", 0.0) / 100
        logged = {f"eval_{name}": scores[name] for name in metrics}
        state.log_history.append(logged | {"step": step})
        callback.on_evaluate(arguments, state, None, logged)
    return caplog.messages


def test_of_77_real_runs_only_the_failed_one_raises_an_alert(caplog):
    """An alphabet instead of pieces on 500 sentences reached a BLEU of 0.4."""
    report = json.loads(CURVES.read_text(encoding="utf-8"))
    symbols = ("commands", "semantic", "g2p", "normalization")
    failed = set()
    for run in report["results"]:
        targets = SYMBOLS if run["name"].startswith(symbols) else TEXT
        curve = [(step, {"exact_match": exact, "bleu": bleu}) for step, _, _, exact, bleu in run["curve"]]
        if replay(curve, caplog, run["updates"], ["exact_match", "bleu"], targets=targets):
            failed.add(run["name"])
    assert failed == {"demo_500:char"}


def test_scores_that_stay_at_zero(caplog):
    zero = [(step, {"bleu": 0.0, "chrf": 9.0}) for step in (300, 600, 900)]
    [message] = replay(zero, caplog, 1200, ["bleu", "chrf"])
    assert message.startswith("Scores stay at zero: bleu 0.0, chrf 9.0 after 900 updates.")
    assert message.endswith("that `learning_rate` suits the network.")
    alive = [(step, {"bleu": 0.0, "chrf": 30.0}) for step in (300, 600, 900)]
    [message] = replay(alive, caplog, 1200, ["bleu", "chrf"], best="bleu")
    assert message.endswith("The others do not: set one of them as `metric_for_best_model`.")
    # Early evaluations do not count, and neither does a share of sentences that are right as a whole.
    assert replay(zero, caplog, 6000, ["bleu", "chrf"]) == []
    exact = [(step, {"exact_match": 0.0}) for step in (300, 600, 900)]
    assert replay(exact, caplog, 1200, ["exact_match"]) == []
    # Nearly right comes before right.
    found = [len(replay(exact, caplog, updates, ["exact_match"], targets=SYMBOLS)) for updates in (1200, 2000)]
    assert found == [1, 0]
    # BLEU of single words is 0, and would choose no checkpoint.
    words = SideProfile.of(["ging", "lief", "kam"] * 100)
    right = [(step, {"exact_match": 90.0, "bleu": 0.0}) for step in (300, 600, 900)]
    assert replay(right, caplog, 1200, ["exact_match", "bleu"], targets=words) == []
    [message] = replay(right, caplog, 1200, ["exact_match", "bleu"], best="bleu", targets=words)
    assert message.endswith("BLEU of fewer than four words is always 0: set `metrics: [exact_match, cer]`.")


def test_outputs_that_run_away_are_named_once_and_late(caplog):
    good = [(step, {"bleu": 20.0}) for step in (300, 600, 900, 1200)]
    [message] = replay(good, caplog, 1200, ["bleu"], unfinished=0.3)
    assert message.startswith("30 % of the validation outputs run to the length limit")
    assert replay(good, caplog, 1200, ["bleu"], unfinished=0.02) == []
    assert replay(good, caplog, 6000, ["bleu"], unfinished=0.3) == []


@pytest.mark.parametrize(
    ("bleu", "exact", "targets", "flatters"),
    [
        (71.0, 13.9, SYMBOLS, True),
        (94.0, 70.0, SYMBOLS, False),
        (40.0, 5.0, TEXT, False),
        (None, 5.0, SYMBOLS, False),
        (71.0, 13.9, None, False),
    ],
)
def test_bleu_that_flatters(bleu, exact, targets, flatters, caplog):
    assert len(list(score_alerts(bleu, exact, targets))) == flatters
    if bleu is not None and targets is not None:
        curve = [(step, {"exact_match": exact, "bleu": bleu}) for step in (300, 900)]
        messages = replay(curve, caplog, 1200, ["exact_match", "bleu"], targets=targets)
        assert [message.startswith("BLEU flatters") for message in messages] == [True] * flatters
