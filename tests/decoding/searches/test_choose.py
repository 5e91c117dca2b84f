"""Tests of the choice of a search: arguments of transformers 4 keep their meaning, without code from the Hub."""

import warnings

import numpy as np
import pytest
import torch
from tiny_generator import SOURCES, tiny_generator

from metaphrase.decoding.searches.choose import DEFAULT_CONSTRAINED_BEAMS, choose_search
from metaphrase.inference import constrained_beam_search, contrastive_search, diverse_beam_search
from metaphrase.inference.batches import decode

DIVERSE = {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5}
CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 4}


@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        ({}, DIVERSE, diverse_beam_search),
        ({}, CONTRASTIVE, contrastive_search),
        ({}, {"force_words_ids": [[7]]}, constrained_beam_search),
        ({}, {"num_beams": 4, "num_beam_groups": 1}, None),
        ({}, {"num_beams": 4}, None),
        ({}, {"custom_generate": print, **CONTRASTIVE}, None),
        (DIVERSE, {}, diverse_beam_search),
        (DIVERSE, {"num_beams": 1}, None),
        (DIVERSE, CONTRASTIVE, contrastive_search),
        (CONTRASTIVE, {}, contrastive_search),
        (CONTRASTIVE, {"num_beams": 4}, None),
        (CONTRASTIVE, {"do_sample": True}, None),
        ({"force_words_ids": [[7]]}, {}, constrained_beam_search),
        ({"force_words_ids": [[7]]}, DIVERSE, diverse_beam_search),
    ],
)
def test_arguments_choose_and_else_the_models_own_settings(own, options, expected, generator):
    generator.model.generation_config.update(**own)
    assert choose_search(generator.model, options)[0] is expected


def test_what_a_search_needs_is_filled_in(generator):
    assert choose_search(generator.model, {"force_words_ids": [[7]]})[1]["num_beams"] == DEFAULT_CONSTRAINED_BEAMS
    generator.model.generation_config.num_beams = 3
    assert choose_search(generator.model, {"force_words_ids": [[7]]})[1]["num_beams"] == 3
    assert choose_search(generator.model, CONTRASTIVE)[1] == CONTRASTIVE | {"num_beams": 1, "do_sample": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "`num_beams` must be a whole number from 1 to 10000, got 0"),
        ({"do_sample": True, "top_p": 0.0}, "`top_p` must be a finite number above 0 and at most 1, got 0.0"),
        ({"do_sample": True, "typical_p": 1.5}, "`typical_p` must be a finite number above 0 and at most 1, got 1.5"),
        (
            {"do_sample": True, "epsilon_cutoff": 3.0},
            "`epsilon_cutoff` must be a finite number of at least 0 and below 1, got 3.0",
        ),
        (
            {"do_sample": True, "eta_cutoff": -0.1},
            "`eta_cutoff` must be a finite number of at least 0 and below 1, got -0.1",
        ),
        (DIVERSE | CONTRASTIVE, "choose one search, got `penalty_alpha` and `num_beam_groups`"),
        (DIVERSE | {"force_words_ids": [[7]]}, "choose one search, got `force_words_ids` and `num_beam_groups`"),
        ({"diversity_penalty": 0.5, "num_beams": 4}, "`num_beam_groups` must be above 1 .* got None and 0.5"),
        ({"penalty_alpha": 0.6}, "`top_k` must be set with `penalty_alpha`"),
        (CONTRASTIVE | {"num_beams": 4}, "`num_beams` must be 1 where `penalty_alpha` is given, got 4"),
        ({"constraints": ["a"]}, "`constraints` must be None"),
        ({"first_words_ids": [[7]]}, "`first_words_ids` must come with `force_words_ids`"),
        ({"num_beams": 4, "num_beam_groups": 3}, "`num_beams` must be a multiple of `num_beam_groups`, got 4 and 3"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message, generator):
    with pytest.raises(ValueError, match=message):
        generator.generate(SOURCES, **options)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_beams", 1_000_000, "a whole number from 1 to 10000"),
        ("max_new_tokens", 2**70, "a whole number from 0 to 1048576"),
        ("no_repeat_ngram_size", -1, "a whole number from 0 to 2147483647"),
        ("top_k", 2**70, "a whole number from 0 to 2147483647"),
        ("length_penalty", float("nan"), "a finite number from -10 to 10"),
        ("length_penalty", float("inf"), "a finite number from -10 to 10"),
        ("length_penalty", 1000.0, "a finite number from -10 to 10"),
        ("repetition_penalty", 1e-320, "a finite number from 0.001 to 1000"),
        ("repetition_penalty", float("inf"), "a finite number from 0.001 to 1000"),
        ("temperature", 1e-320, "a finite number from 1e-9 to 1e9"),
        ("temperature", np.float32("inf"), "a finite number from 1e-9 to 1e9"),
        ("diversity_penalty", float("inf"), "a finite number from 0 to 1e6"),
        ("min_p", float("nan"), "a finite number from 0 to 1"),
    ],
)
def test_numbers_that_overflow_scores_are_refused(name, value, rule, generator):
    groups = {"num_beams": 4, "num_beam_groups": 2} if name == "diversity_penalty" else {"num_beams": 3}
    with pytest.raises(ValueError, match=rf"^`{name}` must be {rule}, got {value}\.$"):
        generator.generate(SOURCES, **groups | {name: value})
    with pytest.raises(ValueError, match=rf"^`{name}` must be {rule}"):
        generator.num_targets(**{name: value})


