"""Lexicons that are learned from pairs: target tokens of a source token for a vocabulary map, and terms of both languages."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

import numpy as np

from metaphrase.filtering.alignment import WordPairs, join_sides
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.texts import SPACED_WORD
from metaphrase.tokenization.vocabulary_map import VocabularyMap

_ITERATIONS = 2
# All bytes, or the most frequent characters of a script with thousands.
_MAX_LETTERS = 256
# They bound the memory of training.
MAX_PAIRS, _MAX_TOKENS, _MAX_TOKEN_PAIRS = 300_000, 100, 100_000_000
# A word of a term occurs three times or more, and is the partner of the other word with this probability.
_MIN_COUNT, _MIN_PROBABILITY = 3, 0.1
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
    letters = sorted(
        (index for name, index in vocabulary.items() if _is_letter(name)), key=lambda index: (-counts[index], index)
    )
    return VocabularyMap([*frequent, *letters[:_MAX_LETTERS], *tokenizers.target.all_special_ids], tokens)


def learn_lexicon(
    sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray, num_targets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Learn the probability of target tokens given a source token, by IBM Model 1 without a null word.

    The end of sequence, which all sources have, takes the place of the null word.

    Tokens stand one text after the other, with the lengths of the texts, (2, number of pairs).

    Returns:
        Source token, target token and probability of all token pairs that occur, ordered by tokens.

    Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, section 4.2.
    """

    def batches() -> Iterator[tuple[WordPairs, np.ndarray]]:
        for batch in WordPairs.batches(sources, targets, lengths):
            yield batch, batch.keys(num_targets)

    keys = np.unique(np.concatenate([np.unique(batch_keys) for _, batch_keys in batches()]))
    words, table = keys // num_targets, np.ones(len(keys))
    for _ in range(_ITERATIONS):
        counts = np.zeros(len(keys))
        for batch, batch_keys in batches():
            entries = np.searchsorted(keys, batch_keys)
            weights = table[entries]
            columns = batch.positions[1]
            totals = np.bincount(columns, weights, minlength=len(batch.words[1]))
            counts += np.bincount(entries, weights / totals[columns], minlength=len(keys))
        table = counts / np.bincount(words, counts)[words]
    return words, keys % num_targets, table


def learn_terms(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Learn words of two languages that translate each other: each is a probable partner of the other.

    Rare words and the most frequent ones are left out, and so are scripts without spaces between words. The result has the target
    words of each source word, with case folded. The first pairs are used, up to a number of word pairs.
    """
    sides = [[_words_of_letters(text) for text in side] for side in zip(*pairs, strict=True)]
    names = [_frequent_words(side) for side in sides]
    numbers = [{word: number for number, word in enumerate(words)} for words in names]
    encoded = [
        [[known[word] for word in words if word in known] for words in side]
        for side, known in zip(sides, numbers, strict=True)
    ]
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


def _words_of_letters(text: str) -> list[str]:
    return [word for word in SPACED_WORD.findall(text.casefold()) if not any(map(str.isdigit, word))]


def _frequent_words(texts: Iterable[Iterable[str]]) -> list[str]:
    counts = Counter(chain.from_iterable(texts))
    words = (word for word, count in counts.items() if count >= _MIN_COUNT)
    return sorted(words, key=lambda word: (-counts[word], word))


def _join_first(sources: Iterable[Sequence[int]], targets: Iterable[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """Return `join_sides` of the first tokens of each text, and of the first texts, up to the most token pairs."""
    sources, targets = ([ids[:_MAX_TOKENS] for ids in side] for side in (sources, targets))
    sizes = accumulate(len(source) * len(target) for source, target in zip(sources, targets, strict=True))
    num_pairs = sum(1 for size in sizes if size <= _MAX_TOKEN_PAIRS)
    return join_sides(sources[:num_pairs], targets[:num_pairs])


def _is_letter(name: str) -> bool:
    """Return True for a token that is a single character, also within a word, or a byte."""
    is_byte = len(name) == 6 and name.startswith("<0x")
    return is_byte or len(name.removeprefix("##")) == 1
