"""English and German of the demo: word forms and word order."""

from collections.abc import Callable
from typing import Literal

from metaphrase.demo import grammar
from metaphrase.demo.grammar import BARE, BE, DATIVE, DEFINITE, INDEFINITE, NOMINATIVE, PLURAL, RELATIVE, WHO

# Decides the places of verb and subject. A fronted clause follows something that takes the first place.
Order = Literal["plain", "fronted", "question", "subordinate"]


def to_english(sentence: grammar.Sentence) -> str:
    """Return a sentence in English."""
    return _write(sentence, "english", _english_clause, _english_phrase)


def to_german(sentence: grammar.Sentence) -> str:
    """Return a sentence in German."""
    return _write(sentence, "german", _german_clause, _german_phrase)


def _write(sentence: grammar.Sentence, language: str, write_clause: Callable, write_phrase: Callable) -> str:
    def write_joined(joined: grammar.JoinedClause) -> list[str]:
        order = "plain" if joined.conjunction in (grammar.AND, grammar.BUT) else "subordinate"
        return [getattr(joined.conjunction, language), *write_clause(joined.clause, order)]

    words = []
    match sentence.front:
        case grammar.Particle():
            words = [getattr(sentence.front, language)]
        case grammar.PrepositionalPhrase():
            words = write_phrase(sentence.front)
        case grammar.JoinedClause():
            words = [*write_joined(sentence.front), ","]
    is_inverted = sentence.is_question and sentence.clause.subject is not WHO
    words += write_clause(sentence.clause, "question" if is_inverted else "fronted" if sentence.front else "plain")
    words += write_joined(sentence.joined) if sentence.joined else []
    # A final mark or a second comma replaces a comma before it.
    text = " ".join(words).replace(" ,", ",").replace(",,", ",").strip(", ")
    return text[0].upper() + text[1:] + ("?" if sentence.is_question else ".")


def _english_clause(clause: grammar.Clause, order: Order = "plain") -> list[str]:
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


def _is_relative(nominal: grammar.Nominal | None) -> bool:
    return isinstance(nominal, grammar.NounPhrase) and nominal.determiner is RELATIVE


def _english_verb(clause: grammar.Clause, needs_auxiliary: bool) -> tuple[list[str], list[str]]:
    """Return the auxiliary, which precedes the subject in questions, and the rest of the verb."""
    subject, verb, modal = clause.subject, clause.verb, clause.modal
    is_third = subject.person == 3 and not subject.is_plural
    if modal and modal is not grammar.WANT:
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


def _english_phrase(phrase: grammar.PrepositionalPhrase) -> list[str]:
    return [phrase.preposition.english, *_english_nominal(phrase.complement, is_object=True)]


def _english_nominal(nominal: grammar.Nominal, is_object: bool = False) -> list[str]:
    """Return a noun phrase or pronoun in English."""
    match nominal:
        case grammar.Pronoun():
            return [nominal.english_object if is_object else nominal.english]
        case grammar.Coordination():
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


def _german_clause(clause: grammar.Clause, order: Order) -> list[str]:
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


def _german_relative(nominal: grammar.Nominal) -> list[str]:
    """Return the relative clause of a noun phrase between commas: its pronoun, then the clause with the verb at the end."""
    clause = getattr(nominal, "relative", None)
    if clause is None:
        return []
    is_subject = _is_relative(clause.subject)
    pronoun, case = (clause.subject, NOMINATIVE) if is_subject else (clause.direct_object, clause.verb.case)
    return [",", *german_nominal(pronoun, case), *_german_clause(clause, "subordinate"), ","]


