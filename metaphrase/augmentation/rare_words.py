"""Rare words in the places of others, with their translations."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

# Share of the pairs with a source word that have its translation.
_TRANSLATED = 0.95
_OUTSIDE = ""
# A neighbor of a source word, whether it stands behind the word, and the two words behind each occurrence of the translation.
Context = tuple[str, bool, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class RareWords:
    """Rare words, with their translations, that may take the places of other words.

    Source: Andreas 2020, section 3, arXiv 1904.09545: fragments that share an environment are interchangeable. Akyürek and
    Andreas 2022, arXiv 2201.12926: a word is replaced together with its translation.

    Attributes:
        translations: The target word of each source word that has one.
        substitutes: For a source word, the source words that may replace it, each with its number of pairs.
    """

    translations: Mapping[str, str]
    substitutes: Mapping[str, Mapping[str, int]]

    @classmethod
    def learn(cls, pairs: Iterable[tuple[str, str]]) -> "RareWords":
        """Learn from pairs of texts with spaces: a word may replace another one that is seen in all of its contexts, and more."""
        split = [(source.split(), target.split()) for source, target in pairs]
        counts = Counter(word for source, _ in split for word in set(source))
        translations = find_translations(split)
        contexts: dict[str, set[Context]] = defaultdict(set)
        words_in: dict[Context, set[str]] = defaultdict(set)
        for source, target in split:
            # The two words behind each word of the target.
            behind: dict[str, set[tuple[str, str]]] = defaultdict(set)
            for word, *after in zip(target, [*target[1:], _OUTSIDE], [*target[2:], _OUTSIDE, _OUTSIDE], strict=False):
                behind[word].add(tuple(after))
            for before, word, after in zip([_OUTSIDE, *source], source, [*source[1:], _OUTSIDE], strict=False):
                if outputs := frozenset(behind.get(translations.get(word), ())):
                    for context in ((before, False, outputs), (after, True, outputs)):
                        contexts[word].add(context)
                        words_in[context].add(word)
        substitutes: dict[str, dict[str, int]] = defaultdict(dict)
        for word, contexts_of_word in contexts.items():
            # The context that the fewest words share leaves the fewest sets to compare.
            for other in words_in[min(contexts_of_word, key=lambda context: len(words_in[context]))]:
                if contexts_of_word < contexts[other]:
                    substitutes[other][word] = counts[word]
        return cls(translations, dict(substitutes))

    def draw(self, source: str, target: str, random: Random) -> tuple[tuple[str, str], tuple[str, str]] | None:
        """Draw for source and target a word and its replacement, the rarer ones more often. None if the pair has no such word."""
        words = dict.fromkeys(source.split())
        counts = Counter(map(self.translations.get, words))
        # With another source word of the same translation, it is unknown which target word belongs to which.
        single = {word for word in target.split() if counts[word] == 1}
        replaceable = [word for word in words if word in self.substitutes and self.translations[word] in single]
        if not replaceable:
            return None
        old = random.choice(replaceable)
        substitutes = self.substitutes[old]
        [new] = random.choices(list(substitutes), [1 / count for count in substitutes.values()])
        return (old, new), (self.translations[old], self.translations[new])


def find_translations(pairs: Sequence[tuple[list[str], list[str]]]) -> dict[str, str]:
    """Return the target word that goes with each source word the most by Dice's coefficient, unless several do equally."""
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
        # A target word that is a source word, too, translates that one.
        candidates = [word] if word in tied else [output for output in tied if output not in counts[0]] or tied
        if len(candidates) == 1:
            [translations[word]] = candidates
    return translations
