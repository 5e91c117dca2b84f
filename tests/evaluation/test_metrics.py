"""Every score against its source or a count by hand, wrong arguments, and `metrics.json`."""

import functools
import json
import math
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF, TER

from metaphrase.evaluation.metrics import (
    METRICS,
    Bleu,
    CharacterErrorRate,
    ExactMatch,
    Rouge,
    Ter,
    WordErrorRate,
    check_writable,
    compute_metrics,
    count_edits,
    metrics_path,
    write_metrics,
)

PREDICTIONS = ["The cat sat on the mat.", "Ein Haus, groß und alt", "one two three four five", ""]
REFERENCES = ["The cat sat on a mat.", "ein Haus, alt und groß!", "one two three four six five", "not empty"]
SECOND_REFERENCES = ["A cat sat on the mat.", "Ein altes Haus", "one two four five", "nothing here"]


@pytest.mark.parametrize(
    ("name", "scorer_class", "options", "fixed"),
    [
        ("bleu", BLEU, {}, {}),
        ("bleu", BLEU, {"tokenize": "none", "lowercase": True, "smooth_method": "floor", "smooth_value": 0.2}, {}),
        ("chrf", CHRF, {"word_order": 1, "lowercase": True, "beta": 3}, {}),
        ("chrf++", CHRF, {}, {"word_order": 2}),
        ("ter", TER, {"normalized": True, "case_sensitive": True}, {}),
    ],
)
def test_sacrebleu_scores_equal_corpus_score(name, scorer_class, options, fixed):
    scorer = scorer_class(**options, **fixed)
    expected = scorer.corpus_score(PREDICTIONS, [REFERENCES, SECOND_REFERENCES])
    pairs = list(zip(REFERENCES, SECOND_REFERENCES, strict=True))
    result = compute_metrics(PREDICTIONS, pairs, [name], {name: options})[name]
    assert result["score"] == expected.score > 0
    assert result["signature"] == str(scorer.get_signature())
    assert "nrefs:2" in result["signature"]


def test_bleu_by_hand_with_its_details():
    # Matches 3 of 4 words, 2 of 3 pairs, 1 of 2 triples; 5 reference words against 4.
    result = Bleu().compute(
        predictions=["a b c x"], references=["a b c d e"], tokenize="none", smooth_method="none", max_ngram_order=3
    )
    assert result["precisions"] == pytest.approx([75, 200 / 3, 50])
    assert (result["counts"], result["totals"]) == ([3, 2, 1], [4, 3, 2])
    assert (result["sys_len"], result["ref_len"]) == (4, 5)
    assert result["bp"] == pytest.approx(math.exp(-1 / 4))
    assert result["score"] == pytest.approx(math.exp(-1 / 4) * 100 * (3 / 4 * 2 / 3 * 1 / 2) ** (1 / 3))


def test_tokenize_none_splits_at_spaces_only_and_says_so():
    text = "a man 's dog ( brown ) runs , fast"
    joined = "a man's dog (brown) runs, fast"
    plain = Bleu().compute(predictions=[joined], references=[text])
    tokenised = Bleu().compute(predictions=[joined], references=[text], tokenize="none")
    assert plain["sys_len"] == 9 and tokenised["sys_len"] == 6
    assert "tok:13a" in plain["signature"] and "tok:none" in tokenised["signature"]


def test_the_number_of_references_may_vary():
    ragged = [[REFERENCES[0]], [REFERENCES[1], SECOND_REFERENCES[1]], [REFERENCES[2]], [REFERENCES[3]]]
    results = compute_metrics(PREDICTIONS, ragged, list(METRICS))
    assert all("nrefs:var" in result["signature"] for result in results.values())
    documents = [REFERENCES, [None, SECOND_REFERENCES[1], None, None]]
    assert results["ter"]["score"] == TER().corpus_score(PREDICTIONS, documents).score


def rouge(predictions, references, **options):
    return Rouge().compute(predictions=predictions, references=references, **options)


def test_rouge_by_hand():
    # Two of three words in each; the longest common subsequence is "a c"; no pair in common.
    result = rouge(["a c x", "same words"], ["a b c", "same words"])
    assert result["rouge1"] == pytest.approx((200 / 3 + 100) / 2)
    assert result["rouge2"] == pytest.approx((0 + 100) / 2)
    assert result["score"] == result["rougeL"] == pytest.approx((200 / 3 + 100) / 2)


