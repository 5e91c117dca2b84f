"""Intervals and paired tests by sacreBLEU's own classes, for every score that follows from sums over segments.

Source: Koehn 2004 for the bootstrap; Riezler and Maxwell 2005 for approximate randomization; Post 2018 (arXiv 1804.08771).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sacrebleu.metrics.base import Score, Signature
from sacrebleu.significance import PairedTest, Result

NUM_BOOTSTRAP_SAMPLES, NUM_RANDOMIZATION_TRIALS = 1000, 10_000
# sacreBLEU holds all resamples at once. The first limit is that of an interval beside a score, the second that of a test.
MAX_RESAMPLED_BYTES, MAX_TEST_BYTES = 1_000_000_000, 8_000_000_000


class Ratio:
    """Quotient of two sums over segments, with the methods of sacreBLEU's metrics that its tests call."""

    def __init__(self, factor: float = 100.0):
        self.factor = factor

    def _aggregate_and_compute(self, statistics: Sequence) -> Score:
        return self._compute_score_from_stats(np.sum(statistics, axis=0))

    def _compute_score_from_stats(self, sums: Sequence) -> Score:
        numerator, denominator = sums
        # TER has the same rule: with nothing to count, no edit is right, and any edit is wrong.
        return Score("ratio", float(self.factor * (numerator / denominator if denominator else min(numerator, 1))))

    def get_signature(self) -> Signature:
        """Return the signature that sacreBLEU adds the facts of a test to."""
        return Signature({"num_refs": 1})


class _Known:
    """Metric of sacreBLEU that takes statistics in place of outputs. So no test computes them again."""

    def __init__(self, scorer: Any):
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def _extract_corpus_statistics(self, statistics: np.ndarray, references: None) -> np.ndarray:
        return statistics


@dataclass(frozen=True)
class SegmentStatistics:
    """Numbers of each segment whose sums give a corpus score.

    Attributes:
        scorer: A metric of sacreBLEU, or `Ratio`.
        rows: A row of numbers for each segment.
        signature: The signature of the score.
    """

    scorer: Any
    rows: Sequence[Sequence[float]]
    signature: str

    def score(self, indices: Iterable[int]) -> float:
        """Return the score of some segments."""
        return float(self.scorer._aggregate_and_compute([self.rows[index] for index in indices]).score)

    def interval(self, num_samples: int = NUM_BOOTSTRAP_SAMPLES) -> dict[str, Any]:
        """Return the 95 % interval under sacreBLEU's names; empty if it would need more than `MAX_RESAMPLED_BYTES`.

        `confidence_mean` is the mean over the resamples, and `confidence_var` half of the width of the interval.
        """
        num_values = num_samples * len(self.rows) * (len(self.rows[0]) + 2)
        if num_samples < 2 or 4 * num_values > MAX_RESAMPLED_BYTES:
            return {}
        [result], seed = paired_test({"": self}, "bs", num_samples)
        facts = {"confidence_mean": float(result.mean), "confidence_var": float(result.ci)}
        return facts | {"bs": num_samples, "seed": seed}


def paired_test(
    systems: Mapping[str, SegmentStatistics], kind: Literal["bs", "ar"], num_samples: int
) -> tuple[list[Result], str]:
    """Test each system against the first one.

    Args:
        systems: Statistics of one score by the name of the system.
        kind: `bs` for the paired bootstrap, which also gives intervals; `ar` for approximate randomization.
        num_samples: Number of resamples or of trials.

    Returns:
        A result for each system, and the seed: 12345, or the environment variable `SACREBLEU_SEED`.

    Raises:
        ValueError: If the test would need more than `MAX_TEST_BYTES`.
    """
    first = next(iter(systems.values()))
    bytes_per_sample = len(first.rows) * (4 * (len(first.rows[0]) + 2) if kind == "bs" else 8)
    if num_samples * bytes_per_sample > MAX_TEST_BYTES:
        raise ValueError(
            f"`paired_{kind}_n` must be at most {MAX_TEST_BYTES // bytes_per_sample} for {len(first.rows)} segments, "
            f"got {num_samples}: the test would need {num_samples * bytes_per_sample / 1e9:.0f} GB of memory."
        )
    scorer = _Known(first.scorer)
    # Products of floats are fast. The sums are the same: all counts are whole numbers below 2**53.
    rows = [(name, np.asarray(segments.rows, dtype=np.float64)) for name, segments in systems.items()]
    signatures, results = PairedTest(rows, {"score": scorer}, None, kind, num_samples)()
    [(name, signature)] = signatures.items()
    return results[name], signature.info["seed"]
