import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from small_experiments import ONE_STEP, assert_resumed_equal, read_log, train
from small_runs import SMALL
from small_trainers import make_trainer, tiny_bart
from subcommands import execute
from tiny_generator import tiny_pair
from tiny_models import DESIGNS, MERGED, tiny_model
from torch.nn.functional import logsigmoid
from weighted_targets import assert_accumulated_equal, gradient, log_probs_alone, weighted_loss

from metaphrase.choices.completion import complete
from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.data.encoding import data_fingerprint, encode_pairs
from metaphrase.data.pairs import load_pairs
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.techniques.preferences import REFERENCE_NAME, PreferenceTraining, preference_of
from metaphrase.techniques.rewards import rows_of
from metaphrase.training.recipe.recipe import Recipe, load_recipe

PREFERENCES = [
    ([5, 9, 7, 4, 2], ((4, 5, 2), (9, 2))),
    ([6, 3, 2], ((7, 7, 7, 7, 2), (3, 2))),
    ([8, 2], ((2,), (5, 6, 2))),
]
# Equal targets have no gradient but that of the cross-entropy.
PREFERENCES += [([4, 2], ((6, 2), (6, 2)))]
PAIRS = [
    {"input_ids": source, "labels": [*chosen, IGNORED_LABEL, *rejected]} for source, (chosen, rejected) in PREFERENCES
]
LOSSES = ("dpo", "ipo", "simpo", "cpo")


def make_training(loss, pairs=PAIRS, **fields):
    fields = {"train_file": "train.tsv", "rejected_column": "rejected", "preference_loss": loss, **fields}
    return PreferenceTraining(Recipe.from_mapping(fields, "a test"), pairs)


def begin(training, model, folder):
    arguments = type("Arguments", (), {"output_dir": str(folder), "disable_tqdm": True})
    training.on_train_begin(arguments, type("State", (), {"global_step": 0}), None, model=model)
    return training


def plain_loss(model, first, loss, share):
    """Sum of the losses of all pairs as the papers write them, and beta times their margins."""
    losses, margins = [], []
    for source, targets in PREFERENCES:
        chosen, rejected = log_probs_alone(model, source, targets)
        with torch.no_grad():
            chosen_first, rejected_first = log_probs_alone(first, source, targets)
        sizes = [*map(len, targets)]
        if loss == "dpo":
            margin = 0.1 * ((chosen - chosen_first) - (rejected - rejected_first))
            value = -logsigmoid(margin)
        elif loss == "ipo":
            ratio = (chosen - chosen_first) / sizes[0] - (rejected - rejected_first) / sizes[1]
            margin, value = 0.1 * ratio, (ratio - 1 / (2 * 0.1)) ** 2
        elif loss == "simpo":
            margin = 2.0 * chosen / sizes[0] - 2.0 * rejected / sizes[1]
            value = -logsigmoid(margin - 1.0)
        else:
            margin = 0.1 * (chosen - rejected)
            value = -logsigmoid(margin)
        losses.append((1 - share) * value - share * chosen / sizes[0])
        margins.append(margin.item())
    return sum(losses), margins