def test_rouge_lsum_needs_newlines():
    lines, spaces = rouge(["c d\na b"], ["a b\nc d"]), rouge(["c d a b"], ["a b c d"])
    assert lines["rougeLsum"] == pytest.approx(100) and lines["rougeL"] == pytest.approx(50)
    assert spaces["rougeLsum"] == spaces["rougeL"] == pytest.approx(50)


def test_rouge_stems_and_takes_the_best_reference():
    pair = ["walking dogs"], [["cats", "walked dog"]]
    assert rouge(*pair)["rouge1"] == 0 and rouge(*pair, use_stemmer=True)["rouge1"] == pytest.approx(100)


def test_rouge_counts_references_that_its_tokenizer_empties():
    greek = ["Σκύλος τρέχει"]
    for options, score, empty in (({}, 0, 1), ({"tokenize": "none"}, 100, 0)):
        result = rouge(greek, greek, **options)
        assert (result["score"], result["references_without_tokens"]) == (pytest.approx(score), empty)


@pytest.mark.parametrize(
    ("options", "matches"),
    [
        ({}, 1),
        ({"ignore_case": True}, 2),
        ({"ignore_punctuation": True}, 2),
        ({"ignore_case": True, "ignore_punctuation": True}, 4),
    ],
)
def test_exact_match(options, matches):
    predictions = ["equal", "STRASSE", "well , then", "Yes!", "no"]
    references = ["equal", "Straße", "well, then", "yes", "nein"]
    result = ExactMatch().compute(predictions=predictions, references=references, **options)
    assert (result["matches"], result["num_examples"], result["score"]) == (matches, 5, 20 * matches)
    assert ExactMatch().compute(predictions=["b", "b"], references=[["a", "b"], ["a", "c"]])["score"] == 50


@pytest.mark.parametrize(
    ("metric", "predictions", "references", "edits"),
    [
        # "sat" -> "sits", "down" left out; "very" put in.
        (
            WordErrorRate,
            ["the cat sits on mat", "a very good day"],
            ["the cat sat down on mat", "a good day"],
            [1, 1, 1],
        ),
        # kitten -> sitting takes two substitutions and one insertion; a missing space is a deletion.
        (CharacterErrorRate, ["sitting", "ab"], ["kitten", "a b"], [2, 1, 1]),
    ],
)
def test_error_rates_by_hand(metric, predictions, references, edits):
    result = metric().compute(predictions=predictions, references=references)
    assert [result[key] for key in ("substitutions", "insertions", "deletions")] == edits
    assert result["ref_length"] == 9 and result["score"] == pytest.approx(100 * sum(edits) / 9)


def test_error_rates_with_empty_lines_cases_and_several_references():
    result = WordErrorRate().compute(predictions=["", "two words", "X"], references=["gone", "", "x"], lowercase=True)
    assert [result[key] for key in ("substitutions", "insertions", "deletions")] == [0, 2, 1]
    assert (result["ref_length"], result["empty_references"], result["score"]) == (2, 1, 150)
    best = WordErrorRate().compute(predictions=["a b c"], references=[["x y z", "a b", "a b c d"]])
    assert (best["deletions"], best["insertions"], best["ref_length"]) == (1, 0, 4)
    with pytest.raises(ValueError, match="at least one word, got 2 empty"):
        WordErrorRate().compute(predictions=["a", ""], references=["", " "])


def test_count_edits_equals_the_textbook_recursion():
    def textbook(prediction, reference):
        @functools.cache
        def best(row, column):
            """Return edits, substitutions, insertions and deletions: the fewest edits, then the fewest substitutions."""
            if row == 0 or column == 0:
                return np.array((row + column, 0, column, row))
            change = reference[row - 1] != prediction[column - 1]
            ways = [
                np.add(best(row - 1, column - 1), (change, change, 0, 0)),
                np.add(best(row, column - 1), (1, 0, 1, 0)),
                np.add(best(row - 1, column), (1, 0, 0, 1)),
            ]
            return min(ways, key=tuple)

        return tuple(best(len(reference), len(prediction))[1:])

    generator = random.Random(3)
    for _ in range(300):
        prediction, reference = ("".join(generator.choices("abc", k=generator.randrange(9))) for _ in range(2))
        assert count_edits(prediction, reference) == textbook(prediction, reference), (prediction, reference)