def test_numbers_at_their_bounds_are_accepted(generator):
    for options in ({"length_penalty": 10}, {"repetition_penalty": np.float64(1000)}):
        assert any(generator.generate(SOURCES, num_beams=np.int64(3), **options))
    # The shortest hypotheses are the best.
    assert generator.generate(SOURCES, num_beams=3, length_penalty=-10) == [""] * len(SOURCES)
    assert any(generator.generate(SOURCES, temperature=1e-9))


@pytest.mark.parametrize("options", [DIVERSE, CONTRASTIVE, {"force_words_ids": [[7, 8]]}], ids=str)
def test_transformers_gives_no_warning(options, generator, sources, warned):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode(generator.model, sources, return_scores=True, **options)
    assert not warned and all(hypothesis.score < 0 for [hypothesis] in found)
    plain = decode(generator.model, sources, num_beams=options.get("num_beams", 1))
    assert [h.ids for [h] in plain] != [h.ids for [h] in found]


@pytest.mark.parametrize("kind", ["char", "byte_bpe", "unigram"])
def test_texts_contain_the_phrases_and_never_others(kind):
    generator = tiny_generator(kind=kind)
    options = {"max_new_tokens": 24, "num_beams": 6}
    phrases = ["Hund", ["die Katze", "eine Katze"]]
    texts = generator.generate([*SOURCES, ""], must_contain=phrases, **options)
    assert texts[-1] == ""
    for text in texts[:-1]:
        assert "Hund" in text and ("die Katze" in text or "eine Katze" in text), text
    free = generator.generate(SOURCES, **options)
    assert not all("Hund" in text for text in free)
    never = generator.generate(SOURCES, must_contain=phrases, never_contain=["laufen", "r"], **options)
    assert not any("r" in text for text in never) and all("Hund" in text for text in never)


def test_what_never_occurs_is_added_to_the_models_own(generator):
    generator.model.generation_config.bad_words_ids = [[9]]
    for options in ({}, {"num_beams": 3}, CONTRASTIVE):
        free = generator.generate(SOURCES, **options)
        letter = next(character for text in free for character in text if character.isalpha())
        texts = generator.generate(SOURCES, never_contain=[letter], **options)
        assert not any(letter in text for text in texts)
        ids = [h.ids for [h] in decode(generator.model, generator.tokenizers.encode_sources(SOURCES), **options)]
        assert all(9 not in row for row in ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"must_contain": "Hund"}, "`must_contain` must be a list of phrases, got 'Hund'"),
        ({"never_contain": "Hund"}, "`never_contain` must be a list of phrases, got 'Hund'"),
        ({"must_contain": ["Hund"], "never_contain": ["Hund"]}, "both forced and forbidden"),
        ({"must_contain": [7]}, "A phrase must be a text .* got 7"),
        ({"must_contain": [["Hund", None]]}, "A phrase must be a text .* got None"),
        ({"must_contain": ["zwei kleine Hunde"]}, "`max_new_tokens` must leave room .* got 18 tokens for 8 places"),
        ({"must_contain": ["a"], "force_words_ids": [[7]]}, "`force_words_ids` must be None where `must_contain`"),
        ({"must_contain": ["a"], "num_beams": 1}, "`num_beams` must be at least 2"),
    ],
)
def test_phrases_that_cannot_be_are_refused(options, message, generator):
    with pytest.raises(ValueError, match=message):
        generator.generate(SOURCES, **options)


@pytest.mark.parametrize("count", [0, -1])
def test_no_targets_at_all_are_refused(count, generator):
    with pytest.raises(ValueError, match=f"`num_return_sequences` must be a whole number from 1 to 10000, got {count}"):
        generator.generate_n_best(SOURCES, num_return_sequences=count)
    with pytest.raises(ValueError, match=f"`num_return_sequences` must be a whole number from 1 to 10000, got {count}"):
        generator.num_targets(num_return_sequences=count)


@pytest.mark.parametrize("options", [DIVERSE, CONTRASTIVE, {"force_words_ids": [[7]], "num_beams": 3}], ids=str)
def test_several_prompts_of_one_source_are_refused(options, generator):
    search, options = choose_search(generator.model, options)
    options |= {"decoder_input_ids": torch.tensor([[1, 5], [1, 6]]), "max_new_tokens": 4}
    with pytest.raises(ValueError, match="`decoder_input_ids` must have a row for each source"):
        generator.model.generate(torch.tensor(generator.encode(SOURCES[:1])), **options, custom_generate=search)
