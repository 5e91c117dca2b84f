"""Words and sentence structures of the demo, from which `languages` writes English and German."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path


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


_TEXT = Path(__file__).with_name("lexicon.txt").read_text(encoding="utf-8")
_TABLES = dict(table.split("]\n") for table in _TEXT.split("\n[")[1:])


def _rows(table: str) -> list[list[str]]:
    """Return the lines of a table of `lexicon.txt` as lists of cells; `_` is a blank inside a cell."""
    return [[cell.replace("_", " ") for cell in line.split()] for line in _TABLES[table].strip().splitlines()]


def _pairs(words: str) -> list[list[str]]:
    """Return the entries of a short list, each of two words."""
    return [entry.split() for entry in words.split(", ")]


# Names in the tables for several kinds of noun.
_SORTS = {
    "living": ("person", "animal"),
    "food": ("fruit", "dish", "pastry"),
    "things": ("clothing", "text", "machine", "container", "object"),
    "places": ("building", "landscape", "water"),
}


def _kinds(names: list[str]) -> tuple[str, ...]:
    """Return kinds of noun, with sorts expanded."""
    return tuple(kind for name in names for kind in _SORTS.get(name, (name,)))


_GENDERS = {"m": Gender.MASCULINE, "f": Gender.FEMININE, "n": Gender.NEUTER}

# Nouns without a possessor.
_UNOWNED_KINDS = ("landscape", "water")
_UNOWNED = ("man", "woman", "boy", "girl", "king", "queen")

NOUNS = tuple(
    Noun(
        english,
        None if plural == "-" else plural,
        german,
        None if german_plural == "-" else german_plural,
        _GENDERS["m" if gender == "w" else gender],
        kind,
        gender == "w",
        english not in _UNOWNED and kind not in _UNOWNED_KINDS,
        preposition[0] if preposition else None,
    )
    for english, plural, german, german_plural, gender, kind, *preposition in _rows("nouns")
)

_COLOURS = ("black", "white", "brown", "red", "green", "blue", "yellow")
_STATES = ("tired", "hungry", "happy", "sad", "sick", "friendly", "hot", "cold", "clean", "dirty", "quiet")

ADJECTIVES = tuple(
    Adjective(english, german, stem, frozenset(_kinds(kinds)), english in _COLOURS, english in _STATES)
    for english, german, stem, *kinds in _rows("adjectives")
)


def _verbs(table: str, case: Case = Case.ACCUSATIVE, is_ditransitive: bool = False) -> tuple[Verb, ...]:
    verbs = []
    for *forms, auxiliary, subjects, objects, phrase in _rows(table):
        objects = () if objects == "-" else _kinds(objects.split("+"))
        phrases = () if phrase == "-" else tuple(phrase.rstrip("!").split("+"))
        subjects = _kinds([subjects])
        verbs.append(Verb(*forms, auxiliary, case, subjects, objects, phrases, phrase.endswith("!"), is_ditransitive))
    return tuple(verbs)


INTRANSITIVE_VERBS = _verbs("intransitive verbs")
TRANSITIVE_VERBS = _verbs("transitive verbs")
DATIVE_VERBS = _verbs("dative verbs", Case.DATIVE)
DITRANSITIVE_VERBS = _verbs("ditransitive verbs", is_ditransitive=True)

# Verbs followed by a clause: *knows that ...*, *weiß, dass ...*
CLAUSE_VERBS = (
    Verb(
        *("know", "knew", "wissen", "weiß", "gewusst"),
        subjects=("person",),
        present_forms=("weiß", "weißt", "weiß", "wissen"),
        preterite_forms=("wusste", "wusstest", "wusste", "wussten"),
    ),
    *_verbs("clause verbs"),
)

KNOW = Verb(
    *("know", "knew", "kennen", "kennt", "gekannt"),
    subjects=("person",),
    objects=("person", "text", *_SORTS["places"]),
    preterite_forms=("kannte", "kanntest", "kannte", "kannten"),
)
HAVE = Verb(
    *("have", "had", "haben", "hat", "gehabt"),
    subjects=("person",),
    objects=("animal", *_SORTS["things"]),
    preterite_forms=("hatte", "hattest", "hatte", "hatten"),
)
BE = Verb(
    *("be", "was", "sein", "ist", "gewesen", "sein"),
    present_forms=("bin", "bist", "ist", "sind"),
    preterite_forms=("war", "warst", "war", "waren"),
)
VERBS = (*INTRANSITIVE_VERBS, *TRANSITIVE_VERBS, KNOW, HAVE, *DATIVE_VERBS, *DITRANSITIVE_VERBS, *CLAUSE_VERBS)

CAN, MUST, SHOULD, WANT = MODALS = (
    Modal("can", ("kann", "kannst", "kann", "können")),
    Modal("must", ("muss", "musst", "muss", "müssen"), negatable=False),
    Modal("should", ("sollte", "solltest", "sollte", "sollten")),
    Modal("want", ("will", "willst", "will", "wollen")),
)

DEFINITE = Determiner("the", "the", "d", Declension.WEAK)
THIS = Determiner("this", "these", "dies", Declension.WEAK)
EVERY = Determiner("every", None, "jed", Declension.WEAK)
INDEFINITE = Determiner("a", None, "ein", Declension.MIXED)
NO = Determiner("no", "no", "kein", Declension.MIXED)
POSSESSIVES = tuple(
    Determiner(english, english, stem, Declension.MIXED)
    for english, stem in _pairs("my mein, your dein, his sein, her ihr, our unser, their ihr")
)
NUMBERS = tuple(
    Determiner(None, english, german, Declension.STRONG)
    for english, german in _pairs("two zwei, three drei, four vier")
)
BARE = Determiner("", "", "", Declension.STRONG)

PRONOUNS = (
    Pronoun("I", "me", ("ich", "mich", "mir"), 1),
    Pronoun("you", "you", ("du", "dich", "dir"), 2),
    Pronoun("he", "him", ("er", "ihn", "ihm")),
    Pronoun("she", "her", ("sie", "sie", "ihr")),
    Pronoun("we", "us", ("wir", "uns", "uns"), 1, True),
    Pronoun("they", "them", ("sie", "sie", "ihnen"), 3, True),
)
WHO = Pronoun("who", "whom", ("wer", "wen", "wem"))

PREPOSITIONS = {
    "with": Preposition("with", "mit", Case.DATIVE),
    "without": Preposition("without", "ohne", Case.ACCUSATIVE),
    "for": Preposition("for", "für", Case.ACCUSATIVE),
    "in": Preposition("in", "in", Case.DATIVE, (("dem", "im"),)),
    "on": Preposition("on", "auf", Case.DATIVE),
    "to": Preposition("to", "zu", Case.DATIVE, (("dem", "zum"), ("der", "zur"))),
}

TODAY, YESTERDAY, TOMORROW, NOW = (
    Particle(*row) for row in _pairs("today heute, yesterday gestern, tomorrow morgen, now jetzt")
)
FREQUENCIES = tuple(Particle(*row) for row in _pairs("often oft, always immer, never nie, sometimes manchmal"))
WHY, WHERE, WHEN_QUESTION = (Particle(*row) for row in _pairs("why warum, where wo, when wann"))
BECAUSE, ALTHOUGH, WHEN, THAT = (
    Particle(*row) for row in _pairs("because weil, although obwohl, when wenn, that dass")
)
AND, BUT = Particle("and", "und"), Particle(", but", ", aber")
