"""Word alignment: token weights to word weights, the best source word of each target word, and its text form."""

import numpy as np
import pytest
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.inference import (
    AttentionMap,
    alignment_error_rate,
    cross_attention,
    format_pharaoh,
    word_alignment,
    word_weights,
)

# ▁the ▁ca t </s> against ▁die ▁Kat ze ▁da </s>
WEIGHTS = np.array(
    [
        [0.50, 0.20, 0.20, 0.10],
        [0.42, 0.30, 0.20, 0.08],
        [0.10, 0.20, 0.30, 0.40],
        [0.15, 0.05, 0.05, 0.75],
        [0.05, 0.35, 0.40, 0.20],
    ],
    dtype=np.float32,
)


def attention(weights=WEIGHTS, **changes):
    """Return a map of "the cat" and "die Katze da"."""
    fields = {"source": "the cat", "source_words": ["the", "cat"], "source_word_ids": [0, 1, 1, None]}
    fields |= {"source_ids": [3, 4, 5, 2], "source_tokens": ["▁the", "▁ca", "t", "</s>"]}
    fields |= {"target": "die Katze da", "target_words": ["die", "Katze", "da"], "target_word_ids": [0, 1, 1, 2, None]}
    fields |= {"target_ids": [6, 7, 8, 9, 2], "target_tokens": ["▁die", "▁Kat", "ze", "▁da", "</s>"]}
    return AttentionMap(**{"weights": weights} | fields | changes)


def test_source_pieces_are_added_and_target_pieces_averaged():
    expected = [[0.50, 0.40], [0.26, 0.50], [0.15, 0.10]]
    np.testing.assert_allclose(word_weights(attention()), expected, atol=1e-6)
    # No single token of "cat" outweighs "the" in the row of "▁Kat". The end of sequence counts for nothing.
    assert word_alignment(attention()) == [(0, 0), (0, 2), (1, 1)]
    assert format_pharaoh(word_alignment(attention())) == "0-0 0-2 1-1"


def test_first_of_equals_wins_and_words_without_weight_have_no_link():
    tied = np.array([[0.4, 0.2, 0.2, 0.2], [0, 0, 0, 1], [0, 0, 0, 1], [0.2, 0.4, 0.4, 0], [1, 0, 0, 0]])
    assert word_alignment(attention(tied)) == [(0, 0), (1, 2)]
    assert word_alignment(attention(target_word_ids=[0, 0, 0, 2, None])) == [(0, 2), (1, 0)]
    assert word_alignment(attention(source_words=[], source_word_ids=[None] * 4)) == []
    assert format_pharaoh([]) == ""
    for side in ("source", "target"):
        with pytest.raises(ValueError, match=f"The tokens of the {side} must make up its words, got '"):
            word_alignment(attention(**{f"{side}_word_ids": None}))


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "char", "pretokenized"])
def test_words_of_a_model(kind, joint):
    generator = tiny_generator(joint=joint, kind=kind, source_prefix="the ")
    given = cross_attention(generator, SOURCES[3], TARGETS[3])
    assert given.source == SOURCES[3] and given.source_words == given.source.split()
    assert given.target_words == TARGETS[3].split()
    weights = word_weights(given)
    # What is missing from one went to the prefix and to the end of sequence, and is all that is missing.
    silent = [place for place, word in enumerate(given.source_word_ids) if word is None]
    rows = [[place for place, word in enumerate(given.target_word_ids) if word == index] for index in range(6)]
    missing = [given.weights[row][:, silent].sum(axis=1).mean() for row in rows]
    assert 2 <= len(silent) <= 5 and max(missing) > 0.01
    np.testing.assert_allclose(weights.sum(axis=1), 1 - np.array(missing), atol=1e-5)
    links = word_alignment(given)
    assert sorted(target for _, target in links) == list(range(6)) and links == sorted(links)
    written = cross_attention(generator, SOURCES[0], num_beams=3, max_new_tokens=12)
    assert written.target_words == written.target.split()
    assert set(written.target_word_ids) - {None} == set(range(len(written.target_words)))


def test_alignment_error_rate():
    sure, possible = [[(0, 0), (1, 1)], [(0, 0)]], [[(0, 1)], []]
    assert alignment_error_rate(sure, sure, possible) == 0
    # A and S: 1; A and P: 2; A: 3; S: 3
    assert alignment_error_rate([[(0, 0), (0, 1)], [(2, 2)]], sure, possible) == pytest.approx(1 - 3 / 6)
    assert alignment_error_rate([[], []], sure, possible) == 1
    with pytest.raises(ValueError, match="longer"):
        alignment_error_rate([[]], sure, possible)
