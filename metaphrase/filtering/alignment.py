"""A lexical model that tells pairs of one meaning from pairs of strangers. It learns from the pairs themselves."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from metaphrase.filtering.rules import split_words

MIN_PAIRS = 10_000
# They bound memory and time of training.
MAX_PAIRS, MAX_WORD_PAIRS, MAX_WORDS, MAX_VOCABULARY = 100_000, 4_000_000, 60, 40_000
_ITERATIONS = 3
_MIN_COUNT, _PREFIX = 3, 4
# Weight of a model without alignment, which bounds the penalty for a word.
_SMOOTHING = 0.1
# Share of the shuffled pairs, with the lowest scores, that shows the share of misaligned pairs in the corpus.
_TAIL = 0.25
# A misaligned pair that stays costs this many aligned pairs that are dropped.
_COST = 2
_PAIRS_PER_BATCH = 5000


class Vocabulary:
    """Numbers of words. A rare word has the number of its beginning, or 0."""

    def __init__(self, texts: Iterable[Sequence[str]]):
        words = Counter(chain.from_iterable(texts))
        entries = Counter()
        for word, count in words.items():
            entries[word if count >= _MIN_COUNT else "_" + word[:_PREFIX]] += count
        # Ties are broken by the word: the order of the texts must not matter.
        ordered = sorted((-count, word) for word, count in entries.items() if count > 1)
        self._numbers = {word: number for number, (_, word) in enumerate(ordered[:MAX_VOCABULARY], start=1)}

    def __len__(self) -> int:
        return len(self._numbers) + 1

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the number of each word."""
        numbers = self._numbers
        return [numbers[word] if word in numbers else numbers.get("_" + word[:_PREFIX], 0) for word in words]


