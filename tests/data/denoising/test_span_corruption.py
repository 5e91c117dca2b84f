"""Span corruption against its definition: numbers of tokens and spans, their positions, and no lost token."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from metaphrase.data.denoising.dataset import longest_block
from metaphrase.data.denoising.objectives import SpanCorruption, random_segmentation, replace_spans

END = 1
SENTINELS = tuple(range(999, 799, -1))
SETTINGS = [(0.15, 3.0), (0.5, 8.0), (0.5, 64.0), (0.1, 1.0), (0.25, 2.5)]


def corruption(density=0.15, mean=3.0, sentinels=SENTINELS, anywhere=False):
    options = {"noise_density": density, "mean_span_length": mean, "spans_anywhere": anywhere}
    return SpanCorruption(sentinel_ids=sentinels, eos_token_id=END, **options)


def generator(seed=0):
    return np.random.default_rng(seed)


def restored(source, target, sentinels=SENTINELS):
    """Puts each span of the target into the place of its sentinel in the source, by their definition alone."""
    assert source[-1] == END and target[-1] == END
    spans, current = {}, None
    for token in target[:-1]:
        if token in sentinels:
            current = token
            assert token not in spans
            spans[token] = []
        else:
            spans[current].append(token)
    whole = []
    for token in source[:-1]:
        whole += spans.pop(token) if token in sentinels else [token]
    assert not spans
    return whole


def test_the_papers_example():
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    source, target = replace_spans(range(len(words)), np.array([[2, 4], [8, 9]]), [99, 98, 97], 50)
    text = dict(enumerate(words)) | {99: "<X>", 98: "<Y>", 97: "<Z>", 50: "</s>"}
    assert " ".join(text[index] for index in source.tolist()) == "Thank you <X> me to your party <Y> week </s>"
    assert " ".join(text[index] for index in target.tolist()) == "<X> for inviting <Y> last </s>"


# In the last setting, a block has as many spans as its kept tokens can separate.
@pytest.mark.parametrize(("density", "mean"), [*SETTINGS, (0.8, 1.0)])
@pytest.mark.parametrize("length", [2, 3, 20, 129])
@pytest.mark.parametrize("anywhere", [False, True])
def test_source_and_target_hold_the_block_and_have_the_stated_lengths(density, mean, length, anywhere):
    objective = corruption(density, mean, anywhere=anywhere)
    for seed in range(20):
        block = generator(seed).integers(2, 700, size=length)
        source, target = objective(block, generator(seed))
        assert source.dtype == target.dtype == np.int64
        assert restored(source.tolist(), target.tolist()) == block.tolist()
        assert (len(source), len(target)) == objective.lengths(length)


@pytest.mark.parametrize(("density", "mean"), SETTINGS)
def test_density_spans_and_their_mean_length_are_as_defined(density, mean):
    for length in (128, 256, 512):
        num_noise, num_spans = round(length * density), max(round(round(length * density) / mean), 1)
        for seed in range(10):
            spans = corruption(density, mean).spans(length, generator(seed))
            assert spans.shape == (num_spans, 2)
            widths = spans[:, 1] - spans[:, 0]
            assert widths.sum() == num_noise and widths.min() >= 1
            assert abs(widths.mean() - min(mean, num_noise)) <= mean / (2 * num_spans) + 0.5
            # A kept token stands before each span, and nothing stands behind the last one.
            assert spans[0, 0] >= 1 and spans[-1, 1] == length
            assert all(later[0] > earlier[1] for earlier, later in pairwise(spans))


def test_each_sentinel_is_used_once_and_in_order():
    for side in corruption()(np.arange(2, 402), generator()):
        assert [token for token in side.tolist() if token in SENTINELS] == list(SENTINELS[:20])


def test_published_lengths_of_t5():
    assert corruption().lengths(568) == (512, 114)
    assert longest_block(corruption(), 512) == 568


@pytest.mark.parametrize(("density", "mean"), SETTINGS)
def test_the_longest_block_fills_the_source_exactly(density, mean):
    objective = corruption(density, mean, sentinels=range(1000, 3000))
    for length in range(20, 300, 7):
        block_length = longest_block(objective, length)
        source, _ = objective(np.full(block_length, 5), generator(length))
        assert len(source) == length
        assert objective.lengths(block_length + 1)[0] == length + 1


def test_the_target_can_be_what_limits_a_block():
    objective = corruption(0.5)
    block_length = longest_block(objective, 100, 60)
    assert objective.lengths(block_length)[1] <= 60 < objective.lengths(block_length + 1)[1]
    assert objective.lengths(block_length)[0] < 100


def test_all_segmentations_are_equally_likely():
    random, draws = generator(), 12_000
    seen = Counter(tuple(random_segmentation(6, 3, random).tolist()) for _ in range(draws))
    expected = {(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)}
    assert set(seen) == expected and len(expected) == 10
    # Six standard deviations of a count.
    assert all(abs(times - draws / 10) < 6 * (draws * 0.09) ** 0.5 for times in seen.values())


def test_spans_anywhere_are_all_equally_likely():
    objective, draws = corruption(0.5, 2.0, anywhere=True), 12_000
    seen = Counter(tuple(objective.spans(8, generator(seed)).ravel().tolist()) for seed in range(draws))
    # Two spans of four tokens together, apart from one another, in eight.
    expected = {
        (start, start + first, later, later + 4 - first)
        for first in (1, 2, 3)
        for start in range(8)
        for later in range(start + first + 1, 8)
        if later + 4 - first <= 8
    }
    assert set(seen) == expected
    share = draws / len(expected)
    assert all(abs(times - share) < 6 * share**0.5 for times in seen.values())


def test_a_single_span_is_the_end_unless_spans_lie_anywhere():
    assert corruption().is_fixed(30) and not corruption().is_fixed(31)
    assert {tuple(corruption().spans(30, generator(seed))[0].tolist()) for seed in range(20)} == {(26, 30)}
    anywhere = corruption(anywhere=True)
    assert not anywhere.is_fixed(30)
    starts = Counter(int(anywhere.spans(30, generator(seed))[0, 0]) for seed in range(2700))
    assert set(starts) == set(range(27)) and min(starts.values()) > 50


def test_too_few_sentinels_are_refused_with_the_number_needed():
    with pytest.raises(
        ValueError, match=r"`sentinel_ids` must hold at least 28 ids for blocks of 568 .*, got 27\. Set `num_sentinels`"
    ):
        corruption(sentinels=SENTINELS[:27])(np.full(568, 5), generator())
    corruption(sentinels=SENTINELS[:28])(np.full(568, 5), generator())
    with pytest.raises(ValueError, match="at least 28 ids for blocks of 568"):
        longest_block(corruption(sentinels=SENTINELS[:27]), 512)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"density": 0.0}, r"`noise_density` must be above 0 and below 1, got 0\.0"),
        ({"mean": 0.5}, r"`mean_span_length` must be at least 1, got 0\.5"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        corruption(**fields)


def test_blocks_need_two_tokens():
    with pytest.raises(ValueError, match="at least 2 tokens to be corrupted, got 1"):
        corruption()([5], generator())
    with pytest.raises(ValueError, match="must hold a block of 2 tokens, which takes 3 and 3, got 2 and None"):
        longest_block(corruption(), 2)
