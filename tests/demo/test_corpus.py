"""The demo corpus: sizes, forms and combinations of its splits, and equal files for equal arguments."""

import hashlib
import json
import re
from collections import Counter

import pytest

from metaphrase.demo.corpus import (
    FIRST_TEST_SENTENCE,
    MAX_WORDS,
    MIN_OCCURRENCES,
    MIN_WORDS,
    Sampler,
    combinations,
    make_demo_corpus,
    split_of_combination,
    words_of,
    write_demo_corpus,
)
from metaphrase.demo.grammar import ADJECTIVES, CLAUSE_VERBS, KNOW, NOUNS, VERBS
from metaphrase.demo.languages import third_person_singular, to_english, to_german


def test_one_combination_in_eight_is_held_out():
    sampler = Sampler(7)
    distinct = {pair for _ in range(8000) for pair in combinations(sampler.sentence())}
    shares = Counter((type(first), split_of_combination((first, second))) for first, second in distinct)
    for kind in {type(first) for first, _ in distinct}:
        held_out = 1 - shares[kind, "train"] / sum(shares[kind, split] for split in ("train", "validation", "test"))
        assert 0.10 < held_out < 0.15


@pytest.fixture(scope="module")
def corpus():
    return make_demo_corpus()


def test_counts_and_distinctness(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == {"train": 30000, "validation": 500, "test": 1000}
    sources = [english for pairs in corpus.values() for english, _ in pairs]
    assert len(set(sources)) == len(sources)
    assert corpus["test"][0] == ("The cat is black.", "Die Katze ist schwarz.")


def test_form_of_lines(corpus):
    line = re.compile(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß']*(,? [A-Za-zÄÖÜäöüß']+)+[.?]")
    for pairs in corpus.values():
        for english, german in pairs:
            assert line.fullmatch(english) and line.fullmatch(german)
            assert english[-1] == german[-1]
            assert MIN_WORDS <= len(english.split()) <= MAX_WORDS


def test_word_forms_of_held_out_splits_are_frequent(corpus):
    for side in (0, 1):
        frequencies = Counter(word for pair in corpus["train"] for word in words_of(pair[side]))
        for split in ("validation", "test"):
            seen = {word for pair in corpus[split] for word in words_of(pair[side])}
            assert min(frequencies[word] for word in seen) >= MIN_OCCURRENCES


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
            forms[split] |= {
                f"^the {head} {be} {adjective.english}" for head in heads for be in ("is", "are", "was", "were")
            }
            if adjective.english != "clean":  # also a verb: *they clean rooms*
                forms[split] |= {f"{adjective.english} {head}" for head in heads}
        for verb in set(VERBS) - {*CLAUSE_VERBS, KNOW}:  # *know* is two German verbs
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


def test_every_sentence_is_in_its_split_and_has_one_translation(corpus):
    known = {english: (split, german) for split, pairs in corpus.items() for english, german in pairs}
    sampler = Sampler(0)
    checked = Counter()
    for _ in range(6000):
        sentence = sampler.sentence()
        split, german = known.get(to_english(sentence), (None, None))
        if split:
            assert {split_of_combination(pair) for pair in combinations(sentence)} - {"train"} == {split} - {"train"}
            assert to_german(sentence) == german
            checked[split] += 1
    assert checked["train"] > 3000 and checked["test"] > 300 and checked["validation"] > 300


def test_corpus_is_the_same_everywhere():
    corpus = make_demo_corpus(num_train=1500, num_validation=60, num_test=60, seed=3)
    digest = hashlib.sha256(json.dumps(corpus).encode()).hexdigest()
    assert digest == "ad52eb951baa04c6e56ba7691c8ac3ee6cdb224148d12e10d777d1d2b8c91fa6"


def test_seeds_differ():
    first, second = (make_demo_corpus(num_train=300, num_validation=0, num_test=20, seed=seed) for seed in (1, 2))
    assert first["validation"] == [] and first["test"][0] == second["test"][0]
    assert len({*first["train"]} & {*second["train"]}) < 100


def test_write_demo_corpus(tmp_path):
    paths = write_demo_corpus(tmp_path / "corpus", num_train=200, num_validation=10, num_test=10, seed=5)
    corpus = make_demo_corpus(num_train=200, num_validation=10, num_test=10, seed=5)
    assert [path.name for path in paths.values()] == ["train.tsv", "validation.tsv", "test.tsv"]
    for split, path in paths.items():
        lines = path.read_bytes().decode("utf-8").split("\n")
        assert lines.pop() == ""
        assert [tuple(line.split("\t")) for line in lines] == corpus[split]


@pytest.mark.parametrize("arguments", [{"num_train": 0}, {"num_validation": -1}, {"num_test": 0}])
def test_counts_must_be_possible(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be at least"):
        make_demo_corpus(**arguments)


def test_more_than_the_grammar_gives(monkeypatch):
    monkeypatch.setattr(Sampler, "sentence", lambda self: FIRST_TEST_SENTENCE)
    with pytest.raises(ValueError, match="within what the grammar gives"):
        make_demo_corpus(num_train=5, num_validation=0, num_test=1)
