"""Test of the generated pairs: their sizes, what training lacks, and pairs that are known."""

import random
import re
from itertools import chain

import pytest

from benchmarks.tasks import GENERATED, semantic_parsing, slog
from benchmarks.tasks.paradigms import HELD_OUT, decline
from benchmarks.tasks.semantic_parsing import KINDS, VERBS, Sentence, forms
from benchmarks.tasks.transliteration import sounds

ENTRIES = [*" ".join(VERBS.values()).split(), *chain(*(kind.words for kind in KINDS.values() if not kind.role))]
LEMMAS = {(form, forms(entry)[0]) for entry in ENTRIES for form in forms(entry)}
ROLE = r"(agent|theme|recipient|ccomp|xcomp|nmod)"


def check_disjoint(splits):
    train = {(source, *features) for source, _, *features in splits["train"]}
    others = chain(*(pairs for split, pairs in splits.items() if split != "train"))
    assert not train & {(source, *features) for source, _, *features in others}


@pytest.mark.parametrize(("task", "kinds", "in_test"), [(semantic_parsing, 24, 21), (slog, 17, 17)])
def test_both_formalisms_say_the_same_of_the_same_sentences(task, kinds, in_test):
    positional, nested = (task.make_splits(400, 20, nested=nested) for nested in (False, True))
    check_disjoint(positional)
    assert positional.keys() == nested.keys() and len(positional) == kinds + 4
    assert len(positional["test_systematic"]) == 20 * in_test
    pairs, others = ([*chain(*splits.values())] for splits in (positional, nested))
    for (source, form), (other_source, other) in zip(pairs, others, strict=True):
        assert source == other_source
        if "LAMBDA" not in form:
            assert "x _" not in other
            assert sorted(re.findall(rf" \. {ROLE} ", form)) == sorted(re.findall(rf"[(,] {ROLE} [.=]", other))
            for word, position in re.findall(r"(\w+)(?: \. [\w. ]+)? \( x _ (\d+)", form):
                there = source.split()[int(position)]
                assert there == word or (there, word) in LEMMAS


def test_forms_of_known_sentences():
    infinitive = {"frames": ("agent V to I",), "clauses": 1, "modified": "subject", "relative": "theme"}
    question = {"frames": ("agent V theme",), "clauses": 1, "question": "theme"}
    sentences = [Sentence(random.Random(1), **fields) for fields in (infinitive, question)]
    assert [sentence.pair(nested=True) for sentence in sentences] == [
        (
            "Ava thought that the turtle that a neighbor trusted wanted to sing .",
            "think ( agent = Ava , ccomp = want ( agent = * turtle ( nmod = trust ( agent = neighbor , theme = * turtle ) ) , "
            "xcomp = sing ( agent = * turtle ) ) )",
        ),
        (
            "Who did a brother prove that the spider rolled ?",
            "prove ( agent = brother , ccomp = roll ( agent = * spider , theme = ? ) )",
        ),
    ]
    assert sentences[1].pair()[1] == (
        "* spider ( x _ 7 ) ; brother ( x _ 3 ) AND prove . agent ( x _ 4 , x _ 3 ) AND prove . ccomp ( x _ 4 , x _ 8 ) AND "
        "roll . agent ( x _ 8 , x _ 7 ) AND roll . theme ( x _ 8 , ? )"
    )


def test_depths_of_slog():
    splits = slog.make_splits(3000, 20)
    for fact, kind in (("nmod . ", "modifiers"), ("ccomp", "clauses"), ("nmod (", "embedding")):
        depths = {split: {target.count(f" . {fact}") for _, target in pairs} for split, pairs in splits.items()}
        assert depths["train"] == {0, 1, 2, 4}
        assert depths[f"systematic/{kind}_of_depth_3"] == {3}
        assert depths[f"systematic/deeper_{kind}"] <= set(range(5, 13))


def test_commands_have_what_scan_has():
    longest, primitive = GENERATED["commands_length"](), GENERATED["commands_primitive"]()
    for splits, size in ((longest, 3920), (primitive, 7706)):
        check_disjoint(splits)
        assert len(splits["test_systematic"]) == size
    train, asked = ([target.count("I_") for _, target in longest[name]] for name in ("train", "test_systematic"))
    assert (max(train), min(asked), max(asked)) == (22, 24, 48)
    with_jump = [pair for pair in primitive["train"] if "jump" in pair[0]]
    assert set(with_jump) == {("jump", "I_JUMP")} and round(len(primitive["train"]) / len(with_jump)) == 10


def test_inflection_and_transliteration():
    tasks = ("inflection_agglutinative", "inflection_copies", "inflection_features", "transliteration")
    pairs = {name: GENERATED[name]() for name in tasks}
    for name, splits in pairs.items():
        check_disjoint(splits)
        sizes = [len(splits[split]) for split in ("train", "validation", "test")]
        assert sizes == [8000 if name == "transliteration" else 7000, 500, 1000]
    copies = pairs["inflection_copies"]
    train, test = ([lemma for lemma, *_ in copies[split]] for split in ("train", "test"))
    assert sum(lemma not in set(train) for lemma in test) == 500
    splits = pairs["inflection_features"]
    shown, asked = ([{*features.split(";")} for *_, features in splits[name]] for name in ("train", "test_systematic"))
    for features in HELD_OUT:
        assert any(features <= cell for cell in asked) and not any(features <= cell for cell in shown)
    assert [decline(noun, "SG", "", "ACC") for noun in ("torum", "kitap", "gözü")] == ["tormu", "kitabı", "gözüvü"]
    assert decline("kitap", "PL", "PSS2P", "INS") == "kitapmarıştayıp"
    assert [sounds(name) for name in ("cheguille", "zytha", "zythos")] == ["чегийе", "зыта", "дзифос"]
