from random import Random

import pytest

from metaphrase.augmentation.augmentation import RareWords

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


def test_a_rare_word_replaces_words_that_are_seen_in_all_its_contexts():
    rare = RareWords.learn(PAIRS)
    assert rare.translations["blessed"] == "bless" and rare.translations["shark"] == "shark"
    new = {old: set(words) for old, words in rare.substitutes.items()}
    assert "blessed" in new["saw"] & new["liked"]
    assert "shark" in new["cat"]
    # No verb takes the place of a noun, and no frequent word that of a rare one.
    assert "shark" not in new["saw"] | new["liked"] and "blessed" not in new["cat"]
    assert not {"shark", "blessed", "the", "."} & set(new)


def test_a_translation_is_the_word_that_goes_with_a_word_the_most():
    # `(` stands in all targets. Of two words that always stand together, the one of equal spelling is the translation,
    # and `map` translates `map`, not `old`.
    pairs = [("red cat", "( cat red )"), ("red dog", "( dog red )"), ("old map", "( map ancient )"), ("a b", "( x y )")]
    translations = RareWords.learn(pairs).translations
    assert translations["red"] == "red" and translations["cat"] == "cat" and translations["map"] == "map"
    assert translations["old"] == "ancient"
    assert not {"a", "b"} & set(translations)
    # No target word stands in nearly all targets of a word.
    assert RareWords.learn([("so a", "X"), ("so b", "Y"), ("so c", "X")]).translations.get("so") is None


def test_rarer_words_are_drawn_more_often():
    rare = RareWords({"saw": "see", "met": "meet", "blessed": "bless"}, {"saw": {"met": 99, "blessed": 1}})
    draws = [rare.draw("he saw", "see ( he )", Random(seed)) for seed in range(500)]
    assert set(draws) == {(("saw", "met"), ("see", "meet")), (("saw", "blessed"), ("see", "bless"))}
    assert draws.count((("saw", "met"), ("see", "meet"))) < 25


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # No word that may be replaced; two words with one translation; no translation in the target.
        ("he ran", "run ( he )"),
        ("he saw that she sees", "see ( he , see ( she ) )"),
        ("he saw", "look ( he )"),
    ],
)
def test_a_pair_without_a_safe_replacement_has_none(source, target):
    rare = RareWords({"saw": "see", "sees": "see", "blessed": "bless"}, {"saw": {"blessed": 1}})
    assert rare.draw(source, target, Random(0)) is None
