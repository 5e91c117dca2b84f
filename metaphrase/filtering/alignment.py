"""Words that translate each other, learned from pairs: a model that tells pairs of one meaning from strangers, and lexicons."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from metaphrase.conversion.vocabulary_map import VocabularyMap
from metaphrase.filtering.rules import SPACED_WORD, split_words
from metaphrase.tokenization import TokenizerPair

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


class Vocabulary(dict[str, int]):
    """Numbers of words, from 1. A rare word has the number of its beginning, or 0."""

    def __init__(self, texts: Iterable[Sequence[str]]):
        words = Counter(chain.from_iterable(texts))
        entries = Counter()
        for word, count in words.items():
            entries[word if count >= _MIN_COUNT else "_" + word[:_PREFIX]] += count
        # Ties are broken by the word: the order of the texts must not matter.
        ordered = sorted((-count, word) for word, count in entries.items() if count > 1)
        super().__init__((word, number) for number, (_, word) in enumerate(ordered[:MAX_VOCABULARY], start=1))

    def __missing__(self, word: str) -> int:
        return self.get("_" + word[:_PREFIX], 0)


def join_sides(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of all sources and of all targets, one text after the other, and the lengths (2, pairs)."""
    lengths = np.array([[len(text) for text in side] for side in (sources, targets)], dtype=np.int64)
    return *(np.fromiter(chain.from_iterable(side), dtype=np.int64) for side in (sources, targets)), lengths


