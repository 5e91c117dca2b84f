"""Words and sentence structures of the demo, and how English and German write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
class Particle:  # adverb, question word, conjunction with its comma
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
    conjunction: Particle  # *because*, *and*
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


# Decides the places of verb and subject. A fronted clause follows something that takes the first place.
Order = Literal["plain", "fronted", "question", "subordinate"]


def to_english(sentence: Sentence) -> str:
    return _write(sentence, "english", _english_clause, _english_phrase)


def to_german(sentence: Sentence) -> str:
    return _write(sentence, "german", _german_clause, _german_phrase)


def _write(sentence: Sentence, language: str, write_clause: Callable, write_phrase: Callable) -> str:
    def write_joined(joined: JoinedClause) -> list[str]:
        order = "plain" if joined.conjunction in (AND, BUT) else "subordinate"
        return [getattr(joined.conjunction, language), *write_clause(joined.clause, order)]

    words = []
    match sentence.front:
        case Particle():
            words = [getattr(sentence.front, language)]
        case PrepositionalPhrase():
            words = write_phrase(sentence.front)
        case JoinedClause():
            words = [*write_joined(sentence.front), ","]
    is_inverted = sentence.is_question and sentence.clause.subject is not WHO
    words += write_clause(sentence.clause, "question" if is_inverted else "fronted" if sentence.front else "plain")
    words += write_joined(sentence.joined) if sentence.joined else []
    # A final mark or a second comma replaces a comma before it.
    text = " ".join(words).replace(" ,", ",").replace(",,", ",").strip(", ")
    return text[0].upper() + text[1:] + ("?" if sentence.is_question else ".")


def _english_clause(clause: Clause, order: Order = "plain") -> list[str]:
    """Return a clause in English, without a relative pronoun as object, which stands before the clause."""
    is_inverted = order == "question"
    auxiliary, lexical = _english_verb(clause, needs_auxiliary=is_inverted or clause.is_negated)
    subject = _english_nominal(clause.subject)
    words = [*auxiliary, *subject] if is_inverted else [*subject, *auxiliary]
    if clause.is_negated:
        words = [*words[:-1], "cannot"] if words[-1] == "can" else [*words, "not"]
    words += [clause.frequency.english] if clause.frequency else []
    words += lexical
    for nominal in (clause.indirect_object, clause.direct_object):
        if nominal and not _is_relative(nominal):
            words += _english_nominal(nominal, is_object=True)
    words += [clause.predicate.english] if clause.predicate else []
    return words + (_english_phrase(clause.phrase) if clause.phrase else [])


def _is_relative(nominal: Nominal | None) -> bool:
    return isinstance(nominal, NounPhrase) and nominal.determiner is RELATIVE


def _english_verb(clause: Clause, needs_auxiliary: bool) -> tuple[list[str], list[str]]:
    """Return the auxiliary, which precedes the subject in questions, and the rest of the verb."""
    subject, verb, modal = clause.subject, clause.verb, clause.modal
    is_third = subject.person == 3 and not subject.is_plural
    if modal and modal is not WANT:
        return [modal.english], [verb.english]
    if verb is BE and not modal:
        row = "are" if subject.is_plural or subject.person == 2 else "am" if subject.person == 1 else "is"
        return [("were" if row == "are" else "was") if clause.is_past else row], []
    base, rest = ("want", ["to", verb.english]) if modal else (verb.english, [])
    if needs_auxiliary:
        return ["did" if clause.is_past else "does" if is_third else "do"], [base, *rest]
    if clause.is_past:
        return [], [verb.past]
    return [], [third_person_singular(base) if is_third else base, *rest]


def third_person_singular(verb: str) -> str:
    """Return the third person singular: *carries*, *looks for*."""
    word, *particle = verb.split()
    if word == "have":
        word = "has"
    elif word.endswith(("s", "sh", "ch", "x", "o")):
        word += "es"
    elif word.endswith("y") and word[-2] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return " ".join([word, *particle])


def _english_phrase(phrase: PrepositionalPhrase) -> list[str]:
    return [phrase.preposition.english, *_english_nominal(phrase.complement, is_object=True)]


def _english_nominal(nominal: Nominal, is_object: bool = False) -> list[str]:
    match nominal:
        case Pronoun():
            return [nominal.english_object if is_object else nominal.english]
        case Coordination():
            return [*_english_nominal(nominal.first), "and", *_english_nominal(nominal.second)]
    noun, determiner = nominal.noun, nominal.determiner
    if determiner is RELATIVE:
        return ["that" if noun.kind != "person" else WHO.english_object if is_object else WHO.english]
    words = [adjective.english for adjective in nominal.adjectives]
    words.append(noun.plural if nominal.is_plural else noun.english)
    article = determiner.plural if nominal.is_plural else determiner.singular
    if nominal.possessor:
        *owner, owner_noun = _english_nominal(nominal.possessor)
        words = [*owner, owner_noun + "'s", *words]
    elif article:
        words.insert(0, "an" if determiner is INDEFINITE and words[0][0] in "aeiou" else article)
    if relative := nominal.relative:
        if _is_relative(relative.direct_object):
            words += _english_nominal(relative.direct_object, is_object=True)
        words += _english_clause(relative)
    return words


# Rows: nominative, accusative, dative, genitive. Columns: masculine, feminine, neuter, plural.
_ARTICLES = [row.split() for row in ("der die das die", "den die das die", "dem der dem den", "des der des der")]
_FULL_ENDINGS = [row.split() for row in ("er e es e", "en e es e", "em er em en", "es er es er")]
# After a determiner that shows the case.
_WEAK_ENDINGS = [row.split() for row in ("e e e en", "en e e en", "en en en en", "en en en en")]


def _german_clause(clause: Clause, order: Order) -> list[str]:
    """Return a clause in German. The finite verb has the first place after a front and in questions, else the second or last."""
    finite, rest = _german_verb(clause, is_last=order == "subordinate")
    subject, final = [], []
    if not _is_relative(clause.subject):
        subject = german_nominal(clause.subject, NOMINATIVE) + _german_relative(clause.subject)
    middle = [clause.frequency.german] if clause.frequency else []
    if clause.indirect_object:
        middle += german_nominal(clause.indirect_object, DATIVE)
    direct = clause.direct_object
    if direct and not _is_relative(direct):
        middle += german_nominal(direct, clause.verb.case, clause.is_negated)
        final = _german_relative(direct)
    if clause.is_negated and getattr(direct, "determiner", None) not in (INDEFINITE, BARE):
        middle.append("nicht")
    middle += _german_phrase(clause.phrase) if clause.phrase else []
    middle += [clause.predicate.german] if clause.predicate else []
    match order:
        case "subordinate":
            return [*subject, *middle, *rest, finite, *final]
        case "plain":
            return [*subject, finite, *middle, *rest, *final]
    return [finite, *subject, *middle, *rest, *final]


def _german_relative(nominal: Nominal) -> list[str]:
    """Return the relative clause of a noun phrase between commas: its pronoun, then the clause with the verb at the end."""
    clause = getattr(nominal, "relative", None)
    if clause is None:
        return []
    is_subject = _is_relative(clause.subject)
    pronoun, case = (clause.subject, NOMINATIVE) if is_subject else (clause.direct_object, clause.verb.case)
    return [",", *german_nominal(pronoun, case), *_german_clause(clause, "subordinate"), ","]


def _german_verb(clause: Clause, is_last: bool) -> tuple[str, list[str]]:
    """Return the finite verb, and the infinitive, participle or separable particle at the end of the clause."""
    verb, subject = clause.verb, clause.subject
    slot = 3 if subject.is_plural else subject.person - 1
    if clause.modal:
        return clause.modal.forms[slot], [verb.infinitive.replace("|", "")]
    if clause.is_past and verb.preterite_forms:
        return verb.preterite_forms[slot], []
    if clause.is_past:
        return german_present(BE if verb.auxiliary == "sein" else HAVE, slot), [verb.participle]
    particle, finite = verb.infinitive.rpartition("|")[0], german_present(verb, slot)
    if is_last:
        return particle + finite, []
    return finite, [particle] if particle else []


def german_present(verb: Verb, slot: int) -> str:
    """Return the present tense for ich, du, er or a plural (slots 0 to 3), without the separable particle.

    The second person has the vowel of the third; its -s- merges with an s, ß or z before it: *er isst*, *du isst*.
    """
    if verb.present_forms:
        return verb.present_forms[slot]
    infinitive, stem = verb.infinitive.rpartition("|")[2], verb.third[:-1]
    second = verb.third if stem.endswith(("s", "ß", "z")) else stem + "st"
    return (infinitive[:-1], second, verb.third, infinitive)[slot]


def _german_phrase(phrase: PrepositionalPhrase) -> list[str]:
    """Return a prepositional phrase in German: *im Garten*, *zur Mutter*, but *auf dem Berg*."""
    preposition, complement = phrase.preposition, phrase.complement
    first, *words = german_nominal(complement, preposition.case)
    if getattr(complement, "determiner", None) is DEFINITE and first in preposition.contractions:
        return [preposition.contractions[first], *words]
    return [preposition.german, first, *words]


def german_nominal(nominal: Nominal, case: int, is_negated: bool = False) -> list[str]:
    """Return a noun phrase or pronoun in German, without its relative clause. Negation turns *ein* or no article into *kein*."""
    match nominal:
        case Pronoun():
            return [nominal.forms[case]]
        case Coordination():
            return [*german_nominal(nominal.first, case), "und", *german_nominal(nominal.second, case)]
    determiner, column = nominal.determiner, PLURAL if nominal.is_plural else nominal.noun.gender
    if determiner is RELATIVE:
        return ["denen" if (case, column) == (DATIVE, PLURAL) else _ARTICLES[case][column]]
    if is_negated and determiner in (INDEFINITE, BARE):
        determiner = NO
    article = _german_determiner(determiner, case, column)
    endings = _FULL_ENDINGS if article == determiner.stem else _WEAK_ENDINGS
    words = [article] if article else []
    words += [adjective.stem + endings[case][column] for adjective in nominal.adjectives]
    words.append(german_noun(nominal.noun, nominal.is_plural, case))
    return words + (german_nominal(nominal.possessor, GENITIVE) if nominal.possessor else [])


def _german_determiner(determiner: Determiner, case: int, column: int) -> str:
    if determiner is DEFINITE:
        return _ARTICLES[case][column]
    # *ein Hund, ein Haus*, but *einen Hund*.
    is_short = (case == NOMINATIVE and column in (MASCULINE, NEUTER)) or (case, column) == (ACCUSATIVE, NEUTER)
    if determiner.kind == "bare" or (determiner.kind == "mixed" and is_short):
        return determiner.stem
    return determiner.stem + _FULL_ENDINGS[case][column]


def german_noun(noun: Noun, is_plural: bool, case: int) -> str:
    """Return the form of a noun. The genitive in -(e)s follows the rule for the native nouns of this lexicon."""
    if is_plural:
        needs_n = case == DATIVE and not noun.german_plural.endswith(("n", "s"))
        return noun.german_plural + ("n" if needs_n else "")
    if noun.is_weak and case != NOMINATIVE:
        return noun.german_plural  # the ending -(e)n is that of the plural
    if case != GENITIVE or noun.gender == FEMININE:
        return noun.german
    return noun.german + ("s" if noun.german.endswith(("er", "el", "en", "ig")) else "es")
