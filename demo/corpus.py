"""The demo corpus: tens of thousands of English-German sentence pairs from a small grammar, and summaries of texts.

`grammar` holds the structures, `lexicon` the words, `sampler` draws sentences, `english` and `german` write them. The English
determines the German, so exact match is a fair score.

The splits measure translation of unseen *combinations*. A sentence has three kinds of combination, relative clauses included:

- an adjective and the noun that it describes, before the noun or after *be*;
- the noun of a subject and its verb (*the dog that sleeps*);
- a verb and the noun of a direct or indirect object (*the apple that I eat*).

Nouns, adjectives and verbs are numbered in the order of the lexicon. The sum of the two numbers of a combination, modulo 16,
decides its split: one rest is test, another one validation, all others training. So one combination in eight is held out, in
every inflected form, and each word meets its other partners in training. No training sentence has a held-out combination. A test
sentence has at least one combination of the test split and none of validation, and vice versa. Every word form of validation and
test is frequent in training. *Black* and *cat* never meet in training: "The cat is black." is the first test pair.

Equal arguments give the same corpus everywhere: Python guarantees the sequence of `random.Random.random`, the only source used.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from metaphrase.demo import grammar
from metaphrase.demo.english import to_english
from metaphrase.demo.german import to_german
from metaphrase.demo.lexicon import ADJECTIVES, BE, DEFINITE, NOUNS, THAT, VERBS
from metaphrase.demo.sampler import Sampler

Pair = tuple[str, str]
Combination = tuple[grammar.Adjective | grammar.Noun | grammar.Verb, grammar.Noun | grammar.Verb]

SPLITS = ("train", "validation", "test")
MIN_WORDS, MAX_WORDS = 3, 18  # of an English sentence
MIN_OCCURRENCES = 20
_DEFAULT_NUM_TRAIN = 30000
_HELD_OUT_MODULUS = 16
_MAX_DRAWS_PER_PAIR = 20
_NUMBERS = {word: number for words in (NOUNS, ADJECTIVES, VERBS) for number, word in enumerate(words)}
_CAT = next(noun for noun in NOUNS if noun.english == "cat")
_BLACK = next(adjective for adjective in ADJECTIVES if adjective.english == "black")
_TEST_REST = (_NUMBERS[_BLACK] + _NUMBERS[_CAT]) % _HELD_OUT_MODULUS
_VALIDATION_REST = (_TEST_REST + _HELD_OUT_MODULUS // 2) % _HELD_OUT_MODULUS

FIRST_TEST_SENTENCE = grammar.Sentence(grammar.Clause(grammar.NounPhrase(_CAT, DEFINITE), BE, predicate=_BLACK))
MIN_SENTENCES, MAX_SENTENCES = 2, 3  # of a text
_MAX_DRAWS_PER_SENTENCE = 20


def split_of_combination(combination: Combination) -> str:
    """Return the split of a combination of two words: "train" for seven in eight."""
    first, second = combination
    rest = (_NUMBERS[first] + _NUMBERS[second]) % _HELD_OUT_MODULUS
    return {_TEST_REST: "test", _VALIDATION_REST: "validation"}.get(rest, "train")


def _parts(nominal: grammar.Nominal | None) -> list[grammar.NounPhrase | grammar.RelativePronoun]:
    match nominal:
        case grammar.NounPhrase() | grammar.RelativePronoun():
            return [nominal]
        case grammar.Coordination():
            return [nominal.first, nominal.second]
    return []


def _phrase_combinations(nominal: grammar.Nominal | None) -> Iterator[Combination]:
    """Yield the combinations of adjectives, possessor and relative clause of a noun phrase."""
    for part in _parts(nominal):
        if isinstance(part, grammar.NounPhrase):
            yield from ((adjective, part.noun) for adjective in part.adjectives)
            yield from _phrase_combinations(part.possessor)
            if part.relative:
                yield from _clause_combinations(part.relative)


def _clause_combinations(clause: grammar.Clause) -> Iterator[Combination]:
    for part in _parts(clause.subject):
        yield (clause.predicate, part.noun) if clause.verb is BE else (part.noun, clause.verb)
    objects = (clause.indirect_object, clause.direct_object)
    yield from ((clause.verb, part.noun) for nominal in objects for part in _parts(nominal))
    for nominal in (clause.subject, *objects, clause.phrase and clause.phrase.complement):
        yield from _phrase_combinations(nominal)


def combinations(sentence: grammar.Sentence) -> Iterator[Combination]:
    """Yield all combinations of a sentence: adjective and noun, subject and verb, verb and object."""
    yield from _clause_combinations(sentence.clause)
    for part in (sentence.front, sentence.subordinate):
        if isinstance(part, grammar.Subordinate):
            yield from _clause_combinations(part.clause)
        elif part:
            yield from _phrase_combinations(getattr(part, "complement", None))
    if sentence.coordinated:
        yield from _clause_combinations(sentence.coordinated[1])


def split_of_sentence(sentence: grammar.Sentence) -> str | None:
    """Return the split of a sentence, or None if it has combinations of both validation and test."""
    held_out = {split_of_combination(combination) for combination in combinations(sentence)} - {"train"}
    if len(held_out) > 1:
        return None
    return held_out.pop() if held_out else "train"


def words_of(line: str) -> list[str]:
    """Return the words of a line without punctuation. Case is kept."""
    return line.replace(",", "").rstrip(".?").split()


def _draw(seed: int, max_draws: int) -> Iterator[tuple[str, Pair]]:
    """Yield pairs with their split. Raise a `ValueError` after `max_draws` draws."""
    sampler = Sampler(seed)
    for _ in range(max_draws):
        sentence = sampler.sentence()
        split = split_of_sentence(sentence)
        pair = to_english(sentence), to_german(sentence)
        if split and MIN_WORDS <= len(words_of(pair[0])) <= MAX_WORDS:
            yield split, pair
    raise ValueError(f"The counts of pairs must be within what the grammar gives: not reached in {max_draws} draws.")


def make_demo_corpus(
    num_train: int = _DEFAULT_NUM_TRAIN, num_validation: int = 500, num_test: int = 1000, seed: int = 0
) -> dict[str, list[Pair]]:
    """Make the corpus: `{"train": [(english, german), ...], "validation": [...], "test": [...]}`, all pairs distinct.

    Every word form of validation and test occurs in training at least `MIN_OCCURRENCES` times. A training split smaller
    than the default needs proportionally fewer, but at least one. "The cat is black." is always the first test pair.

    Raises:
        ValueError: If `num_train` or `num_test` is below 1, `num_validation` is negative, or the grammar does not give enough
            distinct sentences.
    """
    counts = {"train": num_train, "validation": num_validation, "test": num_test}
    for split, count in counts.items():
        minimum = 0 if split == "validation" else 1
        if count < minimum:
            raise ValueError(f"`num_{split}` must be at least {minimum}, got {count}.")
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    sources: set[str] = set()

    def add(split: str, pair: Pair) -> None:
        if pair[0] not in sources:
            sources.add(pair[0])
            pairs[split].append(pair)

    add("test", (to_english(FIRST_TEST_SENTENCE), to_german(FIRST_TEST_SENTENCE)))
    draws = _draw(seed, max_draws=_MAX_DRAWS_PER_PAIR * sum(counts.values()) + 1000)
    held_out = []
    while len(pairs["train"]) < num_train:
        split, pair = next(draws)
        if split == "train":
            add("train", pair)
        else:
            held_out.append((split, pair))
    frequencies = Counter(word for pair in pairs["train"] for line in pair for word in words_of(line))
    threshold = min(MIN_OCCURRENCES, max(1, MIN_OCCURRENCES * num_train // _DEFAULT_NUM_TRAIN))
    candidates = chain(held_out, draws)
    while any(len(pairs[split]) < counts[split] for split in ("validation", "test")):
        split, pair = next(candidates)
        is_familiar = all(frequencies[word] >= threshold for line in pair for word in words_of(line))
        if is_familiar and len(pairs[split]) < counts[split]:
            add(split, pair)
    return pairs


def write_demo_corpus(folder: str | Path, **arguments: int) -> dict[str, Path]:
    """Write train.tsv, validation.tsv and test.tsv (UTF-8; English, tab, German; no header) and return their paths.

    Args:
        folder: The folder, made if missing.
        **arguments: Arguments of `make_demo_corpus`.
    """
    return write_splits(folder, make_demo_corpus(**arguments))


def write_splits(folder: str | Path, corpus: dict[str, list[Pair]], prefix: str = "") -> dict[str, Path]:
    """Write the pairs of each split to a file whose name starts with `prefix`, and return the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{prefix}{split}.tsv" for split in SPLITS}
    for split, path in paths.items():
        path.write_text("".join(f"{source}\t{target}\n" for source, target in corpus[split]), "utf-8", newline="\n")
    return paths


