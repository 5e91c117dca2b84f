"""English and German of the demo: word forms and word order."""

from typing import Literal

from metaphrase.demo import grammar
from metaphrase.demo.grammar import BARE, BE, DEFINITE, HAVE, INDEFINITE, NO, WANT, WHO


def to_english(sentence: grammar.Sentence) -> str:
    """Return a sentence in English."""
    words = _english_front(sentence.front) + _english_clause(sentence.clause, sentence.is_question)
    if sentence.subordinate:
        words += [sentence.subordinate.conjunction.english, *_english_clause(sentence.subordinate.clause)]
    if sentence.coordinated:
        conjunction, clause = sentence.coordinated
        words += [conjunction.english, *_english_clause(clause)]
    return grammar.punctuate(words, "?" if sentence.is_question else ".")


def _english_front(front: grammar.Particle | grammar.PrepositionalPhrase | grammar.Subordinate | None) -> list[str]:
    match front:
        case grammar.Particle():
            return [front.english]
        case grammar.PrepositionalPhrase():
            return _english_phrase(front)
        case grammar.Subordinate():
            return [front.conjunction.english, *_english_clause(front.clause), ","]
    return []


def _english_phrase(phrase: grammar.PrepositionalPhrase) -> list[str]:
    return [phrase.preposition.english, *english_nominal(phrase.complement, is_object=True)]


def english_nominal(nominal: grammar.Nominal, is_object: bool = False) -> list[str]:
    """Return a noun phrase or pronoun in English."""
    match nominal:
        case grammar.Pronoun():
            return [nominal.english_object if is_object else nominal.english]
        case grammar.RelativePronoun():
            if nominal.noun.kind != "person":
                return ["that"]
            return ["whom" if is_object else "who"]
        case grammar.Coordination():
            return [*english_nominal(nominal.first), "and", *english_nominal(nominal.second)]
    determiner = nominal.determiner
    article = determiner.plural if nominal.is_plural or determiner is BARE else determiner.singular
    words = [adjective.english for adjective in nominal.adjectives]
    words.append(nominal.noun.plural if nominal.is_plural else nominal.noun.english)
    if nominal.possessor:
        *owner, owner_noun = english_nominal(nominal.possessor)
        words = [*owner, owner_noun + "'s", *words]
    elif article:
        words.insert(0, "an" if determiner is INDEFINITE and words[0][0] in "aeiou" else article)
    return words + (_english_relative(nominal.relative) if nominal.relative else [])


def _english_relative(clause: grammar.Clause) -> list[str]:
    words = _english_clause(clause)
    if isinstance(clause.direct_object, grammar.RelativePronoun):
        return english_nominal(clause.direct_object, is_object=True) + words
    return words


def _english_clause(clause: grammar.Clause, is_question: bool = False) -> list[str]:
    """Return a clause in English, without a relative pronoun as object, which stands before the clause."""
    is_inverted = is_question and clause.subject is not WHO
    auxiliary, lexical = english_verb(clause, needs_auxiliary=is_inverted or clause.is_negated)
    subject = english_nominal(clause.subject)
    words = [*auxiliary, *subject] if is_inverted else [*subject, *auxiliary]
    if clause.is_negated:
        words = [*words[:-1], "cannot"] if words[-1] == "can" else [*words, "not"]
    if clause.frequency:
        words.append(clause.frequency.english)
    words += lexical
    for nominal in (clause.indirect_object, clause.direct_object):
        if nominal and not isinstance(nominal, grammar.RelativePronoun):
            words += english_nominal(nominal, is_object=True)
    if clause.predicate:
        words.append(clause.predicate.english)
    if clause.phrase:
        words += _english_phrase(clause.phrase)
    return words


def english_verb(clause: grammar.Clause, needs_auxiliary: bool) -> tuple[list[str], list[str]]:
    """Return the auxiliary, which precedes the subject in questions, and the rest of the verb."""
    subject, verb, modal = clause.subject, clause.verb, clause.modal
    is_third = subject.person == 3 and not subject.is_plural
    if modal is WANT:
        base, rest = "want", ["to", verb.english]
    elif modal:
        return [modal.english], [verb.english]
    elif verb is BE:
        return [_form_of_be(subject, clause.is_past)], []
    else:
        base, rest = verb.english, []
    if needs_auxiliary:
        return ["did" if clause.is_past else "does" if is_third else "do"], [base, *rest]
    if clause.is_past:
        return [], [verb.past]
    return [], [third_person_singular(base) if is_third else base, *rest]


def _form_of_be(subject: grammar.Nominal, is_past: bool) -> str:
    if subject.is_plural or subject.person == 2:
        return "were" if is_past else "are"
    if is_past:
        return "was"
    return "am" if subject.person == 1 else "is"


