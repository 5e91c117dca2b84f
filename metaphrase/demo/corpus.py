"""Corpus of the demo: sampled sentences in both languages, and summaries of short texts, in files."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, tee
from pathlib import Path
from typing import Any

from metaphrase.demo import grammar
from metaphrase.demo.grammar import ADJECTIVES, BARE, BE, DEFINITE, INDEFINITE, NOUNS, Clause, NounPhrase, Sentence
from metaphrase.errors import MetaphraseError

# Repetition in a tuple is the weight of an item.
_SUBJECT_PRONOUNS = (*grammar.PRONOUNS[:2], *grammar.PRONOUNS)  # I and you have verb forms of their own
_VERBS = (*grammar.INTRANSITIVE_VERBS * 2, *grammar.OBJECT_VERBS * 2, *grammar.DITRANSITIVE_VERBS * 3, *[BE] * 16)
# Verbs of events; *be* among them takes a passing state.
_EVENT_VERBS = tuple(verb for verb in _VERBS if verb.english not in ("know", "have", "love", "live"))
_DETERMINERS = (*[DEFINITE] * 12, *[INDEFINITE] * 6, *grammar.POSSESSIVES, grammar.THIS, grammar.THIS, grammar.EVERY)
_KNOWN_DETERMINERS = (*[DEFINITE] * 6, *grammar.POSSESSIVES, grammar.THIS)
# Determiners that are clear under negation: *nicht jeden* and *jeden ... nicht* would differ.
_NEGATED_DETERMINERS = (*_KNOWN_DETERMINERS, *[INDEFINITE] * 8)
_PLACE_DETERMINERS = (*[DEFINITE] * 8, INDEFINITE, grammar.THIS)
_STATES = tuple(adjective for adjective in ADJECTIVES if adjective.is_state)
_PERSONS = tuple(noun for noun in NOUNS if noun.kind == "person")


@cache
def _nouns_of(kinds: tuple[str, ...], is_place: bool = False) -> tuple[grammar.Noun, ...]:
    return tuple(noun for noun in NOUNS if noun.kind in kinds and (noun.preposition or not is_place))


@cache
def _adjectives_of(noun: grammar.Noun, is_colour: bool) -> tuple[grammar.Adjective, ...]:
    return tuple(word for word in ADJECTIVES if noun.kind in word.kinds and word.is_colour == is_colour)


class Sampler:
    """Endless random sentences, equal for equal seeds.

    The sampler calls only `Random.random`, whose sequence Python guarantees for all versions.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._used: list[grammar.Noun] = []
        self._constructions = (
            *[self._statement] * 10,
            *[self._fronted_statement] * 3,
            *[self._question] * 3,
            *[self._complement_clause] * 2,
            *[self._adverbial_clause] * 3,
            self._coordinated_clauses,
        )

    def sentence(self) -> Sentence:
        self._used = []
        return self._pick(self._constructions)()

    def _pick(self, items: Sequence[Any]) -> Any:
        return items[int(self._random() * len(items))]

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    def _statement(self) -> Sentence:
        clause = self._clause()
        if self._chance(0.3):
            clause = self._with_relative(clause)
        elif self._chance(0.07) and not (clause.is_negated or clause.frequency or clause.modal):
            # Not with a modal: *must buy no apple* differs from *muss keinen Apfel kaufen*, which means *need not buy*.
            role = "direct_object" if isinstance(clause.direct_object, NounPhrase) and self._chance(0.7) else "subject"
            phrase = getattr(clause, role)
            if isinstance(phrase, NounPhrase) and not phrase.possessor:
                clause = replace(clause, **{role: replace(phrase, determiner=grammar.NO)})
        return Sentence(clause)

    def _fronted_statement(self) -> Sentence:
        clause = replace(self._clause(is_event=True, is_simple=self._chance(0.5)), frequency=None)
        if clause.phrase and "place" in clause.verb.phrases and clause.phrase.preposition.english in ("in", "on"):
            return Sentence(replace(clause, phrase=None), front=clause.phrase)
        if clause.modal and self._chance(0.7):
            return Sentence(clause, front=grammar.TOMORROW)
        return Sentence(clause, front=self._pick((grammar.TODAY, grammar.YESTERDAY if clause.is_past else grammar.NOW)))

    def _question(self) -> Sentence:
        clause = self._clause(is_event=True, is_question=True)
        form = self._random()
        if form < 0.6:
            return Sentence(clause, is_question=True)
        if form < 0.75 and (clause.verb is not BE or "person" in clause.predicate.kinds):
            return Sentence(replace(clause, subject=grammar.WHO), is_question=True)
        clause = replace(clause, frequency=None)
        if form < 0.85 and "place" in clause.verb.phrases:
            return Sentence(replace(clause, phrase=None), front=grammar.WHERE, is_question=True)
        return Sentence(clause, front=self._pick((grammar.WHY, grammar.WHEN_QUESTION)), is_question=True)

    def _complement_clause(self) -> Sentence:
        is_past, is_negated = self._chance(0.4), self._chance(0.1)
        verb = self._pick(grammar.CLAUSE_VERBS)
        main = Clause(self._subject(verb, is_negated), verb, is_past, is_negated=is_negated)
        return Sentence(main, joined=grammar.JoinedClause(grammar.THAT, self._clause(is_past, is_simple=True)))

    def _adverbial_clause(self) -> Sentence:
        conjunction = self._pick((grammar.BECAUSE, grammar.ALTHOUGH, grammar.WHEN))
        # A past *when* would need *als* and the preterite.
        is_past = conjunction is not grammar.WHEN and self._chance(0.4)
        main = self._clause(is_past, is_simple=True)
        clause = self._clause(is_past, is_simple=True, is_event=conjunction is grammar.WHEN)
        clause = replace(clause, frequency=None) if conjunction is grammar.WHEN else clause
        joined = grammar.JoinedClause(conjunction, clause)
        return Sentence(main, front=joined) if self._chance(0.4) else Sentence(main, joined=joined)

    def _coordinated_clauses(self) -> Sentence:
        is_past = self._chance(0.4)
        first, second = (self._clause(is_past, is_simple=True) for _ in range(2))
        return Sentence(first, joined=grammar.JoinedClause(self._pick((grammar.AND, grammar.BUT)), second))

    def _clause(
        self, is_past: bool | None = None, is_simple: bool = False, is_event: bool = False, is_question: bool = False
    ) -> Clause:
        """Draw a clause. A simple clause has fewer adjectives and phrases; an event is no lasting state."""
        is_past = self._chance(0.4) if is_past is None else is_past
        verb = self._pick(_EVENT_VERBS if is_event else _VERBS)
        modal = self._pick(grammar.MODALS) if not is_past and self._chance(0.22) else None
        # *Must not* forbids, but *muss nicht* permits.
        is_negated = not is_question and self._chance(0.14) and modal is not grammar.MUST
        if verb is BE:
            return self._copula_clause(is_past, modal, is_negated, is_event)
        clause = Clause(self._subject(verb, is_negated, is_simple), verb, is_past, modal, is_negated)
        if verb.objects:
            clause = replace(clause, **self._objects(clause, is_simple))
        elif not modal and not is_negated and verb in _EVENT_VERBS and self._chance(0.2):
            clause = replace(clause, frequency=self._pick(grammar.FREQUENCIES))
        # The position of *nicht* between an object and a phrase depends on the meaning: draw no such clauses.
        may_have_phrase = verb.phrases and not (verb.objects and is_negated)
        if may_have_phrase and (verb.needs_phrase or self._chance(0.2 if is_simple or verb.objects else 0.6)):
            clause = replace(clause, phrase=self._phrase(clause))
        return clause

    def _copula_clause(self, is_past: bool, modal: grammar.Modal | None, is_negated: bool, is_event: bool) -> Clause:
        predicate = self._pick(_STATES if is_event else ADJECTIVES)
        if "person" in predicate.kinds and self._chance(0.2):
            subject = self._pick(_SUBJECT_PRONOUNS)
        else:
            is_known = is_negated or predicate.is_state or self._chance(0.7)
            subject = self._noun_phrase(_nouns_of(predicate.kinds), is_known, adjectives=0)
            # A colour contradicts no other quality: never *a clean house is dirty*.
            colours = () if predicate.is_colour else _adjectives_of(subject.noun, True)
            if colours and self._chance(0.25):
                subject = replace(subject, adjectives=(self._pick(colours),))
        has_frequency = predicate.is_state and not is_negated and not modal and self._chance(0.25)
        frequency = self._pick(grammar.FREQUENCIES) if has_frequency else None
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
        pronoun = NounPhrase(phrase.noun, grammar.RELATIVE, phrase.is_plural)
        kind, verbs = phrase.noun.kind, (*grammar.INTRANSITIVE_VERBS, *grammar.OBJECT_VERBS)
        with_subject = [verb for verb in verbs if kind in verb.subjects and not verb.needs_phrase]
        with_object = [verb for verb in grammar.OBJECT_VERBS if kind in verb.objects]
        if with_subject and (self._chance(0.6) or not with_object):
            relative = Clause(pronoun, self._pick(with_subject), clause.is_past)
            if relative.verb.objects:
                relative = replace(relative, **self._objects(relative, is_simple=True))
        else:
            verb = self._pick(with_object)
            relative = Clause(self._subject(verb, is_simple=True), verb, clause.is_past, direct_object=pronoun)
        return replace(clause, **{role: replace(phrase, relative=relative)})

    def _subject(self, verb: grammar.Verb, is_known: bool = False, is_simple: bool = False) -> grammar.Nominal:
        if self._chance(0.32):
            return self._pick(_SUBJECT_PRONOUNS)
        nouns = _nouns_of(verb.subjects)
        if self._chance(0.05):
            return grammar.Coordination(*(self._noun_phrase(nouns, is_known=True, adjectives=0) for _ in range(2)))
        return self._noun_phrase(nouns, is_known, 0.2 if is_simple else 0.4)

    def _objects(self, clause: Clause, is_simple: bool) -> dict[str, grammar.Nominal | None]:
        verb, subject = clause.verb, clause.subject
        # *Heute hilft ein Lehrer mir* would be odd: an object pronoun wants a subject that is known.
        known = *_KNOWN_DETERMINERS, grammar.RELATIVE
        may_be_pronoun = not isinstance(subject, NounPhrase) or subject.determiner in known
        if "person" in verb.objects and may_be_pronoun and self._chance(0.25):
            return {"direct_object": self._object_pronoun(subject)}
        indirect = None
        if verb.is_ditransitive:
            is_pronoun = may_be_pronoun and self._chance(0.4)
            indirect = self._object_pronoun(subject) if is_pronoun else self._noun_phrase(_PERSONS, True, 0.1)
        adjectives = 0.25 if is_simple or verb.is_ditransitive else 0.5
        determiners = _NEGATED_DETERMINERS if clause.is_negated else _DETERMINERS
        direct = self._noun_phrase(_nouns_of(verb.objects), adjectives=adjectives, determiners=determiners)
        if clause.is_negated and direct.determiner in grammar.NUMBERS:
            direct = replace(direct, determiner=BARE)
        return {"indirect_object": indirect, "direct_object": direct}

    def _object_pronoun(self, subject: grammar.Nominal) -> grammar.Pronoun:
        """Draw a pronoun that does not mean the subject: no *I see me*, no *we see me*."""
        # A third person may meet another one.
        person = None if subject.person == 3 else subject.person
        return self._pick([word for word in grammar.PRONOUNS if word is not subject and word.person != person])

    def _phrase(self, clause: Clause) -> grammar.PrepositionalPhrase:
        verb, is_negated = clause.verb, clause.is_negated
        name = self._pick(verb.phrases)
        if name in ("place", "water") or (name == "to" and self._chance(0.7)):
            nouns = _nouns_of(("water",) if name == "water" else ("building", "landscape"), is_place=True)
            complement = self._noun_phrase(nouns, is_negated, adjectives=0.3, determiners=_PLACE_DETERMINERS)
            name = "to" if name == "to" else complement.noun.preposition
        elif self._chance(0.35):
            complement = self._object_pronoun(clause.subject)
        else:
            kinds = ("person", "animal") if "animal" in verb.subjects and name != "to" else ("person",)
            complement = self._noun_phrase(_nouns_of(kinds), is_negated, adjectives=0.3)
        return grammar.PrepositionalPhrase(grammar.PREPOSITIONS[name], complement)

    def _noun_phrase(
        self,
        nouns: Sequence[grammar.Noun],
        is_known: bool = False,
        adjectives: float = 0.4,
        determiners: Sequence[grammar.Determiner] = _DETERMINERS,
    ) -> NounPhrase:
        """Draw a noun phrase. `is_known` allows only *the*, *this*, *my*; `adjectives` is the probability of an adjective."""
        while (noun := self._pick(nouns)) in self._used:
            pass
        self._used.append(noun)
        groups: list[tuple[grammar.Adjective, ...]] = []
        if self._chance(adjectives):
            plain, colours = _adjectives_of(noun, False), _adjectives_of(noun, True)
            groups = [plain, colours] if colours and self._chance(0.12) else [plain + colours]
        described = tuple(map(self._pick, groups))
        determiner = self._pick(_KNOWN_DETERMINERS if is_known else determiners)
        is_possessive, is_parent = determiner in grammar.POSSESSIVES, noun.english in ("mother", "father")
        is_plural = noun.plural is not None and self._chance(0.3) and not (is_parent and is_possessive)
        has_no_one = is_plural or noun.plural is None  # plural and mass nouns: no *a*, no *every*
        possessor = None
        if determiner is INDEFINITE and has_no_one:
            determiner = self._pick(grammar.NUMBERS) if is_plural and self._chance(0.4) else BARE
        elif (determiner is grammar.EVERY and has_no_one) or (is_possessive and not noun.can_be_owned):
            determiner = DEFINITE
        elif determiner is DEFINITE and noun.can_be_owned and self._chance(0.1):
            owner = self._pick([person for person in _PERSONS if person not in self._used])
            self._used.append(owner)
            has_owner = owner.can_be_owned and self._chance(0.4)
            possessor = NounPhrase(owner, self._pick(grammar.POSSESSIVES) if has_owner else DEFINITE)
        return NounPhrase(noun, determiner, is_plural, described, possessor)