def join_sides(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of all sources and of all targets, one text after the other, and the lengths (2, pairs)."""
    lengths = np.array([[len(text) for text in side] for side in (sources, targets)], dtype=np.int64)
    numbers = (
        np.fromiter(chain.from_iterable(side), dtype=np.int64, count=int(size))
        for side, size in zip((sources, targets), lengths.sum(1), strict=True)
    )
    return *numbers, lengths


class WordPairs(NamedTuple):
    """All pairs of a source word and a target word, or token, of the same pair of texts.

    Attributes:
        words: Numbers of all source words, one text after the other, and of all target words.
        texts: Index of the text of each word, for both sides.
        positions: Index in `words` of both words of each pair.
    """

    words: tuple[np.ndarray, np.ndarray]
    texts: tuple[np.ndarray, np.ndarray]
    positions: tuple[np.ndarray, np.ndarray]
    num_texts: int

    @classmethod
    def of(cls, sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> "WordPairs":
        """Pair the words of texts with these lengths, (2, number of texts)."""
        texts = tuple(np.repeat(np.arange(lengths.shape[1]), side) for side in lengths)
        num_partners = lengths[0][texts[1]]
        columns = np.repeat(np.arange(len(targets)), num_partners)
        offsets = np.arange(len(columns)) - np.repeat(np.cumsum(num_partners) - num_partners, num_partners)
        starts = np.cumsum(lengths[0]) - lengths[0]
        return cls((sources, targets), texts, (starts[texts[1]][columns] + offsets, columns), lengths.shape[1])

    @classmethod
    def batches(cls, sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> Iterator["WordPairs"]:
        """Yield the word pairs of a few thousand texts at a time."""
        for start in range(0, lengths.shape[1], _PAIRS_PER_BATCH):
            size = lengths[:, start : start + _PAIRS_PER_BATCH]
            used = size.sum(1)
            yield cls.of(sources[: used[0]], targets[: used[1]], size)
            sources, targets = sources[used[0] :], targets[used[1] :]

    def keys(self, num_targets: int) -> np.ndarray:
        """Return one number for the source word and target word of each pair."""
        sources, targets = (words[positions] for words, positions in zip(self.words, self.positions, strict=True))
        return sources * num_targets + targets


class AlignmentModel:
    """IBM Model 1 in both directions, and a threshold from the scores of shuffled pairs.

    The score of a pair is the log-likelihood ratio of its words, given the other side and by themselves. Each expected count
    is lowered by 1, so that no pair is its own evidence: a misaligned pair in the corpus scores as low as any other.

    Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, section 4.2.

    Attributes:
        threshold: Pairs with a lower score are rather misaligned.
        noise_share: Estimated share of misaligned pairs in the corpus.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], seed: int = 0):
        """Learn from pairs in random order. The first ones are used, up to a number of word pairs."""
        words = _split(pairs[:MAX_PAIRS])
        sizes = accumulate(len(source) * len(target) for source, target in zip(*words, strict=True))
        num_pairs = sum(1 for size in sizes if size <= MAX_WORD_PAIRS)
        sources, targets = (side[:num_pairs] for side in words)
        self._vocabularies = Vocabulary(sources), Vocabulary(targets)
        encoded = self._encode(sources, targets)
        self._train(WordPairs.of(*encoded))
        order = np.random.default_rng(seed).permutation(num_pairs)
        shuffled = self._score(*self._encode(sources, [targets[index] for index in order]))
        self.noise_share, self.threshold = find_threshold(self._score(*encoded), shuffled)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the score of each pair."""
        return self._score(*self._encode(*_split(pairs))) if pairs else np.zeros(0)

    def _encode(self, *sides: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = zip(sides, self._vocabularies, strict=True)
        return join_sides(*([vocabulary.encode(text) for text in side] for side, vocabulary in rows))

    def _train(self, pairs: WordPairs) -> None:
        """Run expectation maximization. Both directions share the table of word pairs that occur."""
        sizes = [len(vocabulary) for vocabulary in self._vocabularies]
        keys, entries = np.unique(pairs.keys(sizes[1]), return_inverse=True)
        self._tables, self._shares = [], []
        # The first direction explains target words, by source words and the word `null`.
        for condition, side in ((keys // sizes[1], 1), (keys % sizes[1], 0)):
            explained, positions, size = pairs.words[side], pairs.positions[side], sizes[side]
            table, null = np.ones(len(keys)), np.ones(size)
            for _ in range(_ITERATIONS):
                weights = table[entries]
                total = np.bincount(positions, weights, minlength=len(explained)) + null[explained]
                counts = np.bincount(entries, weights / total[positions], minlength=len(keys))
                null = np.bincount(explained, null[explained] / total, minlength=size)
                null /= null.sum()
                sums = np.bincount(condition, counts)
                table = counts / sums[condition]
            self._tables.append(np.maximum(counts - 1, 0) / (sums[condition] + 0.5))
            frequencies = np.bincount(explained, minlength=size) + 1
            self._shares.append(frequencies / frequencies.sum())
        # Most word pairs occur by chance. Without them the table is small, and look-ups are fast.
        is_useful = (self._tables[0] > 0) | (self._tables[1] > 0)
        self._keys, self._tables = keys[is_useful], [table[is_useful] for table in self._tables]

    def _score(self, sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        scores = []
        for pairs in WordPairs.batches(sources, targets, lengths):
            keys = pairs.keys(len(self._vocabularies[1]))
            entries = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            is_known, score = self._keys[entries] == keys, np.zeros(pairs.num_texts)
            for table, share, side in zip(self._tables, self._shares, (1, 0), strict=True):
                explained, texts = pairs.words[side], pairs.texts[side]
                num_partners = np.bincount(pairs.texts[1 - side], minlength=pairs.num_texts)[texts]
                known = np.where(is_known, table[entries], 0)
                sums = np.bincount(pairs.positions[side], known, minlength=len(explained))
                ratios = sums / np.maximum(num_partners, 1) / share[explained]
                logs = np.log((1 - _SMOOTHING) * ratios + _SMOOTHING)
                score += np.bincount(texts, logs, minlength=pairs.num_texts)
            scores.append(score)
        return np.concatenate(scores)


def _split(pairs: Sequence[tuple[str, str]]) -> list[list[list[str]]]:
    return [[split_words(text)[:MAX_WORDS] for text in side] for side in zip(*pairs, strict=True)]


def find_threshold(scores: np.ndarray, shuffled: np.ndarray) -> tuple[float, float]:
    """Return the estimated share of misaligned pairs, and the score below which a pair is rather misaligned.

    Shuffled pairs have the scores of misaligned pairs. Hardly any aligned pair has one of the lowest of these scores, which
    therefore tell the share. The threshold has the lowest cost of errors under this estimate. A clean corpus loses hardly a pair.
    """
    scores, shuffled = np.sort(scores), np.sort(shuffled)
    share = float(np.searchsorted(scores, np.quantile(shuffled, _TAIL))) / len(scores) / _TAIL
    candidates = np.concatenate([[-np.inf], np.quantile(np.concatenate([scores, shuffled]), np.linspace(0, 1, 2001))])
    below, shuffled_below = (np.searchsorted(values, candidates) / len(values) for values in (scores, shuffled))
    return min(share, 1.0), float(candidates[np.argmin(below - (1 + _COST) * share * shuffled_below)])