def third_person_singular(verb: str) -> str:
    """Return the third person singular: *carries*, *looks for*."""
    word, _, particle = verb.partition(" ")
    if word == "have":
        word = "has"
    elif word.endswith(("s", "sh", "ch", "x", "o")):
        word += "es"
    elif word.endswith("y") and word[-2] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return f"{word} {particle}".rstrip()


_PLURAL = 3  # the column after the three genders

# Rows: nominative, accusative, dative, genitive. Columns: masculine, feminine, neuter, plural. "-": no ending.
_DEFINITE = [row.split() for row in ("der die das die", "den die das die", "dem der dem den", "des der des der")]
_DETERMINER_ENDINGS = {
    grammar.Declension.WEAK: [row.split() for row in ("er e es e", "en e es e", "em er em en", "es er es er")],
    grammar.Declension.MIXED: [row.split() for row in ("- e - e", "en e - e", "em er em en", "es er es er")],
}
_ADJECTIVE_ENDINGS = {
    grammar.Declension.WEAK: [row.split() for row in ("e e e en", "en e e en", "en en en en", "en en en en")],
    grammar.Declension.MIXED: [row.split() for row in ("er e es en", "en e es en", "en en en en", "en en en en")],
    grammar.Declension.STRONG: [row.split() for row in ("er e es e", "en e es e", "em er em en", "en er en er")],
}


# Position of the finite verb in questions, in main clauses, and in subordinate clauses.
VerbPosition = Literal["first", "second", "last"]


def to_german(sentence: grammar.Sentence) -> str:
    """Return a sentence in German."""
    is_first = sentence.is_question and not sentence.front and sentence.clause.subject is not WHO
    position = "first" if is_first else "second"
    words = _german_clause(sentence.clause, position, _german_front(sentence.front))
    if sentence.subordinate:
        words += [",", *_german_subordinate(sentence.subordinate)]
    if sentence.coordinated:
        conjunction, clause = sentence.coordinated
        words += [conjunction.german, *_german_clause(clause, "second")]
    return grammar.punctuate(words, "?" if sentence.is_question else ".")


def _german_front(front: grammar.Particle | grammar.PrepositionalPhrase | grammar.Subordinate | None) -> list[str]:
    match front:
        case grammar.Particle():
            return [front.german]
        case grammar.PrepositionalPhrase():
            return german_phrase(front)
        case grammar.Subordinate():
            return [*_german_subordinate(front), ","]
    return []


def _german_subordinate(subordinate: grammar.Subordinate) -> list[str]:
    return [subordinate.conjunction.german, *_german_clause(subordinate.clause, "last")]


def german_phrase(phrase: grammar.PrepositionalPhrase) -> list[str]:
    """Return a prepositional phrase in German: *im Garten*, *zur Mutter*, but *auf dem Berg*."""
    preposition, complement = phrase.preposition, phrase.complement
    words = german_nominal(complement, preposition.case)
    fused = dict(preposition.contractions).get(words[0])
    if fused and isinstance(complement, grammar.NounPhrase) and complement.determiner is DEFINITE:
        return [fused, *words[1:]]
    return [preposition.german, *words]


def german_nominal(nominal: grammar.Nominal, case: grammar.Case, is_negated: bool = False) -> list[str]:
    """Return a noun phrase or pronoun in German, without its relative clause. Negation turns *ein* or no article into *kein*."""
    match nominal:
        case grammar.Pronoun():
            return [nominal.forms[case]]
        case grammar.RelativePronoun():
            column = _PLURAL if nominal.is_plural else nominal.noun.gender
            return ["denen" if column == _PLURAL and case == grammar.Case.DATIVE else _DEFINITE[case][column]]
        case grammar.Coordination():
            return [*german_nominal(nominal.first, case), "und", *german_nominal(nominal.second, case)]
    column = _PLURAL if nominal.is_plural else nominal.noun.gender
    determiner = NO if is_negated and nominal.determiner in (INDEFINITE, BARE) else nominal.determiner
    words = [german_determiner(determiner, case, column)] if determiner is not BARE else []
    words += [german_adjective(adjective, determiner.declension, case, column) for adjective in nominal.adjectives]
    words.append(german_noun(nominal.noun, nominal.is_plural, case))
    return words + (german_nominal(nominal.possessor, grammar.Case.GENITIVE) if nominal.possessor else [])


def german_determiner(determiner: grammar.Determiner, case: grammar.Case, column: int) -> str:
    """Return the form of a determiner; `column` is a gender, or 3 for the plural. Numbers from two on have no endings."""
    if determiner is DEFINITE:
        return _DEFINITE[case][column]
    if determiner.declension is grammar.Declension.STRONG:
        return determiner.stem
    return determiner.stem + _DETERMINER_ENDINGS[determiner.declension][case][column].strip("-")


