"""The words of the demo corpus: a small English-German dictionary.

Every English word has one German counterpart. An entry gives what no rule derives: a noun its gender and plural, a verb its
principal parts (infinitive, third person singular, past participle), and the kinds of noun that go with it. `english` and
`german` derive the other forms. Nouns, adjectives and regular verbs stand in the tables of `lexicon.txt`.

English words whose form hides what German must know are absent: *sheep* (singular or plural), *read* (present or past), *it*
(gender of the antecedent). *You* is always one friend (*du*).
"""

from pathlib import Path

from metaphrase.demo.grammar import (
    Adjective,
    Case,
    Declension,
    Determiner,
    Gender,
    Modal,
    Noun,
    Particle,
    Preposition,
    Pronoun,
    Verb,
)

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
