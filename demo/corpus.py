"""Corpus of the demo: sampled sentences in both languages, in files."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TypeVar

from metaphrase.demo import grammar
from metaphrase.demo.grammar import (
    ADJECTIVES,
    BARE,
    BE,
    DEFINITE,
    EVERY,
    INDEFINITE,
    NOUNS,
    POSSESSIVES,
    PREPOSITIONS,
    THAT,
    THIS,
    VERBS,
    WHO,
    Adjective,
    Clause,
    Coordination,
    Determiner,
    Modal,
    Nominal,
    Noun,
    NounPhrase,
    PrepositionalPhrase,
    Pronoun,
    RelativePronoun,
    Sentence,
    Subordinate,
    Verb,
)
from metaphrase.demo.languages import to_english, to_german

Item = TypeVar("Item")

# Repetition in a tuple is the weight of an item.
_SUBJECT_PRONOUNS = (*grammar.PRONOUNS[:2], *grammar.PRONOUNS)  # I and you have verb forms of their own
_OBJECT_VERBS = (*grammar.TRANSITIVE_VERBS, grammar.KNOW, grammar.HAVE, *grammar.DATIVE_VERBS)
_VERBS = (*(grammar.INTRANSITIVE_VERBS * 2), *(_OBJECT_VERBS * 2), *(grammar.DITRANSITIVE_VERBS * 3), *([BE] * 16))
# Verbs of events; *be* among them takes a passing state.
_EVENT_VERBS = tuple(verb for verb in _VERBS if verb.english not in ("know", "have", "love", "live"))
_ANY_DETERMINERS = (*([DEFINITE] * 12), *([INDEFINITE] * 6), *POSSESSIVES, THIS, THIS, EVERY)
_KNOWN_DETERMINERS = (*([DEFINITE] * 6), *POSSESSIVES, THIS)
# Determiners that are clear under negation: *nicht jeden* and *jeden ... nicht* would differ.
_NEGATED_DETERMINERS = (*_KNOWN_DETERMINERS, *([INDEFINITE] * 8))
_PLACE_DETERMINERS = (*([DEFINITE] * 8), INDEFINITE, THIS)
_TIMES = {False: (grammar.TODAY, grammar.NOW), True: (grammar.TODAY, grammar.YESTERDAY)}
_PLACES = ("building", "landscape")
_STATES = tuple(adjective for adjective in ADJECTIVES if adjective.is_state)


@cache
def _nouns_of(kinds: tuple[str, ...], is_place: bool = False) -> tuple[Noun, ...]:
    return tuple(noun for noun in NOUNS if noun.kind in kinds and (noun.preposition or not is_place))


@cache
def _adjectives_of(noun: Noun, is_colour: bool) -> tuple[Adjective, ...]:
    return tuple(word for word in ADJECTIVES if noun.kind in word.kinds and word.is_colour == is_colour)


@cache
def _verbs_with_subject(kind: str) -> tuple[Verb, ...]:
    verbs = (*grammar.INTRANSITIVE_VERBS, *_OBJECT_VERBS)
    return tuple(verb for verb in verbs if kind in verb.subjects and not verb.needs_phrase)


@cache
def _verbs_with_object(kind: str) -> tuple[Verb, ...]:
    return tuple(verb for verb in _OBJECT_VERBS if kind in verb.objects)


class Sampler:
    """Endless random sentences, equal for equal seeds.

    The sampler calls only `Random.random`, whose sequence Python guarantees for all versions.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._used: list[Noun] = []

    def sentence(self) -> Sentence:
        """Draw one sentence."""
        self._used = []
        constructions: tuple[Callable[[], Sentence], ...] = (
            *([self._statement] * 10),
            *([self._fronted_statement] * 3),
            *([self._question] * 3),
            *([self._complement_clause] * 2),
            *([self._adverbial_clause] * 3),
            self._coordinated_clauses,
        )
        return self._pick(constructions)()

    def _pick(self, items: Sequence[Item]) -> Item:
        return items[int(self._random() * len(items))]

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    # Sentences

    def _statement(self) -> Sentence:
        clause = self._clause()
        if self._chance(0.3):
            clause = self._with_relative(clause)
        elif self._chance(0.07) and not (clause.is_negated or clause.frequency or clause.modal):
            clause = self._with_no(clause)
        return Sentence(clause)

    def _fronted_statement(self) -> Sentence:
        clause = self._clause(is_event=True, is_simple=self._chance(0.5))
        clause = replace(clause, frequency=None)
        if clause.phrase and "place" in clause.verb.phrases and clause.phrase.preposition.english in ("in", "on"):
            return Sentence(replace(clause, phrase=None), front=clause.phrase)
        if clause.modal and self._chance(0.7):
            return Sentence(clause, front=grammar.TOMORROW)
        return Sentence(clause, front=self._pick(_TIMES[clause.is_past]))

    def _question(self) -> Sentence:
        clause = self._clause(is_event=True, is_question=True)
        form = self._random()
        if form < 0.6:
            return Sentence(clause, is_question=True)
        if form < 0.75 and (clause.verb is not BE or "person" in clause.predicate.kinds):
            return Sentence(replace(clause, subject=WHO), is_question=True)
        clause = replace(clause, frequency=None)
        if form < 0.85 and "place" in clause.verb.phrases:
            return Sentence(replace(clause, phrase=None), front=grammar.WHERE, is_question=True)
        return Sentence(clause, front=self._pick((grammar.WHY, grammar.WHEN_QUESTION)), is_question=True)

    def _complement_clause(self) -> Sentence:
        is_past, is_negated = self._chance(0.4), self._chance(0.1)
        verb = self._pick(grammar.CLAUSE_VERBS)
        main = Clause(self._subject(verb, is_negated), verb, is_past, is_negated=is_negated)
        return Sentence(main, subordinate=Subordinate(grammar.THAT, self._clause(is_past, is_simple=True)))

    def _adverbial_clause(self) -> Sentence:
        conjunction = self._pick((grammar.BECAUSE, grammar.ALTHOUGH, grammar.WHEN))
        # A past *when* would need *als* and the preterite.
        is_past = conjunction is not grammar.WHEN and self._chance(0.4)
        main = self._clause(is_past, is_simple=True)
        clause = self._clause(is_past, is_simple=True, is_event=conjunction is grammar.WHEN)
        if conjunction is grammar.WHEN:
            clause = replace(clause, frequency=None)
        subordinate = Subordinate(conjunction, clause)
        if self._chance(0.4):
            return Sentence(main, front=subordinate)
        return Sentence(main, subordinate=subordinate)

    def _coordinated_clauses(self) -> Sentence:
        is_past = self._chance(0.4)
        first, second = (self._clause(is_past, is_simple=True) for _ in range(2))
        return Sentence(first, coordinated=(self._pick((grammar.AND, grammar.BUT)), second))

    # Clauses

    def _clause(
        self, is_past: bool | None = None, is_simple: bool = False, is_event: bool = False, is_question: bool = False
    ) -> Clause:
        """Draw a clause. A simple clause has fewer adjectives and phrases; an event is no lasting state."""
        is_past = self._chance(0.4) if is_past is None else is_past
        verb = self._pick(_EVENT_VERBS if is_event else _VERBS)
        modal = self._pick(grammar.MODALS) if not is_past and self._chance(0.22) else None
        is_negated = not is_question and self._chance(0.14) and (modal is None or modal.negatable)
        if verb is BE:
            return self._copula_clause(is_past, modal, is_negated, is_event)
        subject = self._subject(verb, is_negated, is_simple)
        clause = Clause(subject, verb, is_past, modal, is_negated)
        if verb.objects:
            clause = replace(clause, **self._objects(clause, is_simple))
        elif not modal and not is_negated and verb in _EVENT_VERBS and self._chance(0.2):
            clause = replace(clause, frequency=self._pick(grammar.FREQUENCIES))
        # The position of *nicht* between an object and a phrase depends on the meaning: draw no such clauses.
        may_have_phrase = verb.phrases and not (verb.objects and is_negated)
        if may_have_phrase and (verb.needs_phrase or self._chance(0.2 if is_simple or verb.objects else 0.6)):
            clause = replace(clause, phrase=self._phrase(clause))
        return clause

    def _copula_clause(self, is_past: bool, modal: Modal | None, is_negated: bool, is_event: bool) -> Clause:
        predicate = self._pick(_STATES if is_event else ADJECTIVES)
        if "person" in predicate.kinds and self._chance(0.2):
            subject: Nominal = self._pick(_SUBJECT_PRONOUNS)
        else:
            is_known = is_negated or predicate.is_state or self._chance(0.7)
            subject = self._noun_phrase(_nouns_of(tuple(sorted(predicate.kinds))), is_known, adjectives=0)
            # A colour contradicts no other quality: never *a clean house is dirty*.
            colours = () if predicate.is_colour else _adjectives_of(subject.noun, True)
            if colours and self._chance(0.25):
                subject = replace(subject, adjectives=(self._pick(colours),))
        frequency = None
        if predicate.is_state and not is_negated and not modal and self._chance(0.25):
            frequency = self._pick(grammar.FREQUENCIES)
        if modal:
            modal = grammar.SHOULD if is_negated else self._pick((grammar.MUST, grammar.SHOULD))
        return Clause(subject, BE, is_past, modal, is_negated, predicate=predicate, frequency=frequency)

    def _with_relative(self, clause: Clause) -> Clause:
        """Add a relative clause to the object at the end of the clause, or to the subject."""
        is_object_last = clause.phrase is None and isinstance(clause.direct_object, NounPhrase)
        role = "direct_object" if is_object_last and self._chance(0.5) else "subject"
        phrase = getattr(clause, role)
        if not isinstance(phrase, NounPhrase) or phrase.determiner not in (DEFINITE, INDEFINITE) or phrase.possessor:
            return clause
        return replace(clause, **{role: replace(phrase, relative=self._relative(phrase, clause.is_past))})

    def _relative(self, phrase: NounPhrase, is_past: bool) -> Clause:
        pronoun = RelativePronoun(phrase.noun, phrase.is_plural)
        as_subject, as_object = _verbs_with_subject(phrase.noun.kind), _verbs_with_object(phrase.noun.kind)
        if as_subject and (self._chance(0.6) or not as_object):
            verb = self._pick(as_subject)
            clause = Clause(pronoun, verb, is_past)
            return replace(clause, **self._objects(clause, is_simple=True)) if verb.objects else clause
        verb = self._pick(as_object)
        return Clause(self._subject(verb, is_simple=True), verb, is_past, direct_object=pronoun)

    def _with_no(self, clause: Clause) -> Clause:
        """Set *no* as the determiner of the subject or object of a clause without modal verb.

        *Must buy no apple* differs from *muss keinen Apfel kaufen*, which means *need not buy*.
        """
        role = "direct_object" if isinstance(clause.direct_object, NounPhrase) and self._chance(0.7) else "subject"
        phrase = getattr(clause, role)
        if not isinstance(phrase, NounPhrase) or phrase.possessor:
            return clause
        return replace(clause, **{role: replace(phrase, determiner=grammar.NO)})

    # Phrases

    def _subject(self, verb: Verb, is_known: bool = False, is_simple: bool = False) -> Nominal:
        if self._chance(0.32):
            return self._pick(_SUBJECT_PRONOUNS)
        nouns = _nouns_of(verb.subjects)
        if self._chance(0.05):
            return Coordination(*(self._noun_phrase(nouns, is_known=True, adjectives=0) for _ in range(2)))
        return self._noun_phrase(nouns, is_known, 0.2 if is_simple else 0.4)

    def _objects(self, clause: Clause, is_simple: bool) -> dict[str, Nominal]:
        """The objects of a clause, as arguments of `Clause`."""
        verb = clause.verb
        # *Heute hilft ein Lehrer mir* would be odd: an object pronoun wants a subject that is known.
        may_be_pronoun = not isinstance(clause.subject, NounPhrase) or clause.subject.determiner in _KNOWN_DETERMINERS
        if "person" in verb.objects and may_be_pronoun and self._chance(0.25):
            return {"direct_object": self._object_pronoun(clause.subject)}
        objects: dict[str, Nominal] = {}
        if verb.is_ditransitive:
            receivers = _nouns_of(("person",))
            is_pronoun = may_be_pronoun and self._chance(0.4)
            objects["indirect_object"] = (
                self._object_pronoun(clause.subject) if is_pronoun else self._noun_phrase(receivers, True, 0.1)
            )
        adjectives = 0.25 if is_simple or verb.is_ditransitive else 0.5
        determiners = _NEGATED_DETERMINERS if clause.is_negated else _ANY_DETERMINERS
        direct = self._noun_phrase(_nouns_of(verb.objects), adjectives=adjectives, determiners=determiners)
        if clause.is_negated and direct.determiner in grammar.NUMBERS:
            direct = replace(direct, determiner=BARE)
        return {**objects, "direct_object": direct}

    def _object_pronoun(self, subject: Nominal) -> Pronoun:
        """Draw a pronoun that does not mean the subject: no *I see me*, no *we see me*."""
        pronouns = grammar.PRONOUNS
        if isinstance(subject, Pronoun):
            is_third = subject.person == 3
            pronouns = [
                word for word in pronouns if word is not subject and (is_third or word.person != subject.person)
            ]
        return self._pick(pronouns)

    def _phrase(self, clause: Clause) -> PrepositionalPhrase:
        """Draw a place, a destination, or company."""
        verb = clause.verb
        name = self._pick(verb.phrases)
        if name in ("place", "water") or (name == "to" and self._chance(0.7)):
            nouns = _nouns_of(("water",) if name == "water" else _PLACES, is_place=True)
            goal = self._noun_phrase(nouns, clause.is_negated, adjectives=0.3, determiners=_PLACE_DETERMINERS)
            return PrepositionalPhrase(PREPOSITIONS["to" if name == "to" else goal.noun.preposition], goal)
        if self._chance(0.35):
            return PrepositionalPhrase(PREPOSITIONS[name], self._object_pronoun(clause.subject))
        kinds = ("person", "animal") if "animal" in verb.subjects and name != "to" else ("person",)
        companion = self._noun_phrase(_nouns_of(kinds), clause.is_negated, adjectives=0.3)
        return PrepositionalPhrase(PREPOSITIONS[name], companion)

    def _noun_phrase(
        self,
        nouns: Sequence[Noun],
        is_known: bool = False,
        adjectives: float = 0.4,
        determiners: Sequence[Determiner] = _ANY_DETERMINERS,
    ) -> NounPhrase:
        """Draw a noun phrase. `is_known` allows only *the*, *this*, *my*; `adjectives` is the probability of an adjective."""
        noun = self._pick(nouns)
        while noun in self._used:
            noun = self._pick(nouns)
        self._used.append(noun)
        described = self._adjectives(noun) if self._chance(adjectives) else ()
        determiner = self._pick(_KNOWN_DETERMINERS if is_known else determiners)
        is_parent = noun.english in ("mother", "father")
        is_plural = noun.plural is not None and self._chance(0.3) and not (is_parent and determiner in POSSESSIVES)
        has_no_one = is_plural or noun.plural is None  # plural and mass nouns: no *a*, no *every*
        if determiner is INDEFINITE and has_no_one:
            determiner = self._pick(grammar.NUMBERS) if is_plural and self._chance(0.4) else BARE
        elif (determiner is EVERY and has_no_one) or (determiner in POSSESSIVES and not noun.can_be_owned):
            determiner = DEFINITE
        elif determiner is DEFINITE and noun.can_be_owned and self._chance(0.1):
            return NounPhrase(noun, DEFINITE, is_plural, described, self._possessor())
        return NounPhrase(noun, determiner, is_plural, described)

    def _possessor(self) -> NounPhrase:
        noun = self._pick([noun for noun in _nouns_of(("person",)) if noun not in self._used])
        self._used.append(noun)
        return NounPhrase(noun, self._pick(POSSESSIVES) if noun.can_be_owned and self._chance(0.4) else DEFINITE)

    def _adjectives(self, noun: Noun) -> tuple[Adjective, ...]:
        """Draw one adjective, sometimes followed by a colour."""
        plain, colours = _adjectives_of(noun, False), _adjectives_of(noun, True)
        if not colours:
            return (self._pick(plain),)
        if self._chance(0.12):
            return (self._pick(plain), self._pick(colours))
        return (self._pick(plain + colours),)


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
