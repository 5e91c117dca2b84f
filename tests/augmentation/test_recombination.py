import os
import random
import re
import subprocess
import sys

import pytest

from benchmarks.tasks import semantic_parsing
from benchmarks.tasks.commands import make_commands
from metaphrase.augmentation.recombination import PairReader, Recombination

NOUNS, PLACES = "cat dog bird frog cow duck".split(), "box car tree house".split()  # noqa: SIM905
NAMES, VERBS, SAYING = ("Emma", "Liam", "Noah"), ("saw", "found", "liked"), ("said", "hoped")
LEMMAS = dict(zip((*VERBS, *SAYING), ("see", "find", "like", "say", "hope"), strict=True))


def make_sentence(draw, depth, places):
    """Return the words of a sentence with clauses around it, and with places behind the object."""
    words = []
    for _ in range(depth):
        words += [draw.choice(NAMES), draw.choice(SAYING), "that"]
    words += [draw.choice(NAMES), draw.choice(VERBS), draw.choice(["a", "the"]), draw.choice(NOUNS)]
    for _ in range(places):
        words += [draw.choice(["in", "on"]), draw.choice(["a", "the"]), draw.choice(PLACES)]
    return words


def nested(words):
    """Return the nested meaning of a sentence of any depth."""
    if words[2] == "that":
        return f"{LEMMAS[words[1]]} ( agent = {words[0]} , ccomp = {nested(words[3:])} )"

    def noun(start):
        mark = "* " if words[start] == "the" else ""
        inner = f" ( nmod . {words[start + 2]} = {noun(start + 3)} )" if start + 2 < len(words) else ""
        return mark + words[start + 1] + inner

    return f"{LEMMAS[words[1]]} ( agent = {words[0]} , theme = {noun(2)} )"


def numbered(words):
    """Return the meaning as statements about the places of words."""
    start, facts = 0, []
    while words[start + 2] == "that":
        verb = start + 1
        facts += [f"{LEMMAS[words[verb]]} . agent ( x _ {verb} , {words[start]} )"]
        facts += [f"{LEMMAS[words[verb]]} . ccomp ( x _ {verb} , x _ {verb + 3} )"]
        start += 3
    verb = start + 1
    facts += [f"{LEMMAS[words[verb]]} . agent ( x _ {verb} , {words[start]} )"]
    facts += [f"{LEMMAS[words[verb]]} . theme ( x _ {verb} , x _ {verb + 2} )"]
    definite = []
    for noun in range(verb + 2, len(words), 3):
        if words[noun - 1] == "the":
            definite.append(f"* {words[noun]} ( x _ {noun} ) ;")
        else:
            facts.append(f"{words[noun]} ( x _ {noun} )")
        if noun + 3 < len(words):
            facts.append(f"{words[noun]} . nmod . {words[noun + 1]} ( x _ {noun} , x _ {noun + 3} )")
    return " ".join([*definite, " AND ".join(facts)])


def write(words, meaning):
    text = " ".join(words)
    return text[0].upper() + text[1:] + " .", meaning(words)


def make_pairs(meaning, number=1200):
    draw = random.Random(1)
    return [write(make_sentence(draw, draw.randint(0, 2), draw.randint(0, 2)), meaning) for _ in range(number)]


def draw_all(recombination, pairs, seed=3):
    draw = random.Random(seed)
    return [made for pair in pairs if (made := recombination.draw(*pair, draw)) is not None]


@pytest.mark.parametrize("meaning", [nested, numbered])
def test_recombined_pairs_are_right_and_deeper_than_those_of_training(meaning):
    pairs = make_pairs(meaning)
    made = draw_all(Recombination(pairs), pairs)
    assert len(made) > len(pairs) / 3
    for source, target in made:
        assert meaning(source[:-2].split()) == target
    # Two clauses and two places are the most of training.
    assert max(source.count("that") for source, _ in made) > 4
    assert max(source.count(" in ") + source.count(" on ") for source, _ in made) > 4


def test_words_get_no_second_object_of_a_kind():
    pairs = semantic_parsing.make_splits(num_train=4000, num_of_kind=2)["train"]
    made = draw_all(Recombination(pairs), pairs[:1000])
    assert len(made) > 500
    for source, target in made:
        roles = re.findall(r"\w+ \. \w+ \( x _ \d+", target)
        assert len(roles) == len({*roles}), target
        # *by* never comes without *was* in training.
        assert source.split().count("by") <= source.split().count("was")