def core_of(sentence: grammar.Sentence) -> grammar.Sentence:
    """Return a sentence without its optional parts."""
    if sentence.subordinate and sentence.subordinate.conjunction is THAT:
        return grammar.Sentence(_core_of_clause(sentence.subordinate.clause))
    return grammar.Sentence(_core_of_clause(sentence.clause), is_question=sentence.is_question)


def _core_of_clause(clause: grammar.Clause) -> grammar.Clause:
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


def _core_of_nominal(nominal: grammar.Nominal | None) -> grammar.Nominal | None:
    match nominal:
        case grammar.Coordination():
            return grammar.Coordination(_core_of_nominal(nominal.first), _core_of_nominal(nominal.second))
        case grammar.NounPhrase():
            return replace(nominal, adjectives=(), relative=None, possessor=_core_of_nominal(nominal.possessor))
    return nominal


def _texts(seed: int, max_draws: int) -> Iterator[tuple[str, Pair]]:
    """Yield texts with their summary and split. Raise a `ValueError` after `max_draws` sentences."""
    sampler = Sampler(seed)
    begun: dict[str, list[grammar.Sentence]] = {split: [] for split in SPLITS}
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

    A text has two or three English sentences. Its summary keeps subject, verb and objects of each. It leaves out adjectives,
    relative clauses, adverbs, material around the main clause, and optional phrases. Of *I know that the dog sleeps* it keeps the
    subordinate clause. The text determines the summary, so exact match is a fair score. The splits are those of the corpus: no
    sentence of a training text has a held-out combination of words, and each sentence of a test text has one.

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

    Arguments and result are as for `write_demo_corpus`, with the arguments of `make_demo_summaries`.
    """
    return write_splits(folder, make_demo_summaries(**arguments), "summaries_")