@pytest.mark.parametrize("design", ["rotary", "relative", "merged"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_the_papers(loss, design, tmp_path):
    fields = MERGED if design == "merged" else DESIGNS[design]
    first, model = tiny_model(**fields).double(), tiny_model(**fields).double()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    share = 0.5 if loss == "cpo" else 0.0
    expected, margins = plain_loss(model, first, loss, share)
    second = gradient(model, expected)
    for collate in (PairCollator(0), PackedCollator(0, 8)):
        training = begin(make_training(loss), first, tmp_path)
        batch = training(model, collate(PAIRS))
        number, value, accuracy, margin = training.totals
        assert (number, accuracy) == (len(PAIRS), sum(value > 0 for value in margins))
        assert value == pytest.approx(expected.item(), rel=1e-5)
        assert margin == pytest.approx(sum(margins), abs=1e-5)
        first_order = gradient(model, weighted_loss(model, batch))
        assert (first_order - second).abs().max() <= 1e-5 * second.abs().max()


def test_rows_are_read_back():
    # The collators pad, pack and fill up.
    for collate in (PairCollator(0, 8), PackedCollator(0, 16)):
        read = [preference_of(*row) for row in rows_of(collate(PAIRS))]
        assert sorted(read) == sorted(PREFERENCES)
    # A batch without labels stays as it is.
    batch = PairCollator(0)(PAIRS[:1])
    batch["labels"][:] = IGNORED_LABEL
    assert make_training("cpo")(tiny_model(), batch).keys() == batch.keys()


@pytest.mark.parametrize("loss", ["dpo", "cpo"])
def test_accumulated_batches_are_one(loss, tmp_path):
    assert_accumulated_equal(lambda: make_training(loss), PAIRS, tmp_path, max_steps=2, learning_rate=1e-2)


@pytest.fixture
def preferences(data):
    """Pairs of the corpus, whose rejected targets have their words in the reverse order."""
    pairs = [line.split("\t") for line in (data / "train.tsv").read_text(encoding="utf-8").splitlines()[:64]]
    rows = [(source, target, " ".join(reversed(target.split()))) for source, target in pairs]
    names = ("prompt", "chosen", "rejected")
    lines = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows]
    (data / "preferences.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (data / "preferences.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return rows


FIELDS = {"train_file": "preferences.jsonl", "rejected_column": "rejected", "validation_file": None, "test_file": None}
FIELDS |= {"learning_rate": 0.01, "label_smoothing_factor": 0.0, "max_steps": 12, "save_steps": 6, "logging_steps": 1}
FIELDS |= {"eval_strategy": "no", "save_total_limit": 9, "seed": 2}


def logged(folder, name="rewards/accuracies"):
    return [entry[name] for entry in read_log(folder, name)]


@pytest.mark.parametrize("loss", LOSSES)
def test_accuracy_rises_and_a_resumed_run_is_equal(loss, data, preferences, tmp_path):
    fields = {**FIELDS, "preference_loss": loss, "logging_steps": 4}
    train(data, tmp_path / "run", **fields)
    accuracies, losses = logged(tmp_path / "run"), logged(tmp_path / "run", "loss")
    assert len(accuracies) == 3 and accuracies[-1] > max(0.8, accuracies[0]) and losses[-1] < losses[0]
    assert (tmp_path / "run" / REFERENCE_NAME).is_file() == (loss in ("dpo", "ipo"))
    cut = assert_resumed_equal(data, tmp_path / "run", **fields)
    # The log of a step counts pairs before the checkpoint, too.
    for name in ("loss", "rewards/accuracies", "rewards/margins"):
        assert logged(cut, name) == logged(tmp_path / "run", name)


def test_command_trains_an_adapter(data, preferences, tmp_path):
    train(data, tmp_path / "base", **ONE_STEP)
    words = (
        f"{data}/preferences.jsonl --rejected_column rejected --preference_loss dpo --num_validation 8 --lora_rank 4"
    )
    words += f" --model_name_or_path {tmp_path}/base --output_dir {tmp_path}/run --max_steps 12 --logging_steps 4"
    execute("train", f"{words} --use_cpu true --learning_rate 0.02 --max_tokens_per_batch 400".split())
    accuracies = logged(tmp_path / "run")
    assert accuracies[-1] > max(0.7, accuracies[0])
    # Validation pairs are those of source and chosen target.
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["data"]["num_validation"] == 8
    with np.load(tmp_path / "run" / REFERENCE_NAME) as file:
        assert file["log_probs"].shape == (len(preferences) - 8, 2)


def test_columns(data, preferences, tmp_path):
    table = pa.table(
        dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*preferences, strict=True)), strict=True))
    )
    pq.write_table(table, data / "preferences.parquet")
    options = {"source_column": "prompt", "target_column": "chosen", "rejected_column": "rejected"}
    for file, columns in (("jsonl", options), ("parquet", options), ("tsv", {"rejected_column": 2})):
        pairs = load_pairs(file=data / f"preferences.{file}", **columns)
        assert list(zip(*(pairs[name][:] for name in ("source", "target", "rejected")), strict=True)) == preferences
    fields = {"train_file": "preferences.jsonl", "rejected_column": "rejected", "data_dir": str(data)}
    recipe = Recipe.from_mapping(fields, "a test")
    assert {name: recipe.pairs_options("train")[name] for name in options} == options
    bad = data / "bad.jsonl"
    bad.write_text('{"prompt": "a", "chosen": "b", "rejected": null}\n', encoding="utf-8")
    with pytest.raises(MetaphraseError, match="line 1 must hold a text 'rejected', got type NoneType"):
        load_pairs(file=bad, **options)


