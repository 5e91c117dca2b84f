"""Approximate randomization, a test of the difference between systems, and the memory that such tests need."""

from collections.abc import Mapping

import numpy as np

from metaphrase.evaluation.metrics import SegmentStatistics

NUM_RANDOMIZATION_TRIALS = 10_000
# All resamples or trials of a test are in memory at once.
MAX_TEST_BYTES = 8_000_000_000


def randomization(systems: Mapping[str, SegmentStatistics], num_trials: int, seed: str) -> list[float]:
    """Test each system against the first one by approximate randomization. Return the probability of each but the first.

    The trials are those of sacreBLEU, which does not count a trial that has exactly the observed difference. Where few sentences
    differ, most trials have it.

    Source: Riezler and Maxwell 2005 (W05-0908).
    """
    first = next(iter(systems.values()))
    check_memory("paired_ar_n", num_trials, len(first.rows), 8)
    generator = np.random.default_rng(int(seed) if seed.isnumeric() else None)
    is_swapped = generator.integers(2, size=(num_trials, len(first.rows)), dtype=bool)

    def compute(sums: np.ndarray) -> np.ndarray:
        return np.array([first.scorer._aggregate_and_compute([row]).score for row in sums])

    # Products of floats are fast. The sums are the same: all counts are whole numbers below 2**53.
    baseline, *compared = (np.asarray(segments.rows, dtype=np.float64) for segments in systems.values())
    probabilities = []
    for rows in compared:
        swapped = is_swapped @ (rows - baseline)
        differences = np.abs(compute(baseline.sum(0) + swapped) - compute(rows.sum(0) - swapped))
        observed = np.abs(np.subtract(*compute(np.stack([baseline.sum(0), rows.sum(0)]))))
        # Equal differences of fractions may differ in their last digit.
        count = np.sum(differences >= observed * (1 - 1e-9))
        probabilities.append(float((count + 1) / (num_trials + 1)))
    return probabilities


def check_memory(name: str, number: int, num_segments: int, bytes_per_segment: int) -> None:
    """Refuse a number of resamples or trials that would fill the memory. `name` is its option."""
    if number * num_segments * bytes_per_segment > MAX_TEST_BYTES:
        most = MAX_TEST_BYTES // (num_segments * bytes_per_segment)
        raise ValueError(
            f"`{name}` must be at most {most} for {num_segments} segments, got {number}: the test would need "
            f"{number * num_segments * bytes_per_segment / 1e9:.0f} GB of memory."
        )