def _german_verb(clause: grammar.Clause, is_last: bool) -> tuple[str, list[str]]:
    """Return the finite verb, and the infinitive, participle or separable particle at the end of the clause."""
    verb, subject = clause.verb, clause.subject
    slot = 3 if subject.is_plural else subject.person - 1
    if clause.modal:
        return clause.modal.forms[slot], [verb.infinitive.replace("|", "")]
    if clause.is_past and verb.preterite_forms:
        return verb.preterite_forms[slot], []
    if clause.is_past:
        return german_present(BE if verb.auxiliary == "sein" else grammar.HAVE, slot), [verb.participle]
    particle, finite = verb.infinitive.rpartition("|")[0], german_present(verb, slot)
    if is_last:
        return particle + finite, []
    return finite, [particle] if particle else []


def german_present(verb: grammar.Verb, slot: int) -> str:
    """Return the present tense for ich, du, er or a plural (slots 0 to 3), without the separable particle.

    The second person has the vowel of the third; its -s- merges with an s, ß or z before it: *er isst*, *du isst*.
    """
    if verb.present_forms:
        return verb.present_forms[slot]
    infinitive, stem = verb.infinitive.rpartition("|")[2], verb.third[:-1]
    second = verb.third if stem.endswith(("s", "ß", "z")) else stem + "st"
    return (infinitive[:-1], second, verb.third, infinitive)[slot]


def _german_phrase(phrase: grammar.PrepositionalPhrase) -> list[str]:
    """Return a prepositional phrase in German: *im Garten*, *zur Mutter*, but *auf dem Berg*."""
    preposition, complement = phrase.preposition, phrase.complement
    first, *words = german_nominal(complement, preposition.case)
    if getattr(complement, "determiner", None) is DEFINITE and first in preposition.contractions:
        return [preposition.contractions[first], *words]
    return [preposition.german, first, *words]


def german_nominal(nominal: grammar.Nominal, case: int, is_negated: bool = False) -> list[str]:
    """Return a noun phrase or pronoun in German, without its relative clause. Negation turns *ein* or no article into *kein*."""
    match nominal:
        case grammar.Pronoun():
            return [nominal.forms[case]]
        case grammar.Coordination():
            return [*german_nominal(nominal.first, case), "und", *german_nominal(nominal.second, case)]
    determiner, column = nominal.determiner, PLURAL if nominal.is_plural else nominal.noun.gender
    if determiner is RELATIVE:
        return ["denen" if (case, column) == (DATIVE, PLURAL) else _ARTICLES[case][column]]
    if is_negated and determiner in (INDEFINITE, BARE):
        determiner = grammar.NO
    article = _german_determiner(determiner, case, column)
    endings = _FULL_ENDINGS if article == determiner.stem else _WEAK_ENDINGS
    words = [article] if article else []
    words += [adjective.stem + endings[case][column] for adjective in nominal.adjectives]
    words.append(german_noun(nominal.noun, nominal.is_plural, case))
    return words + (german_nominal(nominal.possessor, grammar.GENITIVE) if nominal.possessor else [])


def _german_determiner(determiner: grammar.Determiner, case: int, column: int) -> str:
    if determiner is DEFINITE:
        return _ARTICLES[case][column]
    # *ein Hund, ein Haus*, but *einen Hund*.
    columns = {NOMINATIVE: (grammar.MASCULINE, grammar.NEUTER), grammar.ACCUSATIVE: (grammar.NEUTER,)}
    if determiner.kind == "bare" or (determiner.kind == "mixed" and column in columns.get(case, ())):
        return determiner.stem
    return determiner.stem + _FULL_ENDINGS[case][column]


def german_noun(noun: grammar.Noun, is_plural: bool, case: int) -> str:
    """Return the form of a noun. The genitive in -(e)s follows the rule for the native nouns of this lexicon."""
    if is_plural:
        needs_n = case == DATIVE and not noun.german_plural.endswith(("n", "s"))
        return noun.german_plural + ("n" if needs_n else "")
    if noun.is_weak and case != NOMINATIVE:
        return noun.german_plural  # the ending -(e)n is that of the plural
    if case != grammar.GENITIVE or noun.gender == grammar.FEMININE:
        return noun.german
    return noun.german + ("s" if noun.german.endswith(("er", "el", "en", "ig")) else "es")