def german_adjective(
    adjective: grammar.Adjective, declension: grammar.Declension, case: grammar.Case, column: int
) -> str:
    """Return an adjective before its noun; `column` is a gender, or 3 for the plural."""
    return adjective.stem + _ADJECTIVE_ENDINGS[declension][case][column]


def german_noun(noun: grammar.Noun, is_plural: bool, case: grammar.Case) -> str:
    """Return the form of a noun. The genitive in -(e)s follows the rule for the native nouns of this lexicon."""
    if is_plural:
        needs_n = case == grammar.Case.DATIVE and not noun.german_plural.endswith(("n", "s"))
        return noun.german_plural + ("n" if needs_n else "")
    if noun.is_weak and case != grammar.Case.NOMINATIVE:
        return noun.german_plural  # the ending -(e)n is that of the plural
    if case != grammar.Case.GENITIVE or noun.gender == grammar.Gender.FEMININE:
        return noun.german
    return noun.german + ("s" if noun.german.endswith(("er", "el", "en", "ig")) else "es")


def _german_clause(clause: grammar.Clause, position: VerbPosition, front: list[str] | None = None) -> list[str]:
    """Return a clause in German. `front` takes the place of the subject before a verb in second position."""
    finite, rest = german_verb(clause, is_last=position == "last")
    subject, final = [], []
    if not isinstance(clause.subject, grammar.RelativePronoun):
        relative = getattr(clause.subject, "relative", None)
        subject = german_nominal(clause.subject, grammar.Case.NOMINATIVE) + (
            _german_relative(relative) if relative else []
        )
    if relative := getattr(clause.direct_object, "relative", None):
        final = _german_relative(relative)
    middle = _german_middle_field(clause)
    match position:
        case "first":
            return [finite, *subject, *middle, *rest, *final]
        case "second" if front:
            return [*front, finite, *subject, *middle, *rest, *final]
        case "second":
            return [*subject, finite, *middle, *rest, *final]
        case "last":
            return [*subject, *middle, *rest, finite, *final]


def _german_relative(clause: grammar.Clause) -> list[str]:
    """Return a relative clause between commas: its pronoun, then the clause with the verb at the end."""
    if isinstance(clause.subject, grammar.RelativePronoun):
        pronoun = german_nominal(clause.subject, grammar.Case.NOMINATIVE)
    else:
        pronoun = german_nominal(clause.direct_object, clause.verb.case)
    return [",", *pronoun, *_german_clause(clause, "last"), ","]


def _german_middle_field(clause: grammar.Clause) -> list[str]:
    """Return the words between the finite verb and the rest of the verb, after the subject."""
    words = [clause.frequency.german] if clause.frequency else []
    if clause.indirect_object:
        words += german_nominal(clause.indirect_object, grammar.Case.DATIVE)
    direct = clause.direct_object
    if direct and not isinstance(direct, grammar.RelativePronoun):
        words += german_nominal(direct, clause.verb.case, clause.is_negated)
    negates_object = isinstance(direct, grammar.NounPhrase) and direct.determiner in (INDEFINITE, BARE)
    if clause.is_negated and not negates_object:
        words.append("nicht")
    if clause.phrase:
        words += german_phrase(clause.phrase)
    if clause.predicate:
        words.append(clause.predicate.german)
    return words


def german_verb(clause: grammar.Clause, is_last: bool = False) -> tuple[str, list[str]]:
    """Return the finite verb, and the infinitive, participle or separable particle at the end of the clause."""
    verb, subject, modal = clause.verb, clause.subject, clause.modal
    slot = 3 if subject.is_plural else subject.person - 1
    if modal:
        return modal.forms[slot], [verb.infinitive.replace("|", "")]
    if clause.is_past and verb.preterite_forms:
        return verb.preterite_forms[slot], []
    if clause.is_past:
        return german_present(BE if verb.auxiliary == "sein" else HAVE, slot), [verb.participle]
    particle = verb.infinitive.rpartition("|")[0]
    finite = german_present(verb, slot)
    if is_last:
        return particle + finite, []
    return finite, [particle] if particle else []


def german_present(verb: grammar.Verb, slot: int) -> str:
    """Return the present tense for ich, du, er or a plural (slots 0 to 3), without the separable particle.

    The second person has the vowel of the third; its -s- merges with an s, ß or z before it: *er isst*, *du isst*.
    """
    if verb.present_forms:
        return verb.present_forms[slot]
    infinitive = verb.infinitive.rpartition("|")[2]
    stem = verb.third[:-1]
    second = verb.third if stem.endswith(("s", "ß", "z")) else stem + "st"
    return (infinitive[:-1], second, verb.third, infinitive)[slot]
