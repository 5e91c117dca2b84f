"""Tests of minimum Bayes risk decoding: utilities are sacreBLEU's, and the best is that of a plain count."""

import math

import numpy as np
import pytest
import sacrebleu
import torch
from tiny_generator import SOURCES, tiny_generator
from transformers import GenerationConfig

from metaphrase.inference import ScoredText


@pytest.fixture
def drawn(monkeypatch, generator):
    seen = []
    whole = generator.generate_n_best

    def spy(texts, return_scores, show_progress, **options):
        seen.append((whole(texts, return_scores=return_scores, show_progress=show_progress, **options), options))
        return seen[-1][0]

    monkeypatch.setattr(generator, "generate_n_best", spy)
    return seen


def assert_best(chosen, candidates_of_sources, references_of_sources, weigh=lambda reference: 1, utility="chrf"):
    sentence = getattr(sacrebleu, f"sentence_{utility}")
    for best, candidates, references in zip(chosen, candidates_of_sources, references_of_sources, strict=True):
        weights = [weigh(reference) for reference in references]
        plain = {
            c.text: np.average([sentence(c.text, [r.text]).score for r in references], weights=weights)
            for c in candidates
        }
        assert best.score == pytest.approx(max(plain.values())) == pytest.approx(plain[best.text])


@pytest.mark.parametrize("utility", ["chrf", "bleu"])
def test_the_chosen_sample_is_the_one_that_is_most_like_the_others(generator, drawn, utility):
    torch.manual_seed(0)
    chosen = generator.generate_mbr([*SOURCES, ""], num_candidates=12, utility=utility, temperature=0.3)
    [(samples, options)] = drawn
    assert options["do_sample"] and options["top_k"] == 0 and options["num_return_sequences"] == 12
    assert_best(chosen[:-1], samples[:-1], samples[:-1], utility=utility)
    # Some were drawn more than once, and the first is not always the best.
    assert any(len({c.text for c in candidates}) < 12 for candidates in samples[:-1])
    assert [s.text for s in chosen] != [candidates[0].text for candidates in samples]
    assert chosen[-1] == ScoredText("", 0.0)


def test_references_of_their_own_and_beams(generator, drawn):
    torch.manual_seed(0)
    chosen = generator.generate_mbr(SOURCES, num_candidates=3, num_references=7)
    (candidates, _), (references, _) = drawn
    assert {(len(row), len(others)) for row, others in zip(candidates, references, strict=True)} == {(3, 7)}
    assert_best(chosen, candidates, references)
    options = {"num_beams": 4, "length_penalty": 0.0}
    chosen = generator.generate_mbr(SOURCES, num_candidates=4, **options)
    beams, beam_options = drawn[2]
    assert beam_options == options | {"num_return_sequences": 4, "do_sample": False}
    # A beam weighs its hypotheses by their scores.
    assert_best(chosen, beams, beams, lambda reference: math.exp(reference.score))


def test_epsilon_sampling_leaves_out_what_is_improbable(generator):
    """With a bound that only the most probable token meets, all samples are the greedy text."""
    chosen = generator.generate_mbr(SOURCES, num_candidates=5, epsilon_cutoff=0.999)
    assert [scored.text for scored in chosen] == generator.generate(SOURCES)
    assert all(scored.score == pytest.approx(100.0) for scored in chosen)


def test_samples_are_of_the_whole_distribution_whatever_the_models_own_settings():
    generator, results = tiny_generator(), []
    own = {"epsilon_cutoff": 0.999, "min_p": 0.9, "typical_p": 0.1, "repetition_penalty": 5.0}
    for settings in ({}, own | {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "num_beams": 4}):
        generator.model.generation_config.update(**settings)
        torch.manual_seed(0)
        results.append(generator.generate_mbr(SOURCES, num_candidates=6))
    assert results[0] == results[1]
    assert any(chosen.score < 99 for chosen in results[0])


def test_a_beam_is_searched_where_the_model_would_sample():
    generator = tiny_generator()
    beam = {"num_candidates": 3, "num_beams": 3}
    expected = generator.generate_mbr(SOURCES, **beam)
    generator.model.generation_config.update(do_sample=True, temperature=9.0, top_k=0)
    assert generator.generate_mbr(SOURCES, **beam) == expected
    config = GenerationConfig(num_beams=3)
    assert generator.generate_mbr(SOURCES, num_candidates=3, generation_config=config) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_candidates": 0}, "`num_return_sequences`"),
        ({"utility": "ter"}, "`utility` must be a judge or one of chrf, bleu, got 'ter'"),
        ({"num_beams": 4, "num_candidates": 5}, "`num_return_sequences`"),
        ({"num_return_sequences": 3}, "`num_candidates` sets `num_return_sequences`, got 3"),
    ],
)
def test_what_cannot_be_is_refused(generator, options, message):
    with pytest.raises(ValueError, match=message):
        generator.generate_mbr(SOURCES, **options)
