import json
import math

import evaluate
import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF, TER

from metaphrase.evaluation.corpus_metric import CorpusMetric
from metaphrase.evaluation.metrics import METRICS, compute_metrics, write_metrics

PREDICTIONS = ["The cat sat on the mat.", "Ein Haus, groß und alt", "one two three four five", ""]
REFERENCES = ["The cat sat on a mat.", "ein Haus, alt und groß!", "one two three four six five", "not empty"]
SECOND_REFERENCES = ["A cat sat on the mat.", "Ein altes Haus", "one two four five", "nothing here"]


def score(name, predictions, references, **options):
    return compute_metrics(predictions, references, [name], {name: options})[name]


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
    result = score(name, PREDICTIONS, list(zip(REFERENCES, SECOND_REFERENCES, strict=True)), **options)
    assert result["score"] == expected.score > 0
    assert result["signature"] == str(scorer.get_signature()) and "nrefs:2" in result["signature"]
    if name == "bleu":
        assert all(result[name] == getattr(expected, name) for name in ("precisions", "bp", "ref_len"))


def test_scores_are_metrics_of_evaluate():
    metric = CorpusMetric("bleu")
    metric.add_batch(predictions=PREDICTIONS[:3], references=REFERENCES[:3])
    metric.add(prediction=PREDICTIONS[3], reference=REFERENCES[3])
    assert metric.compute(tokenize="none") == score("bleu", PREDICTIONS, REFERENCES, tokenize="none")
    lists = [list(texts) for texts in zip(REFERENCES, SECOND_REFERENCES, strict=True)]
    both = evaluate.combine({"wer": CorpusMetric("wer"), "ter": CorpusMetric("ter")})
    results = both.compute(predictions=PREDICTIONS, references=lists)
    for name in ("wer", "ter"):
        assert results[f"{name}_score"] == score(name, PREDICTIONS, lists)["score"] > 0


def test_the_number_of_references_may_vary():
    ragged = [[REFERENCES[0]], [REFERENCES[1], SECOND_REFERENCES[1]], [REFERENCES[2]], [REFERENCES[3]]]
    results = compute_metrics(PREDICTIONS, ragged, list(METRICS))
    assert all("nrefs:var" in result["signature"] for result in results.values())
    documents = [REFERENCES, [None, SECOND_REFERENCES[1], None, None]]
    assert results["ter"]["score"] == TER().corpus_score(PREDICTIONS, documents).score


def test_rouge_by_hand():
    # Two of three words in each; the longest common subsequence is "a c"; no pair in common.
    result = score("rouge", ["a c x", "same words"], ["a b c", "same words"])
    assert result["rouge1"] == pytest.approx((200 / 3 + 100) / 2)
    assert result["rouge2"] == pytest.approx((0 + 100) / 2)
    assert result["score"] == pytest.approx(result["rougeL"]) == pytest.approx((200 / 3 + 100) / 2)
    lines = score("rouge", ["c d\na b"], ["a b\nc d"])
    assert lines["rougeLsum"] == pytest.approx(100) and lines["rougeL"] == pytest.approx(50)
    pair = ["walking dogs"], [["cats", "walked dog"]]
    assert score("rouge", *pair)["rouge1"] == 0 and score("rouge", *pair, use_stemmer=True)["rouge1"] == 100
    greek = ["Σκύλος τρέχει"]
    for options, expected, empty in (({}, 0, 1), ({"tokenize": "none"}, 100, 0)):
        result = score("rouge", greek, greek, **options)
        assert (result["score"], result["references_without_tokens"]) == (pytest.approx(expected), empty)


@pytest.mark.parametrize(
    ("options", "matches"),
    [
        ({}, 1),
        ({"ignore_case": True}, 2),
        ({"ignore_punctuation": True}, 2),
        (dict.fromkeys(("ignore_case", "ignore_punctuation"), True), 4),
    ],
)
def test_exact_match(options, matches):
    predictions = ["equal", "STRASSE", "well , then", "Yes!", "no"]
    result = score("exact_match", predictions, ["equal", "Straße", "well, then", "yes", ["nein", "non"]], **options)
    assert (result["matches"], result["num_examples"], result["score"]) == (matches, 5, 20 * matches)
    assert score("exact_match", ["b", "b"], [["a", "b"], ["a", "c"]])["score"] == 50


def test_error_rates_by_hand():
    # "sat" -> "sits", "down" left out; "very" put in.
    words = score("wer", ["the cat sits on mat", "a very good day"], ["the cat sat down on mat", "a good day"])
    # kitten -> sitting takes two substitutions and one insertion; a missing space is a deletion.
    characters = score("cer", ["sitting", "ab"], ["kitten", "a b"])
    for result, edits in ((words, 3), (characters, 4)):
        assert (result["edits"], result["ref_length"]) == (edits, 9)
        assert result["score"] == pytest.approx(100 * edits / 9)
    result = score("wer", ["", "two words", "X"], ["gone", "", "x"], lowercase=True)
    assert (result["edits"], result["ref_length"], result["empty_references"], result["score"]) == (3, 2, 1, 150)
    best = score("wer", ["a b c"], [["x y z", "a b", "a b c d"]])
    assert (best["edits"], best["ref_length"]) == (1, 4)


def test_results_are_json_and_leave_the_random_state_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    results = compute_metrics(PREDICTIONS, REFERENCES, list(METRICS))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert json.loads(json.dumps(results, allow_nan=False)) == results and list(results) == list(METRICS)
    assert all({"score", "signature"} <= set(result) for result in results.values())
    assert list(compute_metrics(PREDICTIONS, REFERENCES)) == ["bleu", "chrf"]


def test_bad_corpora_and_names_are_refused():
    with pytest.raises(ValueError, match="got 2 and 1"):
        compute_metrics(["a", "b"], ["a"])
    with pytest.raises(ValueError, match=r"got 'blue'. Did you mean 'bleu'\?"):
        compute_metrics(["a"], ["a"], ["blue"])


def test_write_metrics_replaces_in_one_step(tmp_path):
    content = {"scores": {"bleu": {"score": 12.5}}, "data": {"name": "日本"}}
    path = write_metrics(f"{tmp_path}/new/", content)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_metrics(path, {"loss": math.inf})
    assert path == tmp_path / "new" / "metrics.json" and json.loads(path.read_text(encoding="utf-8")) == content
    assert write_metrics(path.parent, {"loss": 1.0}) == path
    assert json.loads(path.read_text(encoding="utf-8")) == {"loss": 1.0}
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.json"]
