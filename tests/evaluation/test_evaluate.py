import math

import pytest
import torch
from datasets import Dataset
from other_families import other_model
from sacrebleu.metrics import BLEU, CHRF
from tiny_generator import PIECES, SOURCES, TARGETS, tiny_generator, tiny_pair
from transformers.modeling_outputs import Seq2SeqLMOutput

from metaphrase.data.pairs import TASK_COLUMN
from metaphrase.evaluation.evaluate import (
    TaskScores,
    ValidationSample,
    corpus_loss,
    evaluate_generator,
    generation_settings,
)
from metaphrase.tokenization.vocabulary_map import VocabularyMap


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
    result, predictions = evaluate_generator(
        generator,
        [*SOURCES, ""],
        [*TARGETS, "nichts"],
        metrics=["bleu", "chrf"],
        metric_options={"bleu": {"tokenize": "char"}},
        generation_options={"num_beams": 2, "eos_token_id": -1},
    )
    assert predictions == [*generator.generate(SOURCES, num_beams=2, eos_token_id=-1), ""]
    references = [[*TARGETS, "nichts"]]
    assert result["scores"]["bleu"]["score"] == BLEU(tokenize="char").corpus_score(predictions, references).score
    assert "tok:char" in result["scores"]["bleu"]["signature"]
    assert result["scores"]["chrf"]["score"] == CHRF().corpus_score(predictions, references).score > 0
    # What the generator left unfinished before is not counted here.
    assert result["num_examples"] == 6 and result["num_unfinished"] == 5
    used = {"num_beams": 2, "length_penalty": 0.5, "max_new_tokens": 8, "eos_token_id": -1}
    assert used.items() <= result["generation"].items()
    assert result["num_target_tokens"] == sum(len(target) + 1 for target in [*TARGETS, "nichts"])


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


def test_references_that_cannot_be_scored_are_refused_before_decoding(generator, monkeypatch):
    monkeypatch.setattr(generator, "generate", None)
    with pytest.raises(ValueError, match="`metrics` must not hold wer if no reference has a word, got 2 empty refer"):
        evaluate_generator(generator, ["a b", "c"], ["", " "], metrics=["bleu", "wer"])