def test_incremental_use_equals_one_call():
    for metric_class in (Ter, WordErrorRate):
        metric = metric_class()
        metric.add(prediction=PREDICTIONS[0], reference=REFERENCES[0])
        metric.add_batch(predictions=PREDICTIONS[1:], references=REFERENCES[1:])
        whole = metric_class().compute(predictions=PREDICTIONS, references=REFERENCES)
        assert metric.compute() == whole


def test_compute_metrics_is_json_and_leaves_the_random_state_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    results = compute_metrics(PREDICTIONS, REFERENCES, list(METRICS))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert list(results) == list(METRICS)
    assert all({"score", "signature"} <= set(result) for result in results.values())
    assert list(compute_metrics(PREDICTIONS, REFERENCES)) == ["bleu", "chrf"]


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([], [], "got 0 and 0"),
        (["a"], None, "`references` must be a sequence of texts, got NoneType"),
        ("a", ["a"], "`predictions` must be a sequence of texts, got str"),
        (["a", 3], ["a", "b"], "`predictions` must hold texts, got 3 at index 1"),
        (["a", "b"], ["a", ["b"]], "must hold texts only"),
        (["a", "b"], [["a"], "b"], "must hold non-empty lists of texts only"),
        (["a", "b"], [["a"], []], r"got \[\] at 1"),
    ],
)
def test_bad_corpora_are_refused(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        compute_metrics(predictions, references)
    with pytest.raises(ValueError, match="got 0 and 0"):
        Bleu().compute()


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["blue"], None, "got 'blue'. Did you mean 'bleu'?"),
        ("bleu", None, "must be a sequence of names"),
        (["bleu"], {"bleu": {"lower_case": True}}, "Did you mean 'lowercase'?"),
        (["bleu"], {"bleu": {"tokenize": "13b"}}, "Did you mean '13a'?"),
        (["bleu"], {"bleu": {"smooth_method": "flor"}}, "Did you mean 'floor'?"),
        (["bleu"], {"chrf": {}}, "A key of `options` must be one of bleu, got 'chrf'"),
        (["chrf++"], {"chrf++": {"word_order": 1}}, "An option of `ChrFPlusPlus`"),
        (["rouge"], {"rouge": {"tokenize": "none", "use_stemmer": True}}, "`use_stemmer` must be False"),
    ],
)
def test_bad_names_and_options_are_refused(names, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compute_metrics(PREDICTIONS, REFERENCES, names, options)


def test_scores_need_no_network_and_write_no_files(tmp_path):
    program = (
        "from metaphrase.evaluation.metrics import METRICS, compute_metrics\n"
        "compute_metrics(['a b'], ['a c'], [name for name in METRICS])\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment = kept | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)
    assert list(tmp_path.rglob("*")) == []


def test_write_metrics_replaces_in_one_step(tmp_path, monkeypatch):
    content = {"scores": {"bleu": {"score": 12.5}}, "data": {"name": "日本"}}
    path = write_metrics(tmp_path, content)
    for bad in (math.inf, {1, 2}):
        with pytest.raises(ValueError, match="`metrics` must hold finite numbers"):
            write_metrics(path, {"loss": bad})

    def refuse(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "replace", refuse)
        write_metrics(path, {"loss": 2.0})
    assert path == tmp_path / "metrics.json" and json.loads(path.read_text(encoding="utf-8")) == content
    write_metrics(path, {"loss": 1.0})
    assert json.loads(path.read_text(encoding="utf-8")) == {"loss": 1.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.json"]


def test_a_path_that_ends_in_a_slash_is_a_folder(tmp_path):
    path = check_writable(f"{tmp_path}/new/")
    assert path == metrics_path(f"{tmp_path}/new/") == tmp_path / "new" / "metrics.json"
    # Only the folder exists yet.
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]
    assert write_metrics(f"{tmp_path}/other/", {"loss": 1.0}) == tmp_path / "other" / "metrics.json"
    assert check_writable(tmp_path / "file") == tmp_path / "file"
