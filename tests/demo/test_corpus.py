import hashlib
import json
import re
from collections import Counter

import pytest

from metaphrase.demo import corpus as demo
from metaphrase.demo.corpus import Sampler, core_of, make_demo_corpus, make_demo_summaries
from metaphrase.demo.grammar import to_english

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
    return {to_english(sentence): sentence for sentence in (sampler.sentence() for _ in range(8000))}


@pytest.fixture(scope="module")
def corpus():
    return make_demo_corpus(num_train=6000, num_validation=300, num_test=600)


@pytest.fixture(scope="module")
def summaries():
    return make_demo_summaries(num_train=60, num_validation=20, num_test=60)


def test_one_combination_in_eight_is_held_out(drawn):
    distinct = {pair for sentence in drawn.values() for pair in demo.combinations(sentence)}
    shares = Counter((type(first), demo.split_of_combination((first, second))) for first, second in distinct)
    for kind in {type(first) for first, _ in distinct}:
        held_out = 1 - shares[kind, "train"] / sum(shares[kind, split] for split in ("train", "validation", "test"))
        assert 0.10 < held_out < 0.15


def test_lines_are_distinct_and_of_held_out_splits_familiar(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == {"train": 6000, "validation": 300, "test": 600}
    assert corpus["test"][0] == ("The cat is black.", "Die Katze ist schwarz.")
    sources = [english for pairs in corpus.values() for english, _ in pairs]
    assert len(set(sources)) == len(sources)
    line = re.compile(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß']*(,? [A-Za-zÄÖÜäöüß']+)+[.?]")
    for pairs in corpus.values():
        for english, german in pairs:
            assert line.fullmatch(english) and line.fullmatch(german) and english[-1] == german[-1]
            assert demo.MIN_WORDS <= len(english.split()) <= demo.MAX_WORDS
    for side in (0, 1):
        frequencies = Counter(word for pair in corpus["train"] for word in demo.words_of(pair[side]))
        held_out = {
            word for name in ("validation", "test") for pair in corpus[name] for word in demo.words_of(pair[side])
        }
        # Fewer pairs than by default need fewer occurrences in proportion.
        assert min(frequencies[word] for word in held_out) >= demo.MIN_OCCURRENCES * 6000 // 30_000


def test_corpus_is_the_same_everywhere():
    corpus = make_demo_corpus(num_train=1500, num_validation=60, num_test=60, seed=3)
    digest = hashlib.sha256(json.dumps(corpus).encode()).hexdigest()
    assert digest == "ad52eb951baa04c6e56ba7691c8ac3ee6cdb224148d12e10d777d1d2b8c91fa6"


@pytest.mark.parametrize(("write", "prefix"), [(demo.write_demo_corpus, ""), (demo.write_demo_summaries, "summaries_")])
def test_files_hold_the_pairs(write, prefix, tmp_path):
    make = make_demo_corpus if write is demo.write_demo_corpus else make_demo_summaries
    counts = {"num_train": 200, "num_validation": 0, "num_test": 10, "seed": 5}
    paths, corpus = write(tmp_path / "corpus", **counts), make(**counts)
    assert [path.name for path in paths.values()] == [f"{prefix}{split}.tsv" for split in corpus]
    for split, path in paths.items():
        lines = path.read_bytes().decode("utf-8").split("\n")
        assert lines.pop() == "" and [tuple(line.split("\t")) for line in lines] == corpus[split]


def test_core_keeps_subject_verb_and_objects(drawn):
    assert {text: to_english(core_of(drawn[text])) for text in CORES} == CORES
    for sentence in list(drawn.values())[:2000]:
        assert core_of(core_of(sentence)) == core_of(sentence)


def test_summaries_have_their_own_combinations(summaries, drawn):
    pairs = [pair for split in summaries.values() for pair in split]
    assert len({text for text, _ in pairs}) == len(pairs)
    for split in summaries:
        for number, (text, summary) in enumerate(summaries[split]):
            sentences = [drawn[line] for line in re.findall(r"[^.?]+[.?]", text.replace(". ", ".").replace("? ", "?"))]
            # Texts of two and of three sentences alternate.
            assert len(sentences) == 2 + number % 2 and {
                demo.split_of_sentence(sentence) for sentence in sentences
            } == {split}
            assert summary == " ".join(to_english(core_of(sentence)) for sentence in sentences)
