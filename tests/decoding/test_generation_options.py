"""Tests of options of generation: their bounds, and phrases that targets contain or not."""

import numpy as np
import pytest
from tiny_generator import SOURCES, tiny_generator

from metaphrase.inference.batches import decode


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_beams", 1_000_000, "a whole number from 1 to 10000"),
        ("max_new_tokens", 2**70, "a whole number from 0 to 1048576"),
        ("top_k", 2**70, "a whole number from 0 to 2147483647"),
        ("length_penalty", float("nan"), "a number from -10 to 10"),
        ("repetition_penalty", 1e-320, "a number from 0.001 to 1000"),
        ("temperature", np.float32("inf"), "a number from 1e-09 to 1000000000"),
        ("min_p", float("nan"), "a number from 0 to 1"),
    ],
)
def test_numbers_that_overflow_scores_are_refused(name, value, rule, generator):
    with pytest.raises(ValueError, match=rf"^`{name}` must be {rule}, got "):
        generator.generate(SOURCES, **{"num_beams": 3, name: value})


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
        ({"must_contain": ["zwei kleine Hunde"]}, "`max_new_tokens` or `num_beams`"),
        ({"must_contain": ["a"], "force_words_ids": [[7]]}, "`must_contain` and `force_words_ids`"),
        ({"must_contain": ["a"], "num_beams": 1}, "`num_beams` must be at least 2"),
    ],
)
def test_phrases_that_cannot_be_are_refused(options, message, generator):
    with pytest.raises(ValueError, match=message):
        generator.generate(SOURCES, **options)