Pair = tuple[str, str]
Combination = tuple[grammar.Adjective | grammar.Noun | grammar.Verb, grammar.Noun | grammar.Verb]

SPLITS = ("train", "validation", "test")
MIN_WORDS, MAX_WORDS = 3, 18  # of an English sentence
MIN_OCCURRENCES = 20
MIN_SENTENCES, MAX_SENTENCES = 2, 3  # of a text
_DEFAULT_NUM_TRAIN = 30000
# Structures, whose fields may be structures. All else is a word.
_STRUCTURES = (Sentence, grammar.JoinedClause, Clause, grammar.PrepositionalPhrase, grammar.Coordination, NounPhrase)
_HELD_OUT_MODULUS = 16
_NUMBERS = {word: number for words in (NOUNS, ADJECTIVES, grammar.VERBS) for number, word in enumerate(words)}
_CAT = next(noun for noun in NOUNS if noun.english == "cat")
_BLACK = next(adjective for adjective in ADJECTIVES if adjective.english == "black")
_TEST_REST = (_NUMBERS[_BLACK] + _NUMBERS[_CAT]) % _HELD_OUT_MODULUS
_HELD_OUT = {_TEST_REST: "test", (_TEST_REST + _HELD_OUT_MODULUS // 2) % _HELD_OUT_MODULUS: "validation"}
FIRST_TEST_SENTENCE = Sentence(Clause(NounPhrase(_CAT, DEFINITE), BE, predicate=_BLACK))


def split_of_combination(combination: Combination) -> str:
    """Return the split of a combination of two words: "train" for seven in eight."""
    return _HELD_OUT.get(sum(_NUMBERS[word] for word in combination) % _HELD_OUT_MODULUS, "train")


def _nouns(nominal: grammar.Nominal | None) -> list[grammar.Noun]:
    if isinstance(nominal, grammar.Coordination):
        return [nominal.first.noun, nominal.second.noun]
    return [nominal.noun] if isinstance(nominal, NounPhrase) else []


def combinations(part: Any) -> Iterator[Combination]:
    """Yield all combinations of a sentence, or of a part of it: adjective and noun, subject and verb, verb and object."""
    if isinstance(part, NounPhrase):
        yield from ((adjective, part.noun) for adjective in part.adjectives)
    elif isinstance(part, Clause):
        for noun in _nouns(part.subject):
            yield (part.predicate, noun) if part.verb is BE else (noun, part.verb)
        yield from ((part.verb, noun) for noun in _nouns(part.indirect_object) + _nouns(part.direct_object))
    if isinstance(part, _STRUCTURES):
        yield from chain.from_iterable(map(combinations, vars(part).values()))


def split_of_sentence(sentence: Sentence) -> str | None:
    """Return the split of a sentence, or None if it has combinations of both validation and test."""
    held_out = set(map(split_of_combination, combinations(sentence))) - {"train"}
    return None if len(held_out) > 1 else next(iter(held_out), "train")


def words_of(line: str) -> list[str]:
    """Return the words of a line without punctuation. Case is kept."""
    return line.replace(",", "").rstrip(".?").split()


def _draw(seed: int, max_draws: int) -> Iterator[tuple[str, Sentence]]:
    sampler = Sampler(seed)
    for _ in range(max_draws):
        sentence = sampler.sentence()
        if split := split_of_sentence(sentence):
            yield split, sentence
    raise MetaphraseError(f"The counts of pairs must be within the grammar: not reached in {max_draws} draws.")


def make_demo_corpus(
    num_train: int = _DEFAULT_NUM_TRAIN, num_validation: int = 500, num_test: int = 1000, seed: int = 0
) -> dict[str, list[Pair]]:
    """Make the corpus: `{"train": [(english, german), ...], "validation": [...], "test": [...]}`, all pairs distinct.

    Every word form of validation and test occurs in training at least `MIN_OCCURRENCES` times. A training split smaller
    than the default needs proportionally fewer, but at least one. "The cat is black." is always the first test pair.
    """
    counts = dict(zip(SPLITS, (num_train, num_validation, num_test), strict=True))
    # The words of a sentence, and so its English, decide its split.
    pairs: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    pairs["test"][grammar.to_english(FIRST_TEST_SENTENCE)] = grammar.to_german(FIRST_TEST_SENTENCE)
    draws, candidates = tee(
        (split, (english, grammar.to_german(sentence)))
        for split, sentence in _draw(seed, max_draws=20 * sum(counts.values()) + 1000)
        if MIN_WORDS <= len(words_of(english := grammar.to_english(sentence))) <= MAX_WORDS
    )
    while len(pairs["train"]) < num_train:
        split, pair = next(draws)
        if split == "train":
            pairs["train"].setdefault(*pair)
    frequencies = Counter(word for pair in pairs["train"].items() for line in pair for word in words_of(line))
    threshold = min(MIN_OCCURRENCES, max(1, MIN_OCCURRENCES * num_train // _DEFAULT_NUM_TRAIN))
    while any(len(pairs[split]) < counts[split] for split in ("validation", "test")):
        split, pair = next(candidates)
        is_open = len(pairs[split]) < counts[split]
        if is_open and all(frequencies[word] >= threshold for line in pair for word in words_of(line)):
            pairs[split].setdefault(*pair)
    return {split: list(part.items()) for split, part in pairs.items()}


def write_demo_corpus(folder: str | Path, **arguments: int) -> dict[str, Path]:
    """Write train.tsv, validation.tsv and test.tsv of `make_demo_corpus` (English, tab, German) and return their paths."""
    return _write_splits(folder, make_demo_corpus(**arguments), "")


def _write_splits(folder: str | Path, corpus: dict[str, list[Pair]], prefix: str) -> dict[str, Path]:
    paths = {split: Path(folder) / f"{prefix}{split}.tsv" for split in SPLITS}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, path in paths.items():
        path.write_text("".join(f"{source}\t{target}\n" for source, target in corpus[split]), "utf-8", newline="\n")
    return paths


def core_of(sentence: Sentence) -> Sentence:
    """Return a sentence without its optional parts."""
    is_said = sentence.joined is not None and sentence.joined.conjunction is grammar.THAT
    clause = sentence.joined.clause if is_said else sentence.clause
    phrase = clause.phrase if clause.verb.needs_phrase else None
    nominals = {role: _core(getattr(clause, role)) for role in ("subject", "indirect_object", "direct_object")}
    phrase = phrase and replace(phrase, complement=_core(phrase.complement))
    return Sentence(replace(clause, **nominals, frequency=None, phrase=phrase), is_question=sentence.is_question)


def _core(nominal: grammar.Nominal | None) -> grammar.Nominal | None:
    match nominal:
        case grammar.Coordination():
            return grammar.Coordination(_core(nominal.first), _core(nominal.second))
        case NounPhrase():
            return replace(nominal, adjectives=(), relative=None, possessor=_core(nominal.possessor))
    return nominal


def make_demo_summaries(
    num_train: int = 15000, num_validation: int = 300, num_test: int = 500, seed: int = 1
) -> dict[str, list[Pair]]:
    """Make the pairs of text and summary, all distinct: `{"train": [(text, summary), ...], "validation": ..., "test": ...}`.

    A text has two or three English sentences. Its summary keeps subject, verb and objects of each, and of *I know that the dog
    sleeps* the subordinate clause. The text determines the summary, so exact match is a fair score. The splits are those of the
    corpus: no sentence of a training text has a held-out combination of words, and each sentence of a test text has one.
    """
    counts = dict(zip(SPLITS, (num_train, num_validation, num_test), strict=True))
    pairs: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    begun: dict[str, list[Sentence]] = {split: [] for split in SPLITS}
    lengths = dict.fromkeys(SPLITS, MIN_SENTENCES)
    draws = _draw(seed, max_draws=20 * MAX_SENTENCES * sum(counts.values()) + 1000)
    while any(len(pairs[split]) < count for split, count in counts.items()):
        split, sentence = next(draws)
        begun[split].append(sentence)
        if len(begun[split]) < lengths[split]:
            continue
        text, summary = (" ".join(map(grammar.to_english, part)) for part in (begun[split], map(core_of, begun[split])))
        if len(pairs[split]) < counts[split]:
            pairs[split][text] = summary
        begun[split] = []
        # Short and long texts alternate.
        lengths[split] = MIN_SENTENCES + MAX_SENTENCES - lengths[split]
    return {split: list(summaries.items()) for split, summaries in pairs.items()}


def write_demo_summaries(folder: str | Path, **arguments: int) -> dict[str, Path]:
    """Write summaries_train.tsv and so on (text, tab, summary), as `write_demo_corpus`."""
    return _write_splits(folder, make_demo_summaries(**arguments), "summaries_")
