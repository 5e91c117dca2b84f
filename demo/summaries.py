"""Summaries of the demo corpus: texts of two or three English sentences, and the core of each text.

A summary keeps subject, verb and objects. It leaves out adjectives, relative clauses, adverbs, material around the main clause,
and optional phrases. Of *I know that the dog sleeps* it keeps the subordinate clause. The text determines the summary, so exact
match is a fair score. The splits are those of `corpus`: no sentence of a training text has a held-out combination of words, and
each sentence of a test text has one.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from metaphrase.demo.corpus import SPLITS, Pair, split_of_sentence, write_splits
from metaphrase.demo.english import to_english
from metaphrase.demo.grammar import Clause, Coordination, Nominal, NounPhrase, Sentence
from metaphrase.demo.lexicon import THAT
from metaphrase.demo.sampler import Sampler

MIN_SENTENCES, MAX_SENTENCES = 2, 3
_MAX_DRAWS_PER_SENTENCE = 20


def core_of(sentence: Sentence) -> Sentence:
    """Return a sentence without its optional parts."""
    if sentence.subordinate and sentence.subordinate.conjunction is THAT:
        return Sentence(_core_of_clause(sentence.subordinate.clause))
    return Sentence(_core_of_clause(sentence.clause), is_question=sentence.is_question)


def _core_of_clause(clause: Clause) -> Clause:
    phrase = clause.phrase if clause.verb.needs_phrase else None
    if phrase is not None:
        phrase = replace(phrase, complement=_core_of_nominal(phrase.complement))
    return replace(
        clause,
        subject=_core_of_nominal(clause.subject),
        indirect_object=_core_of_nominal(clause.indirect_object),
        direct_object=_core_of_nominal(clause.direct_object),
        frequency=None,
        phrase=phrase,
    )


def _core_of_nominal(nominal: Nominal | None) -> Nominal | None:
    match nominal:
        case Coordination():
            return Coordination(_core_of_nominal(nominal.first), _core_of_nominal(nominal.second))
        case NounPhrase():
            return replace(nominal, adjectives=(), relative=None, possessor=_core_of_nominal(nominal.possessor))
    return nominal


def _texts(seed: int, max_draws: int) -> Iterator[tuple[str, Pair]]:
    """Yield texts with their summary and split. Raise a `ValueError` after `max_draws` sentences."""
    sampler = Sampler(seed)
    begun: dict[str, list[Sentence]] = {split: [] for split in SPLITS}
    lengths = dict.fromkeys(SPLITS, MIN_SENTENCES)
    for _ in range(max_draws):
        sentence = sampler.sentence()
        split = split_of_sentence(sentence)
        if split is None:
            continue
        begun[split].append(sentence)
        if len(begun[split]) == lengths[split]:
            sentences = begun[split]
            cores = [core_of(sentence) for sentence in sentences]
            yield split, (" ".join(map(to_english, sentences)), " ".join(map(to_english, cores)))
            begun[split] = []
            # Short and long texts alternate.
            lengths[split] = MIN_SENTENCES + MAX_SENTENCES - lengths[split]
    raise ValueError(f"The counts of texts must be within what the grammar gives: not reached in {max_draws} draws.")


def make_demo_summaries(
    num_train: int = 15000, num_validation: int = 300, num_test: int = 500, seed: int = 1
) -> dict[str, list[Pair]]:
    """Make the pairs of text and summary, all distinct: `{"train": [(text, summary), ...], "validation": ..., "test": ...}`.

    Raises:
        ValueError: If the grammar does not give enough texts.
    """
    counts = {"train": num_train, "validation": num_validation, "test": num_test}
    pairs: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    draws = _texts(seed, max_draws=_MAX_DRAWS_PER_SENTENCE * MAX_SENTENCES * sum(counts.values()) + 1000)
    while any(len(pairs[split]) < count for split, count in counts.items()):
        split, (text, summary) = next(draws)
        if len(pairs[split]) < counts[split]:
            pairs[split][text] = summary
    return {split: list(summary_of.items()) for split, summary_of in pairs.items()}


def write_demo_summaries(folder: str | Path, **arguments: int) -> dict[str, Path]:
    """Write summaries_train.tsv, summaries_validation.tsv and summaries_test.tsv (UTF-8; text, tab, summary; no header).

    Args:
        folder: The folder, made if missing.
        **arguments: Arguments of `make_demo_summaries`.

    Returns:
        The path of each split.
    """
    return write_splits(folder, make_demo_summaries(**arguments), "summaries_")
