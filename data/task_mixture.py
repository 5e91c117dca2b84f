"""Mixing rates: the share of each task in a run of several tasks.

Source: Raffel et al. 2020, section 3.5.2, arXiv 1910.10683: examples-proportional mixing with a limit, temperature-scaled mixing,
and equal mixing.
"""

from collections.abc import Sequence

import numpy as np


def mixing_rates(
    sizes: Sequence[int],
    weights: Sequence[float],
    mixing: str = "proportional",
    temperature: float = 2.0,
    limit: int | None = None,
) -> np.ndarray:
    """Return the share of each task among the examples of a run.

    Args:
        sizes: Training examples of each task.
        weights: Factors on top of the sizes.
        mixing: `proportional` to the sizes, `temperature` (to their root of that degree), or `equal`.
        temperature: 1 is proportional. Higher values are more equal.
        limit: Most examples that a task counts (the paper's K).

    Returns:
        Shares `(tasks,)`, whose sum is 1.
    """
    counted = np.minimum(sizes, np.inf if limit is None else limit).astype(np.float64)
    exponent = {"proportional": 1.0, "temperature": 1 / temperature, "equal": 0.0}[mixing]
    rates = counted**exponent * np.asarray(weights, dtype=np.float64)
    return rates / rates.sum()


def mixed_rows(sizes: Sequence[int], rates: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return the rows of each task in an epoch: every row at least once, rows of favoured tasks more often.

    The epoch is as short as possible. Random rows fill up what is not a whole number of repetitions.

    Args:
        sizes: Rows of each task.
        rates: Shares of the tasks (see `mixing_rates`).
        seed: Seed of the random rows.

    Returns:
        Rows of each task in ascending order, repetitions side by side.
    """
    length = max(size / rate for size, rate in zip(sizes, rates, strict=True))
    generator = np.random.default_rng(seed)
    rows = []
    for size, rate in zip(sizes, rates, strict=True):
        repetitions, rest = divmod(round(length * rate), size)
        extra = generator.permutation(size)[:rest]
        rows.append(np.sort(np.concatenate((np.tile(np.arange(size), repetitions), extra))))
    return rows
