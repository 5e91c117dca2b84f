import json
import math

import evaluate
import numpy as np
import pytest
import torch
from datasets import Dataset
from other_families import other_model
from sacrebleu.metrics import BLEU, CHRF, TER
from tiny_generator import PIECES, SOURCES, TARGETS, tiny_generator, tiny_pair
from transformers.modeling_outputs import Seq2SeqLMOutput

from metaphrase.conversion.vocabulary_map import VocabularyMap
from metaphrase.data.pairs import TASK_COLUMN
from metaphrase.evaluation import metrics
from metaphrase.evaluation.corpus_metric import CorpusMetric
from metaphrase.evaluation.evaluate import (
    TaskScores,
    ValidationSample,
    corpus_loss,
    evaluate_generator,
    generation_settings,
)
from metaphrase.evaluation.metrics import METRICS, compute_metrics, write_metrics

PREDICTIONS = ["The cat sat on the mat.", "Ein Haus, groß und alt", "one two three four five", ""]
REFERENCES = ["The cat sat on a mat.", "ein Haus, alt und groß!", "one two three four six five", "not empty"]
SECOND_REFERENCES = ["A cat sat on the mat.", "Ein altes Haus", "one two four five", "nothing here"]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Extract statistics from two lines at a time."""
    monkeypatch.setattr(metrics, "_LINES", 2)


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


@pytest.mark.parametrize(("options", "matches"), [({}, 1), ({"ignore_case": True}, 2)])
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


@pytest.fixture
def generator():
    return tiny_generator(joint=False)


def loss_one_by_one(model, sources, targets):
    total = 0.0
    for source, target in zip(sources, targets, strict=True):
        start = [model.config.decoder_start_token_id, *target[:-1]]
        with torch.inference_mode():
            inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([start])}
            # With a cache, FSMT has no causal mask.
            logits = model(**inputs, use_cache=False).logits[0]
        total -= sum(logits.log_softmax(-1)[place, token].item() for place, token in enumerate(target))
    return total / sum(map(len, targets))


def test_validation_sample_has_a_pair_of_each_task_and_none_twice():
    texts = [f"a{number}" for number in range(6)]
    pairs = Dataset.from_dict({"source": texts, "target": texts, TASK_COLUMN: list("xxxyyz")})
    sample = ValidationSample(pairs, 2, True, tiny_pair(), TaskScores(["exact_match"]))
    assert (sample.rows, sample.tasks) == ([0, 3, 5], ["x", "y", "z"])


@pytest.mark.parametrize("limits", [{"batch_size": 2}, {"max_tokens_per_batch": 50}])
def test_loss_is_that_of_every_pair_by_itself(generator, limits):
    sources, targets = generator.tokenizers.encode_sources(SOURCES), generator.tokenizers.encode_targets(TARGETS)
    result = corpus_loss(generator.model, sources, targets, **limits)
    assert result["loss"] == pytest.approx(loss_one_by_one(generator.model, sources, targets), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["num_target_tokens"] == sum(len(target) + 1 for target in TARGETS)


@pytest.mark.parametrize(
    ("loss", "named"), [(math.nan, ["loss", "perplexity"]), (math.inf, ["loss", "perplexity"]), (1e3, ["perplexity"])]
)
def test_a_value_that_is_not_finite_is_none(loss, named, generator, monkeypatch, caplog):
    monkeypatch.setattr(generator.model, "forward", lambda **_: Seq2SeqLMOutput(loss=torch.tensor(loss)))
    result = corpus_loss(generator.model, [[5, 1]], [[6, 1]])
    assert [name for name in result if result[name] is None] == named and result["num_target_tokens"] == 2
    assert [record.args[0] for record in caplog.records] == named


@pytest.mark.parametrize("family", ["fsmt", "t5"])
def test_loss_of_other_families_is_that_of_the_targets_as_decoding_reads_them(family):
    """Sources and targets differ in length, so that one cannot be taken for the other."""
    model, pair = other_model(family), tiny_pair()
    sources, targets = pair.encode_sources(SOURCES), pair.encode_targets(TARGETS)
    expected = loss_one_by_one(model, sources, targets)
    assert corpus_loss(model, sources, targets)["loss"] == pytest.approx(expected, rel=1e-5)


def test_result_of_a_test_set(generator):
    generator.model.generation_config.length_penalty = 0.5
    generator.generate(SOURCES, eos_token_id=-1)
    options = {"metrics": ["bleu", "chrf"], "metric_options": {"bleu": {"tokenize": "char"}}}
    options |= {"generation_options": {"num_beams": 2, "eos_token_id": -1}}
    result, predictions = evaluate_generator(generator, [*SOURCES, ""], [*TARGETS, "nichts"], **options)
    assert predictions == [*generator.generate(SOURCES, num_beams=2, eos_token_id=-1), ""]
    references = [[*TARGETS, "nichts"]]
    assert result["scores"]["bleu"]["score"] == BLEU(tokenize="char").corpus_score(predictions, references).score
    assert "tok:char" in result["scores"]["bleu"]["signature"]
    assert result["scores"]["chrf"]["score"] == CHRF().corpus_score(predictions, references).score > 0
    # Earlier unfinished targets of the generator are not counted here.
    assert result["num_examples"] == 6 and result["num_unfinished"] == 5
    used = {"num_beams": 2, "length_penalty": 0.5, "max_new_tokens": 8, "eos_token_id": -1}
    assert used.items() <= result["generation"].items()
    assert result["num_target_tokens"] == sum(len(target) + 1 for target in [*TARGETS, "nichts"])


def test_references_among_several_candidates(generator):
    options = {"num_beams": 3, "num_return_sequences": 3}
    rows = [[scored.text for scored in row] for row in generator.generate_n_best(SOURCES, **options)]
    targets = [rows[0][0], rows[1][2].upper(), rows[2][1], *TARGETS[3:]]
    fields = {"metrics": ["exact_match"], "metric_options": {"exact_match": {"ignore_case": True}}}
    result, predictions = evaluate_generator(generator, SOURCES, targets, generation_options=options, **fields)
    assert predictions == [row[0] for row in rows]
    first, any_of = result["scores"]["exact_match"], result["scores"]["exact_match@3"]
    assert (first["matches"], any_of["matches"], any_of["score"]) == (1, 3, 60.0)
    assert any_of["signature"] == "nrefs:1|candidates:3|case:ci|punct:yes" and "confidence_interval" in any_of


def test_loss_sees_the_prefix_that_decoding_sees():
    plain, prefixed = tiny_generator(), tiny_generator(source_prefix="the ")
    result, _ = evaluate_generator(prefixed, SOURCES, TARGETS, metrics=["bleu"])
    expected, _ = evaluate_generator(plain, ["the " + source for source in SOURCES], TARGETS, metrics=["bleu"])
    assert result == expected
    assert result["loss"] != evaluate_generator(plain, SOURCES, TARGETS, metrics=["bleu"])[0]["loss"]


def test_loss_is_of_the_pieces_that_a_model_learned_and_scores_are_of_whole_words():
    generator = tiny_generator(kind="pretokenized")
    # Encoded again, words that were joined would be unknown, and fewer.
    labels = generator.tokenizers.encode_targets(PIECES)
    expected = loss_one_by_one(generator.model, generator.tokenizers.encode_sources(SOURCES), labels)
    result, predictions = evaluate_generator(generator, SOURCES, PIECES, metrics=["chrf"])
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["num_target_tokens"] == sum(map(len, labels))
    assert result["scores"]["chrf"]["score"] == CHRF().corpus_score(predictions, [TARGETS]).score
    other, _ = evaluate_generator(generator, SOURCES, PIECES, references=SOURCES, metrics=["chrf"])
    assert other["loss"] == result["loss"]
    assert other["scores"]["chrf"]["score"] == CHRF().corpus_score(predictions, [SOURCES]).score


def test_settings_are_the_models_own_under_those_given(generator):
    generator.model.generation_config.num_beams = 4
    assert {"num_beams": 4, "max_new_tokens": 8}.items() <= generation_settings(generator, {}).items()
    assert generation_settings(generator, {"num_beams": 1})["num_beams"] == 1
    assert "use_vmap" not in generation_settings(generator, {})
    generator.vocabulary_map = VocabularyMap([], {})
    assert generation_settings(generator, {})["use_vmap"] is True


def test_sides_must_be_equally_many_and_not_empty(generator):
    for sources, targets, references in ((SOURCES, TARGETS[1:], None), ([], [], None), (SOURCES, TARGETS, ["one"])):
        with pytest.raises(ValueError, match="equally many and not empty, got "):
            evaluate_generator(generator, sources, targets, references=references, metrics=["bleu"])


def test_an_unknown_score_is_refused_before_decoding(generator, monkeypatch):
    monkeypatch.setattr(generator, "generate_n_best", None)
    with pytest.raises(ValueError, match="got 'blue'"):
        evaluate_generator(generator, SOURCES, TARGETS, metrics=["blue"])


def test_error_rates_of_references_without_a_word():
    assert score("wer", ["", "a"], ["", " "])["score"] == 100 and score("cer", [""], [""])["score"] == 0
