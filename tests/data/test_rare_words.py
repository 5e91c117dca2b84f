"""Rare words: which words they may replace, and replacement on both sides."""

from random import Random

import pytest

from metaphrase.data.rare_words import RareWords

NOUNS, VERBS = ("cat", "dog", "bird"), {"saw": "see", "liked": "like"}
PAIRS = [
    (f"the {agent} {verb} the {theme} .", f"{lemma} ( {agent} , {theme} )")
    for agent in NOUNS
    for verb, lemma in VERBS.items()
    for theme in NOUNS
    if agent != theme
]
# Each is seen once: a noun before a verb, and a verb between nouns.
PAIRS += [("the shark saw the dog .", "see ( shark , dog )"), ("the cat blessed the bird .", "bless ( cat , bird )")]


def test_a_rare_word_may_stand_where_words_stand_that_are_seen_in_its_place_and_in_others():
    rare = RareWords.learn(PAIRS)
    assert rare.translations["blessed"] == "bless" and rare.translations["shark"] == "shark"
    new = {old: set(words) for old, words in rare.substitutes.items()}
    assert "blessed" in new["saw"] & new["liked"]
    assert "shark" in new["cat"]
    # No verb takes the place of a noun, and no frequent word that of a rare one.
    assert "shark" not in new["saw"] | new["liked"] and "blessed" not in new["cat"]
    assert not {"shark", "blessed", "the", "."} & set(new)


def test_a_pair_gets_a_word_and_its_translation_everywhere():
    rare = RareWords({"saw": "see", "blessed": "bless"}, {"saw": {"blessed": 1}})
    replaced = rare.replace("he saw that she saw", "see ( he , see ( she ) )", Random(0))
    assert replaced == ("he blessed that she blessed", "bless ( he , bless ( she ) )")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # No word that may be replaced; a translation that two words have; no translation in the target.
        ("he ran", "run ( he )"),
        ("he saw that she sees", "see ( he , see ( she ) )"),
        ("he saw", "look ( he )"),
    ],
)
def test_a_pair_without_a_safe_replacement_stays(source, target):
    rare = RareWords({"saw": "see", "sees": "see", "blessed": "bless"}, {"saw": {"blessed": 1}})
    assert rare.replace(source, target, Random(0)) == (source, target)
