"""Tests of options of generation: their bounds, and phrases that targets contain or not."""

import pytest
from tiny_generator import SOURCES, tiny_generator

from metaphrase.decoding.searches.constrained_beam_search import DEFAULT_NUM_BEAMS, add_beams
from metaphrase.inference.batches import decode


def test_required_phrases_bring_beams(generator):
    for own, options, expected in ((1, {}, DEFAULT_NUM_BEAMS), (3, {}, 3), (3, {"num_beams": 4}, 4)):
        generator.model.generation_config.num_beams = own
        assert add_beams(generator.model, options) == {"do_sample": False, "num_beams": expected}


@pytest.mark.parametrize(
    ("name", "value"), [("length_penalty", float("nan")), ("temperature", 1e-320), ("top_k", 2**70)]
)
def test_numbers_that_overflow_scores_are_refused(name, value, generator):
    with pytest.raises(ValueError, match=f"`{name}`"):
        generator.generate(SOURCES, num_beams=3, **{name: value})


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
    # Pieces of a unigram model may hold the letter inside.
    assert kind == "unigram" or not any("r" in text for text in never)
    assert all("Hund" in text for text in never)


def test_what_never_occurs_is_added_to_the_models_own(generator):
    generator.model.generation_config.bad_words_ids = [[9]]
    for options in ({}, {"num_beams": 3}):
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
        ({"must_contain": ["Hund"], "never_contain": ["Hund"]}, "rule them out"),
        ({"must_contain": [7]}, "A phrase must be a text .* got 7"),
        ({"must_contain": [["Hund", None]]}, "A phrase must be a text .* got None"),
        ({"must_contain": ["zwei kleine Hunde"]}, "`max_new_tokens` or `num_beams`"),
        ({"must_contain": ["a"], "force_words_ids": [[7]]}, "`must_contain` and `force_words_ids`"),
        ({"must_contain": ["a"], "num_beams": 1}, "`num_beams` must be at least 2"),
    ],
)
def test_phrases_that_cannot_be_are_refused(options, message, generator):
    with pytest.raises(ValueError, match=message):
        generator.generate(SOURCES, **options)
