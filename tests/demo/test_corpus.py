"""The demo corpus and its summaries: forms and combinations of the splits, and equal files for equal arguments."""

import hashlib
import json
import re
from collections import Counter

import pytest

from metaphrase.demo.corpus import (
    MAX_WORDS,
    MIN_OCCURRENCES,
    MIN_WORDS,
    Sampler,
    combinations,
    core_of,
    make_demo_corpus,
    make_demo_summaries,
    split_of_combination,
    split_of_sentence,
    words_of,
    write_demo_corpus,
    write_demo_summaries,
)
from metaphrase.demo.grammar import ADJECTIVES, CLAUSE_VERBS, NOUNS, VERBS
from metaphrase.demo.languages import third_person_singular, to_english

CORES = {
    "Although the brother wants to know this castle, the small king has the brown suitcase.": "The king has the suitcase.",
    "They believe that the postcards must be new.": "The postcards must be new.",
    "The hungry king whom I drew called the happy boy.": "The king called the boy.",
    "Every small boy opens this door and a teacher sells the woman's small cookie.": "Every boy opens this door.",
    "Did the teacher send their doctors my shoe?": "Did the teacher send their doctors my shoe?",
    "Tomorrow the old neighbors cannot laugh.": "The neighbors cannot laugh.",
    "The sisters went to the rooms because you did not swim.": "The sisters went to the rooms.",
}


@pytest.fixture(scope="module")
def drawn():
    """Sentences in the order of the summaries."""
    sampler = Sampler(1)
    return {to_english(sentence): sentence for sentence in (sampler.sentence() for _ in range(36_000))}


@pytest.fixture(scope="module")
def corpus():
    return make_demo_corpus(num_train=30_000)


@pytest.fixture(scope="module")
def summaries():
    return make_demo_summaries(num_train=200, num_validation=60, num_test=200)