class WordPairs(NamedTuple):
    """All pairs of a source word and a target word, or token, of the same pair of texts. Tuples are for both sides."""

    words: tuple[np.ndarray, np.ndarray]  # their numbers, one text after the other
    texts: tuple[np.ndarray, np.ndarray]  # index of the text of each word
    positions: tuple[np.ndarray, np.ndarray]  # index in `words` of both words of each pair
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
        """Yield the word pairs of `_PAIRS_PER_BATCH` texts at a time."""
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

    Pairs with a score below `threshold` are rather misaligned. `noise_share` is the estimated share of such pairs in the corpus.

    Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, section 4.2.
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
        scores, shuffled = np.sort(self._score(*encoded)), np.sort(shuffled)
        # Shuffled pairs have the scores of misaligned pairs. Hardly any aligned pair has one of the lowest of these scores,
        # which therefore tell the share of misaligned pairs.
        share = float(np.searchsorted(scores, np.quantile(shuffled, _TAIL))) / len(scores) / _TAIL
        quantiles = np.quantile(np.concatenate([scores, shuffled]), np.linspace(0, 1, 2001))
        candidates = np.concatenate([[-np.inf], quantiles])
        below, shuffled_below = (np.searchsorted(values, candidates) / len(values) for values in (scores, shuffled))
        # The threshold has the lowest cost of errors under this estimate. A clean corpus loses hardly a pair.
        best = np.argmin(below - (1 + _COST) * share * shuffled_below)
        self.noise_share, self.threshold = min(share, 1.0), float(candidates[best])

    def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        return self._score(*self._encode(*_split(pairs))) if pairs else np.zeros(0)

    def _encode(self, *sides: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = zip(sides, self._vocabularies, strict=True)
        return join_sides(*([[vocabulary[word] for word in text] for text in side] for side, vocabulary in rows))

    def _train(self, pairs: WordPairs) -> None:
        """Run expectation maximization. Both directions share the table of word pairs that occur."""
        sizes = [len(vocabulary) + 1 for vocabulary in self._vocabularies]
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
            keys = pairs.keys(len(self._vocabularies[1]) + 1)
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


_LEXICON_ITERATIONS = 2
# All bytes, or the most frequent characters of a script with thousands.
_MAX_LETTERS = 256
# They bound the memory of training.
MAX_MAP_PAIRS, _MAX_TOKENS, _MAX_TOKEN_PAIRS = 300_000, 100, 100_000_000
# A word of a term occurs three times or more, and is the partner of the other word with this probability.
_MIN_TERM_COUNT, _MIN_PROBABILITY = 3, 0.1
# The most frequent words are those of grammar: so many, or this share of the words where they are few.
_NUM_GRAMMAR_WORDS, _GRAMMAR_SHARE = 50, 0.1


def make_vocabulary_map(
    pairs: Iterable[tuple[str, str]], tokenizers: TokenizerPair, num_per_token: int = 200, num_frequent: int = 100
) -> VocabularyMap:
    """Learn a vocabulary map from pairs.

    Each source token permits its most probable target tokens, and itself in a joint vocabulary. Every target may hold the most
    frequent tokens, the special tokens and single characters or bytes, of which a tokenizer can spell any word. The pairs are in
    random order: the first ones are used, up to a number of token pairs.
    """
    texts = [list(side) for side in zip(*pairs, strict=True)]
    sources, targets, lengths = _join_first(tokenizers.encode_sources(texts[0]), tokenizers.encode_targets(texts[1]))
    vocabulary = tokenizers.target.get_vocab()
    num_targets = max(vocabulary.values()) + 1
    words, partners, probabilities = learn_lexicon(sources, targets, lengths, num_targets)
    order = np.lexsort((partners, -probabilities, words))
    words, partners = words[order], partners[order]
    starts = np.flatnonzero(np.diff(words, prepend=-1))
    tokens = {}
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        token = int(words[start])
        same = [token] if tokenizers.is_joint else []
        tokens[token] = np.union1d(partners[start : min(end, start + num_per_token)], same)
    counts = np.bincount(targets, minlength=num_targets)
    frequent = np.argsort(-counts, kind="stable")[:num_frequent]
    # Single characters, also within a word, and bytes.
    letters = [index for name, index in vocabulary.items() if re.fullmatch("(##)?.|<0x..>", name, re.DOTALL)]
    letters.sort(key=lambda index: (-counts[index], index))
    return VocabularyMap([*frequent, *letters[:_MAX_LETTERS], *tokenizers.target.all_special_ids], tokens)


def learn_lexicon(
    sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray, num_targets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Learn the probability of target tokens given a source token, by IBM Model 1 without a null word.

    The end of sequence, which all sources have, takes the place of the null word. Tokens stand one text after the other, with
    the lengths of the texts, (2, number of pairs).

    Returns:
        Source token, target token and probability of all token pairs that occur, ordered by tokens.

    Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, section 4.2.
    """
    sides = sources, targets, lengths
    keys = np.unique(np.concatenate([np.unique(batch.keys(num_targets)) for batch in WordPairs.batches(*sides)]))
    words, table = keys // num_targets, np.ones(len(keys))
    for _ in range(_LEXICON_ITERATIONS):
        counts = np.zeros(len(keys))
        for batch in WordPairs.batches(*sides):
            entries = np.searchsorted(keys, batch.keys(num_targets))
            weights, columns = table[entries], batch.positions[1]
            totals = np.bincount(columns, weights, minlength=len(batch.words[1]))
            counts += np.bincount(entries, weights / totals[columns], minlength=len(keys))
        table = counts / np.bincount(words, counts)[words]
    return words, keys % num_targets, table


def learn_terms(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Learn words of two languages that translate each other: each is a probable partner of the other.

    Rare words and the most frequent ones are left out, and so are scripts without spaces between words. The result has the target
    words of each source word, with case folded. The first pairs are used, up to a number of word pairs.
    """
    names, encoded = [], []
    for texts in zip(*pairs, strict=True):
        words_of_texts = [
            [word for word in SPACED_WORD.findall(text.casefold()) if not any(map(str.isdigit, word))] for text in texts
        ]
        counts = Counter(chain.from_iterable(words_of_texts))
        frequent = (word for word, count in counts.items() if count >= _MIN_TERM_COUNT)
        names.append(sorted(frequent, key=lambda word: (-counts[word], word)))
        numbers = {word: number for number, word in enumerate(names[-1])}
        encoded.append([[numbers[word] for word in words if word in numbers] for words in words_of_texts])
    sources, targets, lengths = _join_first(*encoded)
    if not len(sources) or not len(targets):
        return {}
    forward = learn_lexicon(sources, targets, lengths, len(names[1]))
    backward = learn_lexicon(targets, sources, lengths[::-1], len(names[0]))
    # Both tables have the same word pairs, in another order.
    order = np.lexsort((backward[0], backward[1]))
    is_term = np.minimum(forward[2], backward[2][order]) >= _MIN_PROBABILITY
    for side, words in zip(forward, names, strict=False):
        is_term &= side >= min(_NUM_GRAMMAR_WORDS, round(_GRAMMAR_SHARE * len(words)))
    terms: dict[str, list[str]] = {}
    for word, partner in zip(forward[0][is_term].tolist(), forward[1][is_term].tolist(), strict=True):
        terms.setdefault(names[0][word], []).append(names[1][partner])
    return terms


def _join_first(sources: Iterable[Sequence[int]], targets: Iterable[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """Return `join_sides` of the first tokens of each text, and of the first texts, up to the most token pairs."""
    sources, targets = ([ids[:_MAX_TOKENS] for ids in side] for side in (sources, targets))
    sizes = accumulate(len(source) * len(target) for source, target in zip(sources, targets, strict=True))
    num_pairs = sum(1 for size in sizes if size <= _MAX_TOKEN_PAIRS)
    return join_sides(sources[:num_pairs], targets[:num_pairs])
