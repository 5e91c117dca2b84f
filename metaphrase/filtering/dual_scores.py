"""Dual conditional cross-entropy of pairs: scores of two models that read the pairs in both directions."""

import math
from collections.abc import Sequence

from metaphrase.inference.batches import longest_source, longest_target
from metaphrase.inference.generator import Generator
from metaphrase.inference.scoring import encode_forced


def dual_scores(forward: Sequence[float], backward: Sequence[float]) -> list[float]:
    """Return for each pair a score from 0 to 1, which is high if two models expect the pair, and equally so.

    With the mean negative log-probability of a token in both directions, F and B, it is exp(-|F - B| - (F + B) / 2). A pair that
    is too long for a model has the score 0.

    Source: Junczys-Dowmunt 2018, Dual Conditional Cross-Entropy Filtering of Noisy Parallel Corpora.

    Args:
        forward: `mean_entropies` of a model from source to target.
        backward: Those of a model from target to source, of the pairs the other way round.
    """
    # Infinite minus infinite would be no number.
    return [
        math.exp(-abs(first - second) - (first + second) / 2) if math.isfinite(first + second) else 0.0
        for first, second in zip(forward, backward, strict=True)
    ]


def mean_entropies(generator: Generator, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return the mean negative log-probability of each target, in nats per token. Pairs have no blank sides.

    A pair that is too long for the model has an infinite one. Errors are those of `Generator.score`.
    """
    sources = generator.encode([source for source, _ in pairs])
    targets = encode_forced(generator.tokenizers, [target for _, target in pairs])
    limits = longest_source(generator.model) or math.inf, longest_target(generator.model) or math.inf
    rows = enumerate(zip(sources, targets, strict=True))
    fitting = [i for i, (source, target) in rows if len(source) <= limits[0] and len(target) <= limits[1]]
    scores = generator.score([pairs[index][0] for index in fitting], [targets[index] for index in fitting])
    entropies = [math.inf] * len(pairs)
    for index, score in zip(fitting, scores, strict=True):
        entropies[index] = -score.mean
    return entropies
