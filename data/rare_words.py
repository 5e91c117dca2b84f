"""Rare words in the places of frequent ones: an augmentation for words that training shows in few contexts.

A model that sees a word once does not learn that it may stand wherever similar words stand. So some pairs get a rare word and its
translation in place of another word and its translation.

Source: Andreas 2020, section 3, arXiv 1904.09545: fragments that share an environment are interchangeable. Akyürek and Andreas
2022, arXiv 2201.12926: a word is replaced together with its translation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from random import Random

# Share of the pairs with a source word that have its translation.
_TRANSLATED = 0.95
_OUTSIDE = ""
# A neighbor of a source word, whether it stands behind the word, and the two words behind each occurrence of the translation.
Context = tuple[str, bool, frozenset[tuple[str, str]]]


class RareWords:
    """Rare words, with their translations, that may take the places of other words.

    Attributes:
        translations: The target word of each source word that has one.
        substitutes: For a source word, the source words that may replace it, each with its number of pairs.
    """

    def __init__(self, translations: Mapping[str, str], substitutes: Mapping[str, Mapping[str, int]]):
        self.translations, self.substitutes = translations, substitutes

    @classmethod
    def learn(cls, pairs: Iterable[tuple[str, str]]) -> "RareWords":
        """Find them in pairs of texts whose words stand between spaces.

        A word may replace another one if the other one is seen in all of its contexts, and in more.
        """
        split = [(source.split(), target.split()) for source, target in pairs]
        counts = Counter(word for source, _ in split for word in set(source))
        translations = _find_translations(split)
        contexts = _find_contexts(split, translations)
        words_in: dict[Context, list[str]] = defaultdict(list)
        for word, contexts_of_word in contexts.items():
            for context in contexts_of_word:
                words_in[context].append(word)
        substitutes: dict[str, dict[str, int]] = defaultdict(dict)
        for word, contexts_of_word in contexts.items():
            # The context that the fewest words share leaves the fewest sets to compare.
            for other in words_in[min(contexts_of_word, key=lambda context: len(words_in[context]))]:
                if contexts_of_word < contexts[other]:
                    substitutes[other][word] = counts[word]
        return cls(translations, dict(substitutes))

    def replace(self, source: str, target: str, random: Random) -> tuple[str, str]:
        """Return a pair with one of its words replaced on both sides, or as it is if there is none to replace.

        The rarer a word is, the more often it is drawn.
        """
        words, outputs = source.split(), target.split()
        known = dict.fromkeys(words)
        counts = Counter(self.translations.get(word) for word in known)
        replaceable = [
            word
            for word in known
            if word in self.substitutes and counts[self.translations[word]] == 1 and self.translations[word] in outputs
        ]
        if not replaceable:
            return source, target
        old = random.choice(replaceable)
        substitutes = self.substitutes[old]
        [new] = random.choices(list(substitutes), [1 / count for count in substitutes.values()])
        sides = (words, old, new), (outputs, self.translations[old], self.translations[new])
        source, target = (" ".join(after if word == before else word for word in side) for side, before, after in sides)
        return source, target


def _find_translations(pairs: Sequence[tuple[list[str], list[str]]]) -> dict[str, str]:
    """Return the target word that goes with each source word the most by Dice's coefficient, unless several do."""
    counts: tuple[Counter, Counter] = Counter(), Counter()
    together: dict[str, Counter] = defaultdict(Counter)
    for source, target in pairs:
        words, outputs = set(source), set(target)
        counts[0].update(words)
        counts[1].update(outputs)
        for word in words:
            together[word].update(outputs)
    translations = {}
    for word, number in counts[0].items():
        dice = {
            output: 2 * both / (number + counts[1][output])
            for output, both in together[word].items()
            if both >= _TRANSLATED * number
        }
        best = max(dice.values(), default=0.0)
        tied = [output for output, value in dice.items() if value == best]
        if word in tied:
            translations[word] = word
        elif len(tied) == 1:
            translations[word] = tied[0]
    return translations


def _find_contexts(
    pairs: Sequence[tuple[list[str], list[str]]], translations: Mapping[str, str]
) -> dict[str, set[Context]]:
    """Return the contexts of each word that has a translation."""
    contexts: dict[str, set[Context]] = defaultdict(set)
    for source, target in pairs:
        behind: dict[str, set[tuple[str, str]]] = defaultdict(set)
        padded = [*target, _OUTSIDE, _OUTSIDE]
        for index, word in enumerate(target):
            behind[word].add((padded[index + 1], padded[index + 2]))
        padded = [_OUTSIDE, *source, _OUTSIDE]
        for index, word in enumerate(source, start=1):
            if translations.get(word) in behind:
                after = frozenset(behind[translations[word]])
                contexts[word] |= {(padded[index - 1], False, after), (padded[index + 1], True, after)}
    return contexts
