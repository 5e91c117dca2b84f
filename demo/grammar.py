"""What words, phrases and sentences of the demo corpus are: one structure for both languages.

A sentence is built from these once and realised twice, by `metaphrase.demo.english` and
`metaphrase.demo.german`. Nothing here knows a word of either language: the words are in
`metaphrase.demo.lexicon`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Case(IntEnum):
    """The four German cases: the rows of every declension table."""

    NOMINATIVE = 0
    ACCUSATIVE = 1
    DATIVE = 2
    GENITIVE = 3


class Gender(IntEnum):
    """The three genders: the first columns of every declension table. The plural, without gender, is the last."""

    MASCULINE = 0
    FEMININE = 1
    NEUTER = 2


class Declension(Enum):
    """Which adjective endings a determiner calls for."""

    WEAK = "weak"  # after der, dieser, jeder
    MIXED = "mixed"  # after ein, kein, mein
    STRONG = "strong"  # after nothing and after numbers


# Words are compared by identity: each exists once, in the tables below.
@dataclass(frozen=True, eq=False)
class Noun:
    """A noun; `plural` and `german_plural` are None for a mass noun. `kind` says what it may be combined with."""

    english: str
    plural: str | None
    german: str
    german_plural: str | None
    gender: Gender
    kind: str
    is_weak: bool = False  # the n-declension: der Junge, den Jungen
    can_be_owned: bool = True
    preposition: str | None = None  # of a place: whether one is in it or on it


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective; `stem` takes the endings (*dunkel*, *dunkl-*). `kinds` are the kinds of noun that it describes."""

    english: str
    german: str
    stem: str
    kinds: frozenset[str]
    is_colour: bool = False
    is_state: bool = False  # it may come and go: *often tired*, but not *often old*


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb by its principal parts; English *look for* and German *an|rufen* carry their particle."""

    english: str
    past: str
    infinitive: str
    third: str
    participle: str
    auxiliary: str = "haben"
    case: Case = Case.ACCUSATIVE  # of the direct object
    subjects: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()  # the prepositional phrases that it takes
    needs_phrase: bool = False  # *live* and *go* say where
    is_ditransitive: bool = False
    # Finite forms for ich, du, er, and the plural, where no rule gives them.
    present_forms: tuple[str, str, str, str] | None = None
    # Given where even spoken German says the preterite rather than the perfect: war, hatte, kannte, wusste.
    preterite_forms: tuple[str, str, str, str] | None = None


@dataclass(frozen=True, eq=False)
class Modal:
    """A modal verb. `negatable` is False for *must*: *must not* forbids, *muss nicht* permits."""

    english: str
    forms: tuple[str, str, str, str]
    negatable: bool = True


@dataclass(frozen=True, eq=False)
class Determiner:
    """A determiner by its English forms and its German stem; a form that does not exist is None (*every*, plural)."""

    singular: str | None
    plural: str | None
    stem: str
    declension: Declension


@dataclass(frozen=True, eq=False)
class Pronoun:
    """A personal pronoun, or *who*. `forms` are nominative, accusative, dative."""

    english: str
    english_object: str
    forms: tuple[str, str, str]
    person: int = 3
    is_plural: bool = False


@dataclass(frozen=True, eq=False)
class Preposition:
    """A preposition with its case; `contractions` maps the definite article that follows to the fused word."""

    english: str
    german: str
    case: Case
    contractions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Particle:
    """An uninflected word: adverb, question word, conjunction."""

    english: str
    german: str


@dataclass(frozen=True)
class NounPhrase:
    """Determiner, adjectives and noun; `possessor` stands for the determiner (*the teacher's dog*)."""

    noun: Noun
    determiner: Determiner
    is_plural: bool = False
    adjectives: tuple[Adjective, ...] = ()
    possessor: NounPhrase | None = None
    relative: Clause | None = None
    person = 3


@dataclass(frozen=True)
class RelativePronoun:
    """The subject or object of a relative clause, with the gender and number of the noun that the clause describes."""

    noun: Noun
    is_plural: bool
    person = 3


@dataclass(frozen=True)
class Coordination:
    """Two noun phrases joined by *and*: a plural."""

    first: NounPhrase
    second: NounPhrase
    is_plural = True
    person = 3


Nominal = NounPhrase | RelativePronoun | Coordination | Pronoun


@dataclass(frozen=True)
class PrepositionalPhrase:
    """A preposition and what it governs."""

    preposition: Preposition
    complement: NounPhrase | Pronoun


@dataclass(frozen=True)
class Clause:
    """A subject, a verb and what goes with it. `frequency` is an adverb such as *often*, `predicate` follows *be*."""

    subject: Nominal
    verb: Verb
    is_past: bool = False
    modal: Modal | None = None
    is_negated: bool = False
    indirect_object: Nominal | None = None
    direct_object: Nominal | None = None
    predicate: Adjective | None = None
    frequency: Particle | None = None
    phrase: PrepositionalPhrase | None = None


@dataclass(frozen=True)
class Subordinate:
    """A clause introduced by a conjunction: *because the dog sleeps*."""

    conjunction: Particle
    clause: Clause


@dataclass(frozen=True)
class Sentence:
    """A main clause with at most one thing before it (`front`) and one after it."""

    clause: Clause
    front: Particle | PrepositionalPhrase | Subordinate | None = None
    subordinate: Subordinate | None = None
    coordinated: tuple[Particle, Clause] | None = None
    is_question: bool = False


def punctuate(words: list[str], mark: str) -> str:
    """One line from words and commas: a comma clings to the word before it and gives way to the final mark."""
    text = " ".join(words).replace(" ,", ",").replace(",,", ",").rstrip(",") + mark
    return text[0].upper() + text[1:]