def test_an_addition_reaches_places_where_training_never_shows_it():
    draw = random.Random(1)

    pairs = []
    for _ in range(1500):
        words, giver = make_sentence(draw, draw.randint(0, 2), draw.randint(0, 1)), draw.choice(NAMES)
        source, target = write(words, nested)
        if draw.random() < 0.5:
            source = source.replace(" .", f" with {giver} .")
            target = f"with ( {target} , {giver} )"
        pairs.append((source, target))
    for verb in VERBS:
        for noun, other in zip(NOUNS, reversed(NOUNS), strict=True):
            pairs.append((f"A {noun} {verb} a {other} .", f"{LEMMAS[verb]} ( agent = {noun} , theme = {other} )"))
    subjects = [pair for pair in pairs if pair[0].startswith("A ")]
    changed = [pair for pair in draw_all(Recombination(pairs), subjects * 5) if pair[0].split()[2] in ("in", "on")]
    assert changed
    for source, target in changed:
        _, noun, where, article, place, *_ = source.split()
        mark = "* " if article == "the" else ""
        assert f"agent = {noun} ( nmod . {where} = {mark}{place} " in target


def test_commands_inside_commands_make_longer_ones():
    gold = dict(make_commands())
    short = [pair for pair in gold.items() if len(pair[1].split()) <= 22]
    made = draw_all(Recombination(short), random.Random(1).sample(short, 2000))
    known = [(source, target) for source, target in made if source in gold]
    # Few are no commands, such as those with *twice twice*.
    assert len(known) > 0.85 * len(made)
    assert sum(gold[source] == target for source, target in known) > 0.99 * len(known)
    longer = [source for source, target in known if len(target.split()) > 22]
    assert any("around left thrice" in source for source in longer)


def test_texts_without_such_parts_stay():
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(300)]
    pairs = [(" ".join(draw.choices(words, k=6)), " ".join(draw.choices(words, k=6)).upper()) for _ in range(500)]
    recombination = Recombination(pairs)
    assert recombination.num_additions == recombination.num_outer == 0
    assert draw_all(recombination, pairs) == []
    # Short strings, such as words with their sounds.
    assert Recombination([(word, " ".join(word)) for word in words]).num_additions == 0


def test_work_grows_with_the_pairs_where_a_pattern_has_many_targets(monkeypatch):
    draw, counts = random.Random(1), []
    subtract = Recombination._subtract
    monkeypatch.setattr(Recombination, "_subtract", lambda *words: counts.append(1) or subtract(*words))
    pairs = []
    for _ in range(600):
        words = [f"s{draw.randrange(50)}" for _ in range(draw.randint(2, 5))]
        pairs.append((" ".join(words), " , ".join(f"a{draw.randrange(9)} = t{word[1:]}" for word in words)))
    assert Recombination(pairs).num_additions == 0 and len(counts) < 10 * len(pairs)


def test_pairs_that_are_written_otherwise_are_not_read():
    # Some files have a pair with an empty target.
    pairs = [*make_pairs(numbered), ("Emma saw .", "")]
    reader = PairReader(pairs)
    assert (reader.end_mark, reader.first_number) == (".", 0)
    assert reader.write(reader.read(*pairs[0])) == pairs[0]
    assert reader.read(pairs[0][0].removesuffix(" ."), pairs[0][1]) is None
    # Two spaces would be lost.
    assert reader.read(pairs[0][0].replace(" ", "  ", 1), pairs[0][1]) is None
    # The number tells which of two equal words a target follows.
    assert reader.read("Emma saw a cat in a cat .", "cat ( x _ 6 )") is not None
    assert reader.read("Emma saw a cat in a cat .", "cat ( x _ 9 )") is None


def test_drawn_pairs_are_the_same_in_another_process():
    code = (
        "import random; from test_recombination import *; pairs = make_pairs(nested, 300);"
        "print(hash(()), draw_all(Recombination(pairs), pairs[:50]))"
    )
    texts = set()
    for seed in ("1", "2"):
        paths = os.pathsep.join([*sys.path, os.path.dirname(__file__)])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        texts.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(texts) == 1
