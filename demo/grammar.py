"""Structures of the demo corpus: words, phrases and sentences, the same for both languages.

`english` and `german` write a sentence in each language. The words stand in `lexicon`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Case(IntEnum):
    """German cases, the rows of every declension table."""

    NOMINATIVE = 0
    ACCUSATIVE = 1
    DATIVE = 2
    GENITIVE = 3


class Gender(IntEnum):
    """German genders, the first columns of every declension table. The last column is the plural."""

    MASCULINE = 0
    FEMININE = 1
    NEUTER = 2


class Declension(Enum):
    """Adjective endings that a determiner requires."""

    WEAK = "weak"  # after der, dieser, jeder
    MIXED = "mixed"  # after ein, kein, mein
    STRONG = "strong"  # after nothing and after numbers


# Words are compared by identity: each word exists once, in the lexicon.
@dataclass(frozen=True, eq=False)
class Noun:
    """A noun; `plural` and `german_plural` are None for a mass noun. `kind` decides its combinations."""

    english: str
    plural: str | None
    german: str
    german_plural: str | None
    gender: Gender
    kind: str
    is_weak: bool = False  # the n-declension: der Junge, den Jungen
    can_be_owned: bool = True
    preposition: str | None = None  # of a place: *in* or *on*


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective; `stem` takes the endings (*dunkel*, *dunkl-*). `kinds` are the kinds of noun that fit."""

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
    # Irregular finite forms for ich, du, er, and the plural.
    present_forms: tuple[str, str, str, str] | None = None
    # Only for verbs with a preterite in spoken German: war, hatte, kannte, wusste.
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
    """A preposition and its complement."""

    preposition: Preposition
    complement: NounPhrase | Pronoun


@dataclass(frozen=True)
class Clause:
    """A subject, a verb and their complements. `frequency` is an adverb such as *often*, `predicate` follows *be*."""

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
    """A main clause with at most one part before it (`front`) and one after it."""

    clause: Clause
    front: Particle | PrepositionalPhrase | Subordinate | None = None
    subordinate: Subordinate | None = None
    coordinated: tuple[Particle, Clause] | None = None
    is_question: bool = False


def punctuate(words: list[str], mark: str) -> str:
    """Join words and commas to a line with a final mark, which replaces a comma before it."""
    text = " ".join(words).replace(" ,", ",").replace(",,", ",").rstrip(",") + mark
    return text[0].upper() + text[1:]
