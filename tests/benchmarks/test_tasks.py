"""Test of the generated pairs: their sizes, what training lacks, and pairs that are known."""

import random
import re

from benchmarks.tasks import semantic_parsing
from benchmarks.tasks.semantic_parsing import KINDS, VERBS, Sentence, forms

VERBS_OF_KINDS = [word for kind in KINDS.values() if not kind.role and kind.shown for word in kind.words]
LEMMAS = {
    (form, forms(entry)[0])
    for entry in [*(entry for row in VERBS.values() for entry in row.split()), *VERBS_OF_KINDS]
    for form in forms(entry)
}
ROLE = r"(agent|theme|recipient|ccomp|xcomp|nmod)"


def check_logical_forms(positional, nested):
    """Check that both formalisms say the same of the same sentences, and that variables stand for their words."""
    for (source, form), (other_source, nested_form) in zip(positional, nested, strict=True):
        assert source == other_source
        assert "x _" not in nested_form
        assert sorted(re.findall(rf" \. {ROLE} ", form)) == sorted(re.findall(rf"(?<![.=] ){ROLE} [.=]", nested_form))
        words = source.split()
        for word, position in re.findall(r"(\w+)(?: \. [\w. ]+)? \( x _ (\d+)", form):
            assert words[int(position)] == word or (words[int(position)], word) in LEMMAS


def test_both_formalisms_have_the_same_sentences_of_a_known_grammar():
    positional, nested = (semantic_parsing.make_splits(400, 20, nested=nested) for nested in (False, True))
    assert positional.keys() == nested.keys()
    for split, pairs in positional.items():
        assert len({source for source, _ in pairs}) == len(pairs)
        check_logical_forms(*[[pair for pair in pairs if "LAMBDA" not in pair[1]] for pairs in (pairs, nested[split])])
    held_out = {source for split, pairs in positional.items() if split != "train" for source, _ in pairs}
    assert not held_out & {source for source, _ in positional["train"]}


def test_logical_forms_of_known_sentences():
    frames = ("agent V to I",)
    sentence = Sentence(random.Random(1), frames=frames, clauses=1, modified="subject", relative="theme")
    assert sentence.pair() == (
        "Ava thought that the turtle that a neighbor trusted wanted to sing .",
        "* turtle ( x _ 4 ) ; think . agent ( x _ 1 , Ava ) AND think . ccomp ( x _ 1 , x _ 9 ) AND "
        "turtle . nmod ( x _ 4 , x _ 8 ) AND neighbor ( x _ 7 ) AND trust . agent ( x _ 8 , x _ 7 ) AND "
        "trust . theme ( x _ 8 , x _ 4 ) AND want . agent ( x _ 9 , x _ 4 ) AND want . xcomp ( x _ 9 , x _ 11 ) AND "
        "sing . agent ( x _ 11 , x _ 4 )",
    )
    assert sentence.pair(nested=True)[1] == (
        "think ( agent = Ava , ccomp = want ( agent = * turtle ( nmod = trust ( agent = neighbor , theme = * turtle ) ) , "
        "xcomp = sing ( agent = * turtle ) ) )"
    )
    passive = Sentence(random.Random(0), frames=("theme was P by agent",), modifiers=1, modified="agent")
    assert passive.pair(nested=True) == (
        "Olivia was rolled by the wizard on the yard .",
        "roll ( theme = Olivia , agent = * wizard ( nmod . on = * yard ) )",
    )
