"""Forms of texts, and counts of hashes that occurred before."""

import random
from collections import Counter

import pytest

from metaphrase.filtering.rules import SeenHashes, hash_text, normal_form, normalize, script_of, split_words


@pytest.mark.parametrize(
    ("first", "second", "is_near"),
    [
        ("Come on!", "come  on.", True),
        ("Room 12 is free.", "Room 47 is free", True),
        ("Straße", "STRASSE", True),
        ("He is here.", "She is here.", False),
        # Vowel signs are no punctuation.
        ("की", "का", False),
    ],
)
def test_near_duplicates_have_one_normal_form(first, second, is_near):
    assert (normal_form(first) == normal_form(second)) is is_near


def test_scripts_of_letters():
    scripts = {"a": "LATIN", "ж": "CYRILLIC", "中": "CJK", "ひ": "CJK", "カ": "CJK", "한": "HANGUL", "1": "", ".": ""}
    assert {letter: script_of(letter) for letter in scripts} == scripts


def test_words_have_one_case_and_languages_without_spaces_have_letters():
    assert split_words("Tom's cat, 12!") == ["tom", "'", "s", "cat", ",", "12", "!"]
    assert split_words("猫が好き") == ["猫", "が", "好", "き"]
    # Marks belong to their words.
    assert split_words("हिन्दी में cafe\u0301 abc猫") == ["हिन्दी", "में", "cafe\u0301", "abc", "猫"]


def test_normalized_texts():
    pytest.importorskip("ftfy")
    assert normalize("  a \t b\u00a0c ") == "a b c"
    assert normalize("baterÃ\xada, “so”, e\u0301, x\u200by") == 'batería, "so", é, xy'


def test_counts_do_not_depend_on_how_hashes_are_grouped():
    generator = random.Random(0)
    texts = [str(generator.randrange(60)) for _ in range(500)]
    hashes, before, expected = [hash_text(text) for text in texts], Counter(), []
    for text in texts:
        expected.append(before[text])
        before[text] += 1
    for size in (1, 7, 100, 500):
        seen, counts = SeenHashes(), []
        for start in range(0, len(hashes), size):
            counts += seen.counts(hashes[start : start + size]).tolist()
            seen.add(hashes[start : start + size])
        assert counts == expected
    assert SeenHashes(b"".join(hashes)).counts(hashes[:1]).tolist() == [before[texts[0]]]
