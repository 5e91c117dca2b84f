import json
import sys

import numpy as np
import pytest
from small_experiments import read_log
from small_runs import SMALL, write_pairs

from metaphrase.data.pairs import SPLITS
from metaphrase.demo.corpus import make_demo_corpus, make_demo_summaries
from metaphrase.hub_card import write_model_card
from metaphrase.techniques.mixtures import TaskCorpus, mixing_rates
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import open_corpus
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe

SIZES = {"translate": 40, "summarize": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    corpora = {
        "translate": make_demo_corpus(num_train=2000, num_validation=6, num_test=6),
        "summarize": make_demo_summaries(num_train=20, num_validation=4, num_test=4),
    }
    for task, splits in corpora.items():
        for split, pairs in splits.items():
            write_pairs(folder / f"{task}_{split}.tsv", pairs[: SIZES[task]] if split == "train" else pairs)
    return folder


def tasks(**fields):
    both = {task: {f"{split}_file": f"{task}_{split}.tsv" for split in SPLITS} for task in SIZES}
    for task, own in fields.items():
        both[task] |= own
    return {
        task: {"source_prefix": f"{task}: "} | {name: value for name, value in own.items() if value is not None}
        for task, own in both.items()
    }


def make_recipe(data, output, **fields):
    base = {"data_dir": str(data), "output_dir": str(output), "tasks": tasks(), "vocab_size": 600, "model": SMALL}
    base |= {"max_steps": 4, "max_tokens_per_batch": 600, "per_device_eval_batch_size": 8, "save_strategy": "no"}
    base |= {"eval_strategy": "steps", "eval_steps": 4, "generation_max_length": 12, "metrics": ["bleu", "exact_match"]}
    base |= {"disable_tqdm": True, "use_cpu": True}
    return Recipe.from_mapping(base | fields, "the test")


def test_tasks_are_mixed_and_keep_their_prefixes_and_their_own_counts(data, tmp_path):
    both = tasks(summarize={"max_source_length": 50, "weight": 2})
    recipe = make_recipe(data, tmp_path, tasks=both)
    corpus = TaskCorpus(recipe, recipe.training_arguments())
    corpus.load()
    tokenizers = TokenizerPair.train(*corpus.sides(), vocab_size=600, show_progress=False)
    encoded = corpus.encode(tokenizers)
    dropped = corpus.reports["summarize/train"].source_too_long
    assert 0 < dropped < 10 and corpus.reports["translate/train"].dropped == 0
    texts = tokenizers.decode_targets(encoded["train"]["input_ids"])
    counts = {task: [text for text in texts if text.startswith(f"{task}: ")] for task in SIZES}
    assert {task: len(texts) for task, texts in counts.items()} == {"translate": 40, "summarize": 2 * (10 - dropped)}
    assert len(set(counts["summarize"])) == 10 - dropped and sum(map(len, counts.values())) == len(texts)
    assert encoded["validation"]["task"] == ["translate"] * 6 + ["summarize"] * 4
    for source, task in zip(encoded["validation"]["source"], encoded["validation"]["task"], strict=True):
        assert source.startswith(f"{task}: ")
    kept = {"translate": (40, 6, 6), "summarize": (10 - dropped, 4, 4)}
    expected = {f"{task}/{split}": count for task in kept for split, count in zip(SPLITS, kept[task], strict=True)}
    assert {name: report.kept for name, report in corpus.reports.items()} == expected
    assert corpus.sizes() == {"num_train": 50 - dropped, "num_validation": 10, "num_test": 10}
    # Tokenizers learn from the text, not from prefixes.
    assert not any(text.startswith("translate: ") for side in corpus.sides() for text in side)


def test_run_scores_each_task(data, tmp_path, caplog):
    recipe = make_recipe(data, tmp_path / "run")
    with caplog.at_level("INFO"):
        result = Experiment(recipe).train()
    assert result["num_examples"] == 10
    assert {task: part["num_examples"] for task, part in result["tasks"].items()} == {"translate": 6, "summarize": 4}
    for part in result["tasks"].values():
        assert set(part["scores"]) == {"bleu", "exact_match"} and part["scores"]["bleu"]["signature"]
    written = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert written["tasks"].keys() == {"translate", "summarize"}
    assert {"eval_translate_bleu", "eval_summarize_exact_match"} <= read_log(tmp_path / "run")[0].keys()
    assert "translate: 80.0 % of training, 40 pairs read 1.00 times." in caplog.messages
    card = write_model_card(tmp_path / "run").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in card.splitlines() if line.startswith("|")]
    expected = [[task, metric] for task in SIZES for metric in ("BLEU", "exact match")]
    assert [row[1:3] for row in rows if row[1] in SIZES] == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"train_file": "a.tsv"}, "`tasks` and `train_file` must not both be given"),
        ({"tasks": {"a": "b"}}, "`tasks.a` must be a valid dictionary, got 'b'"),
        ({"tasks": tasks(summarize={"weight": 0})}, "`tasks.summarize.weight` must be a number above 0, got 0"),
        ({"tasks": tasks(summarize={"trian_file": "x"})}, "`trian_file` in `tasks.summarize`. Did you mean 'train_"),
        ({"tasks": tasks(summarize={"train_file": None})}, "Task 'summarize': A recipe must name its training pairs"),
        (
            {"tasks": tasks(summarize={"validation_file": None}), "metric_for_best_model": "summarize_bleu"},
            "summarize_bl",
        ),
    ],
)
def test_contradictions_are_refused(data, tmp_path, fields, words):
    with pytest.raises(ValueError) as error:
        recipe = make_recipe(data, tmp_path, **fields)
        TaskCorpus(recipe, recipe.training_arguments())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "weights", "options", "expected"),
    [
        ([900, 100], [1, 1], {"mixing": "proportional"}, [0.9, 0.1]),
        ([900, 100], [1, 1], {"mixing": "equal", "limit": 1}, [0.5, 0.5]),
        ([900, 100], [1, 1], {"mixing": "temperature", "temperature": 2.0, "limit": 400}, [2 / 3, 1 / 3]),
        ([900, 100], [1, 9], {}, [0.5, 0.5]),
    ],
)
def test_rates_are_those_of_the_formulas(sizes, weights, options, expected):
    np.testing.assert_allclose(mixing_rates(sizes, weights, **options), expected)


@pytest.mark.parametrize(
    ("option", "fields"),
    [
        ("subword_sampling", {"subword_sampling": 0.1}),
        ("augmentation", {"augmentation": {"typos": 0.1}}),
        ("objective", {"tasks": {}, "objective": "prefix_lm", "train_text_file": "text"}),
    ],
)
def test_options_that_need_a_ring_name_it(data, tmp_path, monkeypatch, option, fields):
    for module in ("", ".augmentation", ".denoising"):
        monkeypatch.setitem(sys.modules, f"metaphrase.augmentation{module}", None)
    recipe = make_recipe(data, tmp_path, **fields)
    with pytest.raises(ValueError, match=f"`{option}` must be left out: it needs metaphrase.augmentation"):
        corpus = open_corpus(recipe, recipe.training_arguments(), (None, None))
        corpus.load()
        corpus.encode(TokenizerPair.train(*corpus.sides(), vocab_size=600, show_progress=False))