def test_both_targets_are_encoded_and_long_ones_dropped():
    tokenizers, texts = tiny_pair(), {"source": ["ein Hund"] * 3, "target": ["a dog", "a dog", "a dog " * 9]}
    dataset = Dataset.from_dict({**texts, "rejected": ["a cat", "a cat " * 9, "a cat"]})
    limit = len(tokenizers.encode_targets(["a dog"])[0]) + 3
    encoded, report = encode_pairs(dataset, tokenizers, max_source_length=99, max_target_length=limit)
    chosen, rejected = tokenizers.encode_targets(["a dog", "a cat"])
    assert encoded["labels"][:] == [[*chosen, IGNORED_LABEL, *rejected]]
    assert encoded["target_length"][:] == [len(chosen) + 1 + len(rejected)]
    assert (report.read, report.target_too_long) == (3, 2)
    # A changed rejected target is another data set, which a resumed run refuses.
    other = dataset.remove_columns("rejected").add_column("rejected", ["cat a", "a", "a"])
    others, _ = encode_pairs(other, tokenizers, max_source_length=99, max_target_length=limit)
    assert data_fingerprint(others) != data_fingerprint(encoded)


OTHERS = [{"reward": "bleu"}, {"r_drop_alpha": 1.0}, {"streaming": True}, {"weight_column": "weight"}]
OTHERS += [{"augmentation": {"typos": 0.1}}, {"label_smoothing_factor": 0.1}]


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_what_contradicts_is_refused(fields):
    with pytest.raises(MetaphraseError, match=r"must not both be given, because|must be 0 with `reward`"):
        Recipe.from_mapping({"train_file": "a.tsv", "max_steps": 1, "rejected_column": 2, **fields}, "a test").checked()


def test_a_task_has_no_preferences():
    fields = {"tasks": {"news": {"train_file": "a.tsv", "rejected_column": 2}}}
    with pytest.raises(MetaphraseError, match=r"`tasks\.news\.rejected_column` must be a field of data"):
        Recipe.from_mapping(fields, "a test").checked()


def test_models_of_other_families_are_refused(tmp_path):
    training = make_training("cpo")
    with pytest.raises(MetaphraseError, match="must come with a Metaphrase model, got a Bart"):
        make_trainer(tiny_bart(), PAIRS, tmp_path, replace_batch=training)


def test_limits_are_those_of_both_targets(data, preferences, tmp_path):
    rows = [(source, target, " ".join([rejected] * 5)) for source, target, rejected in preferences]
    (data / "long.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    words = ["--train_file", str(data / "long.tsv"), "--rejected_column", "2", "--output_dir", str(tmp_path / "run")]
    words += [f"--model.{name}={value}" for name, value in SMALL.items()]
    experiment, _ = complete(load_recipe(None, [*words, "--max_steps", "2", "--vocab_size", "300"]), is_dry_run=True)
    report = experiment.prepare().corpus.reports["train"]
    assert report.target_too_long == 0 and experiment.recipe.max_target_length > 100
