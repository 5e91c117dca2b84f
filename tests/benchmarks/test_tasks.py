"""Test of the generated pairs: their sizes, what training lacks, and pairs that are known."""

import random
import re

import pytest

from benchmarks.tasks import semantic_parsing, slog
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


def check_no_split_has_sources_of_training(splits):
    train = {source for source, _ in splits["train"]}
    assert not train & {source for split, pairs in splits.items() if split != "train" for source, _ in pairs}


@pytest.mark.parametrize(("task", "kinds", "in_test"), [(semantic_parsing, 24, 21), (slog, 17, 17)])
def test_both_formalisms_have_the_same_sentences(task, kinds, in_test):
    positional, nested = (task.make_splits(400, 20, nested=nested) for nested in (False, True))
    assert positional.keys() == nested.keys()
    assert sum(split.startswith("systematic/") for split in positional) == kinds
    assert len(positional["test_systematic"]) == 20 * in_test
    for split, pairs in positional.items():
        assert len({source for source, _ in pairs}) == len(pairs)
        check_logical_forms(*[[pair for pair in pairs if "LAMBDA" not in pair[1]] for pairs in (pairs, nested[split])])
    check_no_split_has_sources_of_training(positional)


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


def test_depths_and_questions_of_slog():
    splits = slog.make_splits(3000, 20)
    for fact, kind in (("nmod . ", "modifiers"), ("ccomp", "clauses"), ("nmod (", "embedding")):
        depths = {split: {target.count(f" . {fact}") for _, target in pairs} for split, pairs in splits.items()}
        assert depths["train"] == {0, 1, 2, 4}
        assert depths[f"systematic/{kind}_of_depth_3"] == {3}
        assert depths[f"systematic/deeper_{kind}"] <= set(range(5, 13))
    questions = [pair for pair in splits["train"] if pair[0].endswith("?")]
    assert questions and all(re.search(r"\. (agent|theme) \( x _ \d+ , \? \)", target) for _, target in questions)
    question = Sentence(random.Random(3), frames=("agent V theme",), clauses=1, question="theme")
    assert question.pair(nested=True) == (
        "Who did Zoe prove that Helen burst ?",
        "prove ( agent = Zoe , ccomp = burst ( agent = Helen , theme = ? ) )",
    )
    stranded = Sentence(random.Random(4), frames=("agent V theme",), relative="recipient")
    assert stranded.pair(nested=True) == (
        "The crow helped a baker that the eagle gave a melon to .",
        "help ( agent = * crow , theme = baker ( nmod = give ( agent = * eagle , theme = melon , recipient = baker ) ) )",
    )
