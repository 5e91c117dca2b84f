"""Tests of dual scores: both directions count, and pairs that are too long have the score 0."""

import math

import pytest
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.filtering.dual_scores import dual_scores, mean_entropies


def test_dual_scores_join_both_directions_and_are_zero_for_pairs_that_are_too_long():
    forward, backward = tiny_generator(), tiny_generator(seed=1)
    pairs = [*zip(SOURCES, TARGETS, strict=True), (SOURCES[0], "a" * 300), ("a" * 300, TARGETS[0])]
    swapped = [pair[::-1] for pair in pairs]
    scores = dual_scores(mean_entropies(forward, pairs), mean_entropies(backward, swapped))
    entropies = [
        [-score.mean for score in model.score(*sides)]
        for model, sides in ((forward, (SOURCES, TARGETS)), (backward, (TARGETS, SOURCES)))
    ]
    expected = [math.exp(-abs(f - b) - (f + b) / 2) for f, b in zip(*entropies, strict=True)]
    assert scores == pytest.approx([*expected, 0, 0], rel=1e-4) and len(set(scores)) == 6
    assert mean_entropies(forward, []) == []
    with pytest.raises(ValueError, match="must be one model, got an ensemble"):
        mean_entropies(tiny_generator(members=[backward]), pairs)
