"""Word alignment from cross-attention.

A link i-j joins source word i and target word j, both from 0: the format of Pharaoh and Moses.
"""

from collections.abc import Collection, Iterable

import numpy as np

from metaphrase.inference.alignment import AttentionMap

Link = tuple[int, int]


def word_weights(attention: AttentionMap) -> np.ndarray:
    """Return the attention from target words to source words.

    Weights are summed over the tokens of a source word and averaged over the tokens of a target word. Special tokens and the
    prefix are left out, so a row may sum to less than 1. A word without a token of its own has zeros.

    Args:
        attention: Map of one pair.

    Returns:
        `(target words, source words)` in float32.

    Raises:
        ValueError: If the tokens cannot be mapped to words.

    Source: section 4.1 of Clark et al. 2019 (arXiv 1906.04341), there for an encoder's self-attention.
    """
    for side, ids in (("source", attention.source_word_ids), ("target", attention.target_word_ids)):
        if ids is None:
            text = getattr(attention, side)
            raise ValueError(f"The tokens of the {side} must make up its words, got {text!r}, where they do not.")
    into_source = _membership(attention.source_word_ids, len(attention.source_words))
    into_target = _membership(attention.target_word_ids, len(attention.target_words))
    # (target words, target) @ (target, source) @ (source, source words)
    summed = into_target.T @ attention.weights @ into_source
    return summed / np.maximum(into_target.sum(axis=0), 1)[:, None]


def word_alignment(attention: AttentionMap) -> list[Link]:
    """Link each target word to the source word that it attends to most. Returns sorted pairs (source word, target word).

    A target word without attention to a source word has no link. The first of equal source words wins. Choose the layer when
    making the map: models of six layers align best with `layer=-2`, the demo's of two with `layer=-1`.
    `benchmarks/alignment.py` measures each layer.

    Args:
        attention: Map of one pair.

    Raises:
        ValueError: As `word_weights`.

    Source: the baseline of Garg et al. 2019 (arXiv 1909.02074), for six layers.
    """
    weights = word_weights(attention)
    if not weights.size:
        return []
    best = weights.argmax(axis=1).tolist()
    return sorted((source, target) for target, source in enumerate(best) if weights[target, source] > 0)


def format_pharaoh(links: Iterable[Link]) -> str:
    """Return links as one line of text: `0-0 1-2 2-1`.

    Source: Koehn 2004, "Pharaoh: a beam search decoder for phrase-based statistical machine translation models".
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def alignment_error_rate(
    predicted: Iterable[Collection[Link]], sure: Iterable[Collection[Link]], possible: Iterable[Collection[Link]]
) -> float:
    """Return the alignment error rate of a corpus, 0 at best: 1 - (|A & S| + |A & P|) / (|A| + |S|).

    Args:
        predicted: Links of each sentence (A).
        sure: Links that a sentence must have (S).
        possible: Links that a sentence may have (P). Sure links are possible, too.

    Raises:
        ValueError: If the numbers of sentences differ, or there are neither predicted nor sure links.

    Source: section 2.3 of Och and Ney 2003, "A systematic comparison of various statistical alignment models".
    """
    predicted, sure, possible = list(predicted), list(sure), list(possible)
    if not len(predicted) == len(sure) == len(possible):
        raise ValueError(
            "`predicted`, `sure` and `possible` must have the same length, "
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
    """Return `(tokens, words)` with 1 where a token belongs to a word."""
    return np.array([[word == column for column in range(num_words)] for word in word_ids], dtype=np.float32)
