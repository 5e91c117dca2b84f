"""Judges, which score single texts by a model or a function, and the choice among candidates by several scores.

Source: Juraska et al. 2023, MetricX-23, https://aclanthology.org/2023.wmt-1.63, and Juraska et al. 2024, MetricX-24,
arXiv 2410.03983. Och and Ney 2002, https://aclanthology.org/P02-1038, for the sum of weighted scores; Yee et al. 2019, section 2,
arXiv 1908.05731, for the model from target to source and the length.
"""

import importlib
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from metaphrase.analysis.reading import first_logits
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.metrics import METRICS, Ratio, SegmentStatistics
from metaphrase.inference import Generator
from metaphrase.storage.folders import read_fields
from metaphrase.training.recipe.recipe import is_better_lower

# The logit of this token is the score, an error from 0 to 25.
_TOKEN, _MOST = "<extra_id_10>", 25.0
# Prompts with and without a reference, and the most tokens, by the year of the model.
_PROMPTS = {
    "23": ("candidate: {target} reference: {reference}", "candidate: {target} source: {source}", 1024),
    "24": ("source: {source} candidate: {target} reference: {reference}", "source: {source} candidate: {target}", 1536),
}
# Most texts of a call, and most scores that a judge remembers.
_MOST_ROWS = 2**16


@dataclass(frozen=True, eq=False)
class Judge:
    """A score of single texts by its name. `score` takes sources, targets, and references or None, and returns numbers."""

    name: str
    score: Callable[[Sequence[str], Sequence[str], Sequence[str] | None], Sequence[float]]
    is_better_lower: bool
    # Scores of the last texts: systems, candidates and chunks of a corpus often have equal ones.
    _known: dict[tuple[str, str, str | None], float] = field(default_factory=dict, repr=False)

    def values(
        self, sources: Sequence[str], targets: Sequence[str], references: Sequence[str] | None = None
    ) -> np.ndarray:
        """Return the scores. Equal texts are scored once. Refuse a wrong number of scores, and infinite ones."""
        rows = list(zip(sources, targets, [None] * len(targets) if references is None else references, strict=True))
        missing = [row for row in dict.fromkeys(rows) if row not in self._known]
        for start in range(0, len(missing), _MOST_ROWS):
            part = missing[start : start + _MOST_ROWS]
            columns = [list(column) for column in zip(*part, strict=True)]
            scores = [float(value) for value in self.score(*columns[:2], None if references is None else columns[2])]
            if len(scores) != len(part):
                raise MetaphraseError(f"Judge {self.name} must return {len(part)} scores, got {len(scores)}.")
            for row, value in zip(part, scores, strict=True):
                if not math.isfinite(value):
                    raise MetaphraseError(f"Judge {self.name} must return finite scores, got {value} for {row[1]!r}.")
            self._known.update(zip(part, scores, strict=True))
        values = np.array([self._known[row] for row in rows])
        for row in list(self._known)[:-_MOST_ROWS]:
            del self._known[row]
        return values

    def utilities(
        self, sources: Sequence[str], targets: Sequence[str], references: Sequence[str] | None = None
    ) -> np.ndarray:
        """Return the scores, with the other sign if lower ones are better: more is better."""
        values = self.values(sources, targets, references)
        return -values if self.is_better_lower else values

    def segments(
        self, sources: Sequence[str], targets: Sequence[str], references: Sequence[str] | None
    ) -> SegmentStatistics:
        """Return the statistics of a corpus, whose score is the mean."""
        rows = [(float(value), 1) for value in self.values(sources, targets, references)]
        return SegmentStatistics(Ratio(1.0), rows, f"mean|judge:{self.name}")


def load_judge(name: str, show_progress: bool | None = None, **loading: Any) -> Judge:
    """Return a judge: `package.module:function`, or a folder or Hub id of a MetricX model with its tokenizer.

    A function takes sources, targets and references, and returns a number for each; more is better, unless it has an attribute
    `lower_is_better`. A model is read by the prompts of 2024, or of 2023 if its name or origin has metricx-23. More is worse.
    """
    if ":" in name and not Path(name).exists():
        module, _, function_name = name.partition(":")
        # The installed command does not look for modules in this folder.
        sys.path.append(os.getcwd())
        try:
            function = getattr(importlib.import_module(module), function_name)
        except (ImportError, AttributeError) as error:
            raise MetaphraseError(f"A judge must name a module and its function, got {name!r}: {error}.") from error
        return Judge(function_name, function, bool(getattr(function, "lower_is_better", False)))
    generator = Generator.from_pretrained(name, engine="torch", **loading)
    token = generator.tokenizers.source.convert_tokens_to_ids(_TOKEN)
    if token in (None, generator.tokenizers.source.unk_token_id):
        raise MetaphraseError(f"A judge must be a MetricX model, whose tokenizer has {_TOKEN}, got {name!r}.")
    origin = (read_fields(Path(name) / "conversion.json") or {}).get("source", "")
    is_early = re.search(r"metricx[-_]?23", f"{Path(name).name} {origin}", re.IGNORECASE)
    with_reference, without, most = _PROMPTS["23" if is_early else "24"]

    def score(sources: Sequence[str], targets: Sequence[str], references: Sequence[str] | None) -> list[float]:
        prompt = without if references is None else with_reference
        rows = zip(sources, targets, references or targets, strict=True)
        texts = [prompt.format(source=row[0], target=row[1], reference=row[2]) for row in rows]
        # MetricX reads no end of sequence.
        ids = [row[:-1][: most - 1] for row in generator.encode_uncut(texts)]
        logits = first_logits(generator, ids, [token], show_progress)
        return [min(max(float(value), 0.0), _MOST) for value in logits[:, 0]]

    return Judge(Path(name).resolve().name, score, True)


# Reranking

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
        scored = reverse.score(filled, repeated, show_progress=show_progress)
        features["backward"] = np.array([part.mean for part in scored])
    for judge in judges:
        features[judge.name] = judge.utilities(repeated, texts)
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
