"""Reranking: choose among the candidates of a source by several scores, whose weights are tuned on validation pairs.

Source: Och and Ney 2002, https://aclanthology.org/P02-1038, for the sum of weighted scores; Yee et al. 2019, section 2, arXiv
1908.05731, for the model from target to source and the length.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from metaphrase.analysis.judges import Judge
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.metrics import METRICS
from metaphrase.inference import Generator
from metaphrase.training.recipe.recipe import is_better_lower

_SEPARATOR = " ||| "
# Steps of a weight, relative to the spread of its score, and rounds over all weights.
_STEPS = (*(-(2.0**power) for power in range(3, -5, -1)), 0.0, *(2.0**power for power in range(-4, 4)))
_ROUNDS = 20
# Scores by name, each with a number for each candidate, in the order of the candidates.
Features = dict[str, np.ndarray]


def read_candidates(lines: Iterator[str], path: str) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Read an n-best list, `index ||| text ||| score` on each line, as `generate --n_best` writes it.

    Returns:
        The index of the source, the text and the score of each candidate.
    """
    indices, texts, scores = [], [], []
    for number, line in enumerate(lines, start=1):
        index, *middle = line.split(_SEPARATOR)
        try:
            indices.append(int(index))
            scores.append(float(middle.pop()))
        except (ValueError, IndexError):
            raise MetaphraseError(
                f"{path} must hold `index ||| text ||| score`, got {line!r} in line {number}."
            ) from None
        texts.append(_SEPARATOR.join(middle))
    if not texts or indices[0] or any(not 0 <= after - before <= 1 for before, after in itertools.pairwise(indices)):
        raise MetaphraseError(f"{path} must hold the candidates of all sources in their order, from index 0.")
    return np.array(indices), texts, np.array(scores)


def compute_features(
    sources: Sequence[str],
    indices: np.ndarray,
    texts: Sequence[str],
    scores: np.ndarray,
    reverse: Generator | None = None,
    judges: Sequence[Judge] = (),
    more: Mapping[str, np.ndarray] | None = None,
    show_progress: bool | None = None,
) -> Features:
    """Return the scores of candidates: `forward`, `length` in words, `backward` by the reverse model, and those of judges.

    `backward` is the mean log-probability of a source token, given the candidate. More is better in all of them.
    """
    repeated = [sources[index] for index in indices]
    features = {"forward": scores, "length": np.array([len(text.split()) for text in texts], dtype=float)}
    if reverse is not None:
        # A blank candidate has no source.
        filled = [text if text.strip() else "-" for text in texts]
        features["backward"] = np.array(
            [part.mean for part in reverse.score(filled, repeated, show_progress=show_progress)]
        )
    for judge in judges:
        values = np.array([value for value, _ in judge.segments(repeated, texts, None).rows])
        features[judge.name] = -values if judge.is_better_lower else values
    return features | dict(more or {})


def choose(features: Features, weights: Mapping[str, float], indices: np.ndarray) -> np.ndarray:
    """Return the row of the best candidate of each source, the first of equal ones."""
    totals = sum(weights.get(name, 0.0) * values for name, values in features.items())
    # Rows of a source are next to each other. The sort is stable.
    order = np.lexsort((np.arange(len(indices)), -totals, indices))
    return order[np.searchsorted(indices[order], np.arange(indices[-1] + 1))]


def tune(
    features: Features, indices: np.ndarray, texts: Sequence[str], references: Sequence[str], metric: str = "bleu"
) -> tuple[dict[str, float], float, float]:
    """Return weights whose choices have the best score of a corpus, that score, and that of the first score alone.

    One weight changes at a time, to the best of some steps, until none is better. `forward` keeps the weight 1.
    """
    lists = [references[index] for index in indices]
    segments = METRICS[metric].segments(texts, lists)
    rows, sign = np.array(segments.rows, dtype=float), -1 if is_better_lower(metric) else 1

    def score(weights: Mapping[str, float]) -> float:
        sums = rows[choose(features, weights, indices)].sum(axis=0)
        return sign * float(segments.scorer._aggregate_and_compute([sums]).score)

    weights = {name: float(name == "forward") for name in features}
    # Scores differ in their spread among the candidates of a source.
    starts = np.searchsorted(indices, indices)
    spread = {name: float(np.std(values - values[starts])) or 1.0 for name, values in features.items()}
    first = best = score(weights)
    for _ in range(_ROUNDS):
        before = best
        for name in (name for name in features if name != "forward"):
            for step in _STEPS:
                trial = weights | {name: step * spread["forward"] / spread[name]}
                if (value := score(trial)) > best + 1e-9:
                    best, weights = value, trial
        if best == before:
            break
    return weights, sign * best, sign * first
