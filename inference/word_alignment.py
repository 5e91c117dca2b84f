"""Word alignment: which source word each target word comes from, read off the cross-attention.

Links are written as i-j, source word and target word from 0, with spaces between them: the format of Pharaoh and Moses.
"""

from collections.abc import Collection, Iterable

import numpy as np

from metaphrase.inference.alignment import AttentionMap

Link = tuple[int, int]


def word_weights(attention: AttentionMap) -> np.ndarray:
    """Attention from target words to source words: added up over the tokens of one, averaged over those of the other.

    What goes to special tokens and to a prefix is left out, so a row need not add up to 1. A word without a token of its own, as
    of several words in one token, has zeros.

    Args:
        attention: Of one pair of texts.

    Returns:
        `(target words, source words)` in float32.

    Raises:
        ValueError: If the tokens could not be told to words.

    Source: section 4.1 of Clark et al. 2019 (arXiv 1906.04341), there for an encoder's self-attention.
    """
    for side, ids in (("source", attention.source_word_ids), ("target", attention.target_word_ids)):
        if ids is None:
            text = getattr(attention, side)
            raise ValueError(f"The {side}'s tokens must make up its words, got {text!r}, where they do not.")
    into_source = _membership(attention.source_word_ids, len(attention.source_words))
    into_target = _membership(attention.target_word_ids, len(attention.target_words))
    # (target words, target) @ (target, source) @ (source, source words)
    added = into_target.T @ attention.weights @ into_source
    return added / np.maximum(into_target.sum(axis=0), 1)[:, None]


def word_alignment(attention: AttentionMap) -> list[Link]:
    """For each target word the source word that it attends to most: pairs of source word and target word, sorted.

    A target word that attends to no source word at all has no pair; the first of equal source words wins. Which layer and head is
    looked at is decided where the map is made. Models of six layers align best by the mean of the last but one (`layer=-2`), the
    demo's of two by the last (`layer=-1`): `benchmarks/alignment.py` measures each layer.

    Args:
        attention: Of one pair of texts.

    Raises:
        ValueError: As `word_weights`.

    Source: Garg et al. 2019 (arXiv 1909.02074), whose baseline this is, for six layers.
    """
    weights = word_weights(attention)
    if not weights.size:
        return []
    best = weights.argmax(axis=1).tolist()
    return sorted((source, target) for target, source in enumerate(best) if weights[target, source] > 0)


def format_pharaoh(links: Iterable[Link]) -> str:
    """Links as one line of text: `0-0 1-2 2-1`.

    Source: Koehn 2004, "Pharaoh: a beam search decoder for phrase-based statistical machine translation models".
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def alignment_error_rate(
    predicted: Iterable[Collection[Link]], sure: Iterable[Collection[Link]], possible: Iterable[Collection[Link]]
) -> float:
    """The alignment error rate of a corpus, 0 at best: 1 - (|A & S| + |A & P|) / (|A| + |S|).

    Args:
        predicted: Links of each sentence (A).
        sure: Links that a sentence must have (S).
        possible: Links that it may have (P); those that are sure are so too.

    Raises:
        ValueError: If there are not equally many sentences, or neither predicted nor sure links.

    Source: section 2.3 of Och and Ney 2003, "A systematic comparison of various statistical alignment models".
    """
    predicted, sure, possible = list(predicted), list(sure), list(possible)
    if not len(predicted) == len(sure) == len(possible):
        raise ValueError(
            "`predicted`, `sure` and `possible` must be equally many, "
            f"got {len(predicted)}, {len(sure)} and {len(possible)}."
        )
    right = total = 0
    for links, required, allowed in zip(predicted, sure, possible, strict=True):
        links, required = set(links), set(required)
        right += len(links & required) + len(links & (required | set(allowed)))
        total += len(links) + len(required)
    if not total:
        raise ValueError("`predicted` or `sure` must have a link, got none.")
    return 1 - right / total


def _membership(word_ids: list[int | None], num_words: int) -> np.ndarray:
    """`(tokens, words)`, 1 where a token belongs to a word."""
    membership = np.zeros((len(word_ids), num_words), dtype=np.float32)
    for token, word in enumerate(word_ids):
        if word is not None:
            membership[token, word] = 1
    return membership
