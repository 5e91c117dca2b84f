"""Structures of the demo grammar from words: what its tests are written in."""

from dataclasses import replace

from metaphrase.demo import grammar as lexicon
from metaphrase.demo.grammar import (
    ADJECTIVES,
    BE,
    NOUNS,
    PREPOSITIONS,
    VERBS,
    Clause,
    Coordination,
    NounPhrase,
    PrepositionalPhrase,
    RelativePronoun,
    Sentence,
)

ARTICLES = (lexicon.DEFINITE, lexicon.THIS, lexicon.EVERY, lexicon.INDEFINITE, lexicon.NO)
DETERMINERS = {
    form: determiner
    for determiner in (*ARTICLES, *lexicon.POSSESSIVES, *lexicon.NUMBERS)
    for form in (determiner.singular, determiner.plural)
} | {"an": lexicon.INDEFINITE}
NOUN_OF = {noun.english: (noun, False) for noun in NOUNS} | {noun.plural: (noun, True) for noun in NOUNS}
ADJECTIVE_OF = {adjective.english: adjective for adjective in ADJECTIVES}
PRONOUN_OF = {word.english: word for word in (*lexicon.PRONOUNS, lexicon.WHO)} | {
    word.english_object: word for word in lexicon.PRONOUNS
}
VERB_OF = {verb.english: verb for verb in reversed((*VERBS, BE))}
SAY_OF = {verb.english: verb for verb in lexicon.CLAUSE_VERBS}


def phrase(text: str, **parts) -> NounPhrase:
    """ "the small black cats" -> its structure; also a pronoun, and "the king's dog"."""
    if text in PRONOUN_OF:
        return PRONOUN_OF[text]
    if " and " in text:
        return Coordination(*(phrase(half) for half in text.split(" and ")))
    if "'s " in text:
        owner, rest = text.split("'s ")
        return replace(phrase(f"the {rest}"), possessor=phrase(owner))
    *words, head = text.split()
    determiner = DETERMINERS[words.pop(0)] if words and words[0] in DETERMINERS else lexicon.BARE
    noun, is_plural = NOUN_OF[head]
    return NounPhrase(noun, determiner, is_plural, tuple(ADJECTIVE_OF[word] for word in words), **parts)


def clause(subject, verb, direct_object=None, **parts) -> Clause:
    """A clause from words: subject and objects as `phrase` reads them, the verb in its base form."""
    for name, convert in (("indirect_object", phrase), ("predicate", ADJECTIVE_OF.get), ("phrase", prepositional)):
        if isinstance(parts.get(name), str):
            parts[name] = convert(parts[name])
    subject, direct_object = (phrase(text) if isinstance(text, str) else text for text in (subject, direct_object))
    return Clause(subject, VERB_OF[verb] if isinstance(verb, str) else verb, direct_object=direct_object, **parts)


def prepositional(text: str) -> PrepositionalPhrase:
    preposition, rest = text.split(" ", 1)
    return PrepositionalPhrase(PREPOSITIONS[preposition], phrase(rest))


def who(text: str) -> RelativePronoun:
    """The relative pronoun of the noun in `text`."""
    noun, is_plural = NOUN_OF[text]
    return RelativePronoun(noun, is_plural)


def statement(*words, front=None, subordinate=None, coordinated=None, **parts) -> Sentence:
    return Sentence(clause(*words, **parts), front, subordinate, coordinated)


def question(*words, front=None, **parts) -> Sentence:
    return Sentence(clause(*words, **parts), front, is_question=True)
