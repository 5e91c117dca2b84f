import numpy as np
import pytest
from artificial_pairs import make_pairs

from metaphrase.filtering import alignment
from metaphrase.filtering.alignment import AlignmentModel


@pytest.fixture(scope="module")
def noisy():
    """Return pairs of which the last 600 of 3,600 are misaligned, and their order."""
    pairs = make_pairs(3600)
    pairs[3000:] = [(source, target) for (source, _), (_, target) in zip(pairs[3000:], make_pairs(600, 1), strict=True)]
    order = np.random.default_rng(0).permutation(len(pairs))
    return [pairs[index] for index in order], order >= 3000


def test_misaligned_pairs_are_found(noisy):
    pairs, is_noise = noisy
    model = AlignmentModel(pairs)
    is_low = model.scores(pairs) < model.threshold
    assert is_low[is_noise].mean() > 0.95 and is_low[~is_noise].mean() < 0.01
    assert 0.05 < model.noise_share < 600 / 3600 + 0.02


def test_a_clean_corpus_loses_hardly_a_pair():
    pairs = make_pairs(3600)
    model = AlignmentModel(pairs)
    assert (model.scores(pairs) < model.threshold).mean() < 0.002


def test_scores_do_not_depend_on_batches_or_repetition(noisy, monkeypatch):
    pairs = noisy[0][:2000]
    model, again = AlignmentModel(pairs), AlignmentModel(pairs)
    scores = model.scores(pairs)
    assert np.array_equal(scores, again.scores(pairs))
    monkeypatch.setattr(alignment, "_PAIRS_PER_BATCH", 7)
    assert np.array_equal(scores, model.scores(pairs))
    assert np.array_equal(scores[:5], np.concatenate([model.scores([pair]) for pair in pairs[:5]]))
    assert model.scores([]).size == 0
    # Words that the model does not know are no error.
    assert np.isfinite(model.scores([("unknown words", "palabras"), ("", "t1")])).all()