def test_texts_of_two_and_of_three_sentences_alternate(summaries):
    for pairs in summaries.values():
        counts = [len(re.findall("[.?]", text)) for text, _ in pairs]
        assert counts == [2, 3] * (len(pairs) // 2)


def test_one_combination_in_eight_is_held_out(drawn):
    distinct = {pair for sentence in list(drawn.values())[:8000] for pair in combinations(sentence)}
    shares = Counter((type(first), split_of_combination((first, second))) for first, second in distinct)
    for kind in {type(first) for first, _ in distinct}:
        held_out = 1 - shares[kind, "train"] / sum(shares[kind, split] for split in ("train", "validation", "test"))
        assert 0.10 < held_out < 0.15


def test_lines_are_distinct_and_of_held_out_splits_familiar(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == {"train": 30000, "validation": 500, "test": 1000}
    assert corpus["test"][0] == ("The cat is black.", "Die Katze ist schwarz.")
    sources = [english for pairs in corpus.values() for english, _ in pairs]
    assert len(set(sources)) == len(sources)
    line = re.compile(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß']*(,? [A-Za-zÄÖÜäöüß']+)+[.?]")
    for pairs in corpus.values():
        for english, german in pairs:
            assert line.fullmatch(english) and line.fullmatch(german) and english[-1] == german[-1]
            assert MIN_WORDS <= len(english.split()) <= MAX_WORDS
    for side in (0, 1):
        frequencies = Counter(word for pair in corpus["train"] for word in words_of(pair[side]))
        held_out = {word for name in ("validation", "test") for pair in corpus[name] for word in words_of(pair[side])}
        assert min(frequencies[word] for word in held_out) >= MIN_OCCURRENCES


def shown_by(english: str) -> set[str]:
    """Runs of words that may be a combination, none across a comma: two or three words, more after ^, the start."""
    english = english.lower()
    start = words_of(english.partition(",")[0])
    runs = {"^" + " ".join(start[:length]) for length in (3, 4)}
    for part in english.split(","):
        words = words_of(part)
        runs |= {" ".join(words[i : i + length]) for length in (2, 3) for i in range(len(words) - length + 1)}
    return runs


def simplest_forms() -> dict[str, set[str]]:
    """What the combinations of each split look like where nothing comes between, found without parsing."""
    forms = {"train": set(), "validation": set(), "test": set()}
    for noun in NOUNS:
        heads = [head for head in (noun.english, noun.plural) if head]
        for adjective in ADJECTIVES:
            split = split_of_combination((adjective, noun))
            be_forms = ("is", "are", "was", "were")
            forms[split] |= {f"^the {head} {be} {adjective.english}" for head in heads for be in be_forms}
            if adjective.english != "clean":  # also a verb: *they clean rooms*
                forms[split] |= {f"{adjective.english} {head}" for head in heads}
        for verb in set(VERBS) - {*CLAUSE_VERBS}:
            if verb.english == "know":  # two German verbs
                continue
            finite = (verb.english, third_person_singular(verb.english), verb.past)
            split = split_of_combination((noun, verb))
            forms[split] |= {f"^the {head} {form}" for head in heads for form in finite}
            if verb.objects:
                split = split_of_combination((verb, noun))
                forms[split] |= {f"{form} the {head}" for head in heads for form in finite}
    return forms


def test_no_split_shows_the_combinations_of_another(corpus):
    forms = simplest_forms()
    found = Counter()
    for split, pairs in corpus.items():
        banned = set().union(*(forms[other] for other in ("validation", "test") if other != split))
        for english, _ in pairs:
            assert not shown_by(english) & banned, (split, english)
            found[split] += not forms[split].isdisjoint(shown_by(english))
    assert found["test"] > 300 and found["validation"] > 150
    assert not any(re.search(r"\bblack cats?\b|\bcats? (is|are|was|were) black", e.lower()) for e, _ in corpus["train"])


def test_corpus_is_the_same_everywhere():
    corpus = make_demo_corpus(num_train=1500, num_validation=60, num_test=60, seed=3)
    digest = hashlib.sha256(json.dumps(corpus).encode()).hexdigest()
    assert digest == "ad52eb951baa04c6e56ba7691c8ac3ee6cdb224148d12e10d777d1d2b8c91fa6"


@pytest.mark.parametrize(("write", "prefix"), [(write_demo_corpus, ""), (write_demo_summaries, "summaries_")])
def test_files_hold_the_pairs(write, prefix, tmp_path):
    make = make_demo_corpus if write is write_demo_corpus else make_demo_summaries
    counts = {"num_train": 200, "num_validation": 0, "num_test": 10, "seed": 5}
    paths, corpus = write(tmp_path / "corpus", **counts), make(**counts)
    assert [path.name for path in paths.values()] == [f"{prefix}{split}.tsv" for split in corpus]
    for split, path in paths.items():
        lines = path.read_bytes().decode("utf-8").split("\n")
        assert lines.pop() == "" and [tuple(line.split("\t")) for line in lines] == corpus[split]


def test_counts_must_be_possible():
    with pytest.raises(ValueError, match="`num_test` must be at least 1, got 0"):
        make_demo_corpus(num_test=0)
    with pytest.raises(ValueError, match="within what the grammar gives"):
        make_demo_corpus(num_train=5, num_validation=0, num_test=9)


def test_core_keeps_subject_verb_and_objects(drawn):
    assert {text: to_english(core_of(drawn[text])) for text in CORES} == CORES
    for sentence in list(drawn.values())[:2000]:
        assert core_of(core_of(sentence)) == core_of(sentence)


def test_summaries_have_their_own_combinations(summaries, drawn):
    pairs = [pair for split in summaries.values() for pair in split]
    assert len({text for text, _ in pairs}) == len(pairs)
    for split in summaries:
        for text, summary in summaries[split]:
            sentences = [drawn[line] for line in re.findall(r"[^.?]+[.?]", text.replace(". ", ".").replace("? ", "?"))]
            assert 2 <= len(sentences) <= 3 and {split_of_sentence(sentence) for sentence in sentences} == {split}
            assert summary == " ".join(to_english(core_of(sentence)) for sentence in sentences)
