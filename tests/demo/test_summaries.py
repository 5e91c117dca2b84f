"""Summaries of the demo corpus: their core, and combinations that belong to one split."""

import pytest

from metaphrase.demo.corpus import Sampler, core_of, make_demo_summaries, split_of_sentence, write_demo_summaries
from metaphrase.demo.languages import to_english

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
def summaries():
    return make_demo_summaries(num_train=800, num_validation=100, num_test=500)


def test_core_keeps_subject_verb_and_objects():
    sampler, cores = Sampler(1), {}
    for _ in range(40_000):
        sentence = sampler.sentence()
        if (said := to_english(sentence)) in CORES:
            cores[said] = to_english(core_of(sentence))
    assert cores == CORES


def test_core_of_a_core_is_itself():
    sampler = Sampler(5)
    for _ in range(3000):
        core = core_of(sampler.sentence())
        assert core_of(core) == core


def test_text_determines_its_summary(summaries):
    pairs = [pair for split in summaries.values() for pair in split]
    assert len({text for text, _ in pairs}) == len(pairs)
    for text, summary in pairs:
        sentences = text.count(".") + text.count("?")
        assert 2 <= sentences <= 3 and summary.count(".") + summary.count("?") == sentences
        assert len(summary.split()) <= len(text.split())
    assert sum(len(summary) for _, summary in pairs) < 0.75 * sum(len(text) for text, _ in pairs)


def test_splits_hold_their_own_combinations(summaries):
    sampler, split_of = Sampler(1), {}
    for _ in range(60_000):
        sentence = sampler.sentence()
        split_of[to_english(sentence)] = split_of_sentence(sentence)
    for split, pairs in summaries.items():
        for text, _ in pairs[:100]:
            for sentence in text.replace("?", ".").split(". "):
                known = sentence.rstrip(".")
                assert split_of.get(known + ".", split_of.get(known + "?")) == split


def test_same_arguments_give_the_same_files(tmp_path):
    for name in ("first", "again"):
        write_demo_summaries(tmp_path / name, num_train=20, num_validation=4, num_test=5)
    for split, count in (("train", 20), ("validation", 4), ("test", 5)):
        first, again = ((tmp_path / name / f"summaries_{split}.tsv").read_bytes() for name in ("first", "again"))
        assert first == again and first.count(b"\n") == count and first.count(b"\t") == count
