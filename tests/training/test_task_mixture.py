"""Mixing rates by the paper's formulas, and rows that lose none."""

import numpy as np
import pytest

from metaphrase.training.corpora import mixed_rows, mixing_rates


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mixing": "proportional"}, [0.9, 0.1]),
        ({"mixing": "equal"}, [0.5, 0.5]),
        ({"mixing": "temperature", "temperature": 2.0}, [0.75, 0.25]),
        ({"mixing": "proportional", "limit": 300}, [0.75, 0.25]),
        ({"mixing": "temperature", "temperature": 2.0, "limit": 400}, [2 / 3, 1 / 3]),
        ({"mixing": "equal", "limit": 1}, [0.5, 0.5]),
    ],
)
def test_rates_by_hand(options, expected):
    np.testing.assert_allclose(mixing_rates([900, 100], [1, 1], **options), expected)


def test_weights_are_factors():
    np.testing.assert_allclose(mixing_rates([900, 100], [1, 9]), [0.5, 0.5])
    np.testing.assert_allclose(mixing_rates([5, 7, 9], [1, 1, 2], mixing="equal"), [0.25, 0.25, 0.5])


@pytest.mark.parametrize("sizes", [[7, 3, 11], [1, 1000], [5]])
@pytest.mark.parametrize("mixing", ["proportional", "temperature", "equal"])
def test_every_row_occurs_and_the_shares_are_right(sizes, mixing):
    rates = mixing_rates(sizes, [1.0] * len(sizes), mixing)
    rows = mixed_rows(sizes, rates, seed=3)
    total = sum(map(len, rows))
    for size, rate, chosen in zip(sizes, rates, rows, strict=True):
        counts = np.bincount(chosen, minlength=size)
        assert len(counts) == size and counts.min() >= 1 and counts.max() - counts.min() <= 1
        assert abs(len(chosen) - rate * total) <= len(sizes)
    # No shorter epoch holds them all.
    assert min(len(chosen) - size for size, chosen in zip(sizes, rows, strict=True)) == 0


def test_rest_is_drawn_by_the_seed():
    rates = mixing_rates([1000, 300], [1, 1], "temperature")
    first, again, other = (mixed_rows([1000, 300], rates, seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
