"""Text infilling and sentence permutation against their definitions."""

import math
from collections import Counter

import numpy as np
import pytest

from metaphrase.data.denoising.objectives import (
    TextInfilling,
    full_stop_ids_of,
    mask_spans,
    sentence_ends,
)
from metaphrase.tokenization import train_tokenizer

END, MASK, STOP, QUESTION = 1, 3, 4, 5


def infilling(**fields):
    return TextInfilling(**{"mask_token_id": MASK, "eos_token_id": END, **fields})


def generator(seed=0):
    return np.random.default_rng(seed)


def text_of(num_sentences, random):
    """Sentences of 1 to 8 distinct tokens and a full stop."""
    sentences, token = [], 10
    for _ in range(num_sentences):
        length = int(random.integers(1, 9))
        sentences.append([*range(token, token + length), STOP])
        token += length
    return sentences


def test_the_target_is_the_original_text_and_lengths_are_bounds():
    for seed in range(50):
        block = np.concatenate(text_of(12, generator(seed)))
        objective = infilling(full_stop_ids=[STOP])
        source, target = objective(block, generator(seed))
        assert target.tolist() == [*block.tolist(), END]
        assert source[-1] == END and source.dtype == target.dtype == np.int64
        assert len(source) <= objective.lengths(len(block))[0] and len(target) == objective.lengths(len(block))[1]


@pytest.mark.parametrize("length", [1, 2, 10, 77, 400])
def test_exactly_the_share_of_tokens_is_masked_and_the_rest_keeps_its_order(length):
    objective = infilling()
    for seed in range(30):
        block = np.arange(10, 10 + length)
        source, _ = objective(block, generator(seed))
        kept = [token for token in source[:-1].tolist() if token != MASK]
        assert len(kept) == length - max(round(0.3 * length), 1)
        assert kept == sorted(kept) and set(kept) <= set(block.tolist())


@pytest.mark.parametrize("mean", [1.5, 6.0])
def test_span_lengths_are_poisson_distributed(mean):
    objective = infilling(mean_span_length=mean)
    # The shortened span is anywhere; in blocks of so many spans it hardly counts.
    lengths = np.concatenate([objective.span_lengths(20_000, generator(seed)) for seed in range(10)])
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.var() == pytest.approx(mean, rel=0.05)
    for value in range(6):
        share = math.exp(-mean) * mean**value / math.factorial(value)
        assert (lengths == value).mean() == pytest.approx(share, abs=0.01)


def test_the_shortened_span_may_be_any():
    objective, totals = infilling(), np.zeros(2)
    for seed in range(4000):
        lengths = objective.span_lengths(20, generator(seed))
        totals += lengths[0], lengths[-1]
    assert totals[0] == pytest.approx(totals[1], rel=0.05)


def test_one_mask_per_span_and_empty_spans_insert_one():
    ids = np.arange(10, 20)
    masked = mask_spans(ids, np.array([0, 3, 0, 2]), MASK, generator(5)).tolist()
    assert masked.count(MASK) == 4 and len(masked) == 10 - 5 + 4
    places = Counter()
    for seed in range(3000):
        places[tuple(mask_spans(np.arange(10, 13), np.array([0]), MASK, generator(seed)).tolist())] += 1
    assert set(places) == {(3, 10, 11, 12), (10, 3, 11, 12), (10, 11, 3, 12), (10, 11, 12, 3)}
    assert min(places.values()) > 600
    assert mask_spans(ids, np.array([10]), MASK, generator()).tolist() == [MASK]


def test_spans_hide_neighbours_in_the_order_given():
    ids = np.arange(10, 40)
    for seed in range(200):
        gaps = []
        masked = mask_spans(ids, np.array([1, 4, 2]), MASK, generator(seed)).tolist()
        last = 9
        for token in [*masked, 40]:
            if token != MASK:
                gaps += [token - last - 1] * (token - last > 1)
                last = token
        # Spans that touch make one gap.
        assert gaps in ([1, 4, 2], [5, 2], [1, 6], [7])


def test_sources_never_outgrow_their_block():
    objective = infilling(mean_span_length=0.05, noise_density=0.5)
    for seed in range(20):
        source, _ = objective(np.arange(10, 50), generator(seed))
        assert len(source) == objective.lengths(40)[0] == 41
        assert (source == MASK).sum() == 20


def test_sentences_end_behind_runs_of_full_stops_and_at_the_end():
    ids = np.array([9, STOP, 9, 9, STOP, QUESTION, STOP, 9])
    assert sentence_ends(ids, [STOP, QUESTION]).tolist() == [2, 7, 8]
    assert sentence_ends(ids[:7], [STOP, QUESTION]).tolist() == [2, 7]
    assert sentence_ends(ids, []).tolist() == [8]


def test_permutation_keeps_sentences_whole_and_takes_each_order():
    sentences = text_of(3, generator(1))
    ids = np.concatenate(sentences)
    orders = Counter()
    for seed in range(3000):
        permuted = infilling(full_stop_ids=[STOP])._permute_in_documents(ids, generator(seed))
        parts = np.split(permuted, sentence_ends(permuted, [STOP])[:-1])
        orders[tuple(sentences.index(part.tolist()) for part in parts)] += 1
    assert len(orders) == 6 and min(orders.values()) > 380


def test_sentences_stay_in_their_document():
    documents = [text_of(4, generator(seed)) for seed in (1, 2)]
    bounds = [sum(map(len, sentences)) for sentences in documents]
    block = np.array([token for sentences in documents for token in [*np.concatenate(sentences), END]][:-1])
    objective, moved = infilling(full_stop_ids=[STOP]), 0
    for seed in range(20):
        shuffled = objective._permute_in_documents(block, generator(seed))
        assert shuffled[bounds[0]] == END
        for part, sentences in zip((shuffled[: bounds[0]], shuffled[bounds[0] + 1 :]), documents, strict=True):
            found = np.split(part, sentence_ends(part, [STOP])[:-1])
            assert sorted(one.tolist() for one in found) == sorted(sentences)
        moved += (shuffled != block).any()
    assert moved > 15


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram"])
def test_full_stops_of_a_tokenizer(kind):
    texts = ["It rains. Does it? It does! (So they say.) 3.5 is a number, of course.", 'He said: "No." And left.'] * 20
    tokenizer = train_tokenizer(texts, kind=kind, show_progress=False)
    full_stops = full_stop_ids_of(tokenizer)
    assert full_stops and tokenizer.eos_token_id not in full_stops
    assert not {tokenizer.convert_tokens_to_ids(token) for token in (",", "a", "3.5")} & set(full_stops)
    ids = tokenizer("It rains. Does it? It does! No", add_special_tokens=False).input_ids
    parts = np.split(np.array(ids), sentence_ends(np.array(ids), full_stops)[:-1])
    assert [tokenizer.decode(part).strip() for part in parts] == ["It rains.", "Does it?", "It does!", "No"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise_density": 0.0}, r"`noise_density` must be above 0 and below 1, got 0\.0"),
        ({"noise_density": 1.0}, r"`noise_density` must be above 0 and below 1, got 1\.0"),
        ({"mean_span_length": 0.0}, r"`mean_span_length` must be above 0 and finite, got 0\.0"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        infilling(**fields)
    with pytest.raises(ValueError, match="at least 1 token to be masked, got 0"):
        infilling().check_block_length(0)
