"""Words and sentence structures of the demo, which `languages` writes in English and German."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Rows of every German declension table, and its columns: three genders and the plural.
CASES = NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)
MASCULINE, FEMININE, NEUTER, PLURAL = range(4)
# Finite forms for ich, du, er, and the plural.
Forms = tuple[str, ...]


# Words are compared by identity: each word exists once, in the lexicon.
@dataclass(frozen=True, eq=False)
class Noun:
    """A noun; `plural` and `german_plural` are None for a mass noun. `kind` decides its combinations."""

    english: str
    plural: str | None
    german: str
    german_plural: str | None
    gender: int
    kind: str
    is_weak: bool  # the n-declension: der Junge, den Jungen
    can_be_owned: bool
    preposition: str | None  # of a place: *in* or *on*


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective; `stem` takes the endings (*dunkel*, *dunkl-*). `kinds` are the kinds of noun that fit."""

    english: str
    german: str
    stem: str
    kinds: tuple[str, ...]
    is_colour: bool
    is_state: bool  # it may come and go: *often tired*, but not *often old*


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb by its principal parts; English *look for* and German *an|rufen* carry their particle."""

    english: str
    past: str
    infinitive: str
    third: str
    participle: str
    auxiliary: str
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    phrases: tuple[str, ...]  # the prepositional phrases that it takes
    needs_phrase: bool  # *live* and *go* say where
    case: int  # of the direct object
    is_ditransitive: bool
    present_forms: Forms | None = None  # if they are irregular
    preterite_forms: Forms | None = None  # if spoken German uses them: war, hatte, kannte, wusste


@dataclass(frozen=True, eq=False)
class Modal:
    """A modal verb."""

    english: str
    forms: Forms


@dataclass(frozen=True, eq=False)
class Determiner:
    """A determiner by its English forms, None if there is none (*every*, plural), and its German stem.

    `kind` is "full" with an ending in every form, "mixed" as *ein*, and "bare" without endings.
    """

    singular: str | None
    plural: str | None
    stem: str
    kind: str


@dataclass(frozen=True, eq=False)
class Pronoun:
    """A personal pronoun, or *who*. `forms` are nominative, accusative, dative."""

    english: str
    english_object: str
    forms: Forms
    person: int
    is_plural: bool


@dataclass(frozen=True, eq=False)
class Preposition:
    """A preposition with its case, and the articles that it fuses with: *zu* and *dem* to *zum*."""

    english: str
    german: str
    case: int
    contractions: dict[str, str]


@dataclass(frozen=True, eq=False)
class Particle:
    """An uninflected word: adverb, question word, conjunction with its comma."""

    english: str
    german: str


@dataclass(frozen=True)
class NounPhrase:
    """Determiner, adjectives and noun; `possessor` stands for the determiner (*the teacher's dog*).

    With the determiner `RELATIVE`, it is the pronoun of a relative clause that describes the noun.
    """

    noun: Noun
    determiner: Determiner
    is_plural: bool = False
    adjectives: tuple[Adjective, ...] = ()
    possessor: NounPhrase | None = None
    relative: Clause | None = None
    person = 3


@dataclass(frozen=True)
class Coordination:
    """Two noun phrases joined by *and*: a plural."""

    first: NounPhrase
    second: NounPhrase
    is_plural = True
    person = 3


Nominal = NounPhrase | Coordination | Pronoun


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
class JoinedClause:
    """A clause with its conjunction: *because the dog sleeps*, *and the dog sleeps*."""

    conjunction: Particle
    clause: Clause


@dataclass(frozen=True)
class Sentence:
    """A main clause with at most one part before it (`front`) and one clause after it (`joined`)."""

    clause: Clause
    front: Particle | PrepositionalPhrase | JoinedClause | None = None
    joined: JoinedClause | None = None
    is_question: bool = False


_TEXT = Path(__file__).with_name("lexicon.txt").read_text(encoding="utf-8")
_TABLES = dict(table.split("]\n") for table in _TEXT.split("\n[")[1:])


def _rows(table: str) -> list[list[str | None]]:
    """Return the lines of a table of `lexicon.txt` as lists of cells."""
    lines = _TABLES[table].strip().splitlines()
    return [[None if cell == "-" else cell.replace("_", " ") for cell in line.split()] for line in lines]


# Names in the tables for several kinds of noun.
_SORTS = {
    "living": ("person", "animal"),
    "food": ("fruit", "dish", "pastry"),
    "things": ("clothing", "text", "machine", "container", "object"),
    "places": ("building", "landscape", "water"),
}


def _kinds(names: str | None) -> tuple[str, ...]:
    """Return the kinds of noun in a cell, with sorts expanded."""
    return tuple(kind for name in (names or "").split("+") if name for kind in _SORTS.get(name, (name,)))


# Nouns without a possessor.
_UNOWNED_KINDS = ("landscape", "water")
_UNOWNED = ("man", "woman", "boy", "girl", "king", "queen")
NOUNS = tuple(
    Noun(
        *(english, plural, german, german_plural, "mfn".index(gender[0]), kind),
        is_weak=gender == "mw",
        can_be_owned=english not in _UNOWNED and kind not in _UNOWNED_KINDS,
        preposition=next(iter(preposition), None),
    )
    for english, plural, german, german_plural, gender, kind, *preposition in _rows("nouns")
)

_COLOURS = ("black", "white", "brown", "red", "green", "blue", "yellow")
_STATES = ("tired", "hungry", "happy", "sad", "sick", "friendly", "hot", "cold", "clean", "dirty", "quiet")
ADJECTIVES = tuple(
    Adjective(english, german, stem, _kinds(kinds), english in _COLOURS, english in _STATES)
    for english, german, stem, kinds in _rows("adjectives")
)


def _verbs(table: str, case: int = ACCUSATIVE, is_ditransitive: bool = False) -> tuple[Verb, ...]:
    verbs = []
    for row in _rows(table):
        *forms, auxiliary, subjects, objects, phrases = row[:9]
        irregular = [cell and tuple(cell.split("/")) for cell in row[9:]]
        phrases, needs_phrase = (phrases or "").rstrip("!"), (phrases or "").endswith("!")
        kinds = _kinds(subjects), _kinds(objects), _kinds(phrases)
        verbs.append(Verb(*forms, auxiliary, *kinds, needs_phrase, case, is_ditransitive, *irregular))
    return tuple(verbs)


INTRANSITIVE_VERBS = _verbs("intransitive verbs")
DITRANSITIVE_VERBS = _verbs("ditransitive verbs", is_ditransitive=True)
OBJECT_VERBS = (*_verbs("transitive verbs"), *_verbs("dative verbs", DATIVE))
# Verbs followed by a clause: *knows that ...*, *weiß, dass ...*
CLAUSE_VERBS = _verbs("clause verbs")
VERBS = (*INTRANSITIVE_VERBS, *OBJECT_VERBS, *DITRANSITIVE_VERBS, *CLAUSE_VERBS)
[BE] = _verbs("copula")
HAVE = next(verb for verb in VERBS if verb.english == "have")

CAN, MUST, SHOULD, WANT = MODALS = tuple(Modal(english, tuple(forms)) for english, *forms in _rows("modals"))
DETERMINERS = tuple(Determiner(*row) for row in _rows("determiners"))
DEFINITE, THIS, EVERY, INDEFINITE, NO, *_OTHERS = DETERMINERS
POSSESSIVES, NUMBERS = tuple(_OTHERS[:6]), tuple(_OTHERS[6:])
BARE, RELATIVE = (Determiner("", "", "", "bare") for _ in range(2))
*PRONOUNS, WHO = (
    Pronoun(english, english_object, tuple(forms.split("/")), int(person), number == "plural")
    for english, english_object, forms, person, number in _rows("pronouns")
)
PREPOSITIONS = {
    row[0]: Preposition(*row[:2], ("accusative", "dative").index(row[2]) + 1, dict(cell.split("=") for cell in row[3:]))
    for row in _rows("prepositions")
}
TODAY, YESTERDAY, TOMORROW, NOW, WHY, WHERE, WHEN_QUESTION, BECAUSE, ALTHOUGH, WHEN, THAT, AND, BUT, *FREQUENCIES = (
    Particle(*row) for row in _rows("particles")
)
