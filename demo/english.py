"""The demo corpus in English: agreement, *a* and *an*, *do* in questions and negation, relative clauses."""

from metaphrase.demo import grammar
from metaphrase.demo.lexicon import BARE, BE, INDEFINITE, WANT, WHO


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
