import itertools
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_pair import LetterPair
from random_lengths import random_lengths
from torch.utils.data import DataLoader

from metaphrase.data.encoding import encode_pairs
from metaphrase.data.pairs import DataReport, PairSource, load_pairs
from metaphrase.data.token_budget import (
    LengthGroupedSampler,
    PairStream,
    TokenBudgetSampler,
    TokenBudgetStream,
)
from metaphrase.tokenization.texts import cut_into_batches


def padded_cost(lengths):
    return len(lengths) * int(lengths.max(axis=0).sum())


def test_batches_are_as_large_as_the_budget_allows_and_no_larger():
    lengths = [[3, 2], [3, 3], [5, 2], [1, 1]]
    assert cut_into_batches([0, 1, 2, 3], lengths, 12) == [[0, 1], [2], [3]]
    assert cut_into_batches([0, 1, 2, 3], lengths, 11) == [[0], [1], [2], [3]]
    # A long pair does not widen the batches behind its own.
    assert cut_into_batches([2, 3, 0], [lengths[index] for index in (2, 3, 0)], 12) == [[2], [3, 0]]


def test_order_depends_on_seed_and_epoch_alone():
    lengths = random_lengths()

    def order(seed, epoch):
        sampler = TokenBudgetSampler(lengths, 600, seed)
        sampler.set_epoch(epoch)
        torch.rand(3)  # what else draws random numbers must not matter
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert {frozenset(batch) for batch in order(1, 2)} != {frozenset(batch) for batch in order(1, 3)}


def test_little_is_padded_and_batches_do_not_run_from_short_to_long():
    lengths = random_lengths()
    batches = list(TokenBudgetSampler(lengths, 2000, 0))
    assert 1 - lengths.sum() / sum(padded_cost(lengths[batch]) for batch in batches) < 0.15
    widths = [lengths[batch].sum(axis=1).max() for batch in batches]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.4


def test_longest_pair_that_no_batch_can_hold_is_refused_by_name():
    lengths = np.array([[3, 2], [300, 250], [5, 2]])
    with pytest.raises(ValueError, match=r"number 2 of .*, with 300 source and 250 target tokens, 550 in all, got 549"):
        TokenBudgetSampler(lengths, 549, 0)
    assert len(TokenBudgetSampler(lengths, 550, 0)) >= 1


@pytest.mark.parametrize(("pairs", "processes"), [(5, 2), (7, 3), (6, 3), (2, 3)])
def test_pairs_that_take_a_batch_each_are_filled_up_to_whole_steps(pairs, processes):
    lengths = np.array([[1000, 100]] * pairs)
    lengths[1] = 999, 100
    shards = [TokenBudgetSampler(lengths, 2048, 0, processes, rank) for rank in range(processes)]
    assert {shard.num_fillers for shard in shards} == {-pairs % processes}
    for epoch in range(3):
        for shard in shards:
            shard.set_epoch(epoch)
        shares = [list(shard) for shard in shards]
        assert {len(batches) for batches in shares} == {-(-pairs // processes)}
        indices = [index for batches in shares for batch in batches for index in batch]
        assert sorted(indices) == [*range(pairs), *[pairs + 1] * (-pairs % processes)]
        # No step holds fillers only.
        assert all(any(batch[0] < pairs for batch in step) for step in zip(*shares, strict=True))


def test_lengths_are_rounded_up_as_the_collator_pads():
    sampler = TokenBudgetSampler(np.full((2000, 2), 9), 4096, 0, length_multiple=8)
    assert max(len(batch) * 32 for batch in sampler) <= 4096
    # A pair that the budget holds before its widths are rounded is not refused.
    sampler = TokenBudgetSampler([[9, 9], [4, 4], [3, 2]], 20, 0, length_multiple=8)
    # Rounded, two of the short ones exceed it as well.
    assert sorted(sampler) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="18 in all, got 17"):
        TokenBudgetSampler([[9, 9]], 17, 0, length_multiple=8)


def test_grouped_batches_hold_similar_lengths_in_an_order_of_seed_and_epoch():
    lengths = random_lengths(800).sum(axis=1).tolist()
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (5, 0), (1, 0)):
        sampler = LengthGroupedSampler(lengths, batch_size=8, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(800)) and len(sampler) == 800
    assert orders[0] == orders[3] and len({str(order) for order in orders}) == 3
    batches = [[lengths[index] for index in orders[0][start : start + 8]] for start in range(0, 800, 8)]
    spreads = [max(batch) - min(batch) for batch in batches]
    assert sum(spreads) / 100 < 0.2 * (max(lengths) - min(lengths))
    # Long and short batches alternate: an order from long to short teaches worse.
    falls = sum(max(batch) >= max(later) for batch, later in itertools.pairwise(batches))
    assert 35 < falls < 65


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=60),
    processes=st.integers(1, 4),
    more=st.integers(0, 300),
    seed=st.integers(0, 2**31),
)
def test_no_pair_of_any_corpus_is_lost(lengths, processes, more, seed):
    lengths = np.array(lengths)
    budget = int(lengths.sum(axis=1).max()) + more
    shards = [TokenBudgetSampler(lengths, budget, seed, processes, rank) for rank in range(processes)]
    for epoch in range(2):
        for shard in shards:
            shard.set_epoch(epoch)
        shares = list(map(list, shards))
        assert set(map(len, shares)) == {len(shards[0])}
        batches = list(itertools.chain(*shares))
        indices = sorted(index for batch in batches for index in batch)
        # Indices behind the last pair are fillers, which have no labels.
        assert [index for index in indices if index < len(lengths)] == list(range(len(lengths)))
        pairs = [[index for index in batch if index < len(lengths)] for batch in batches]
        assert all(padded_cost(lengths[batch]) <= budget for batch in pairs if batch)


PAIRS = 700


@pytest.fixture
def pairs():
    lengths = random_lengths(PAIRS)
    return [
        {"input_ids": [number] * source, "labels": [number] * target} for number, (source, target) in enumerate(lengths)
    ]


def stream_of(pairs, **options):
    return TokenBudgetStream(lambda number: pairs, 300, seed=3, **{"pairs_in_buffer": 200, **options})


def numbers(batch):
    return [pair["input_ids"][0] for pair in batch]


@pytest.mark.parametrize("processes", [1, 3])
def test_every_pair_occurs_once_in_a_pass(pairs, processes):
    streams = [iter(stream_of(pairs, num_processes=processes, process_index=rank)) for rank in range(processes)]
    seen = []
    while len(seen) < 2 * PAIRS:
        for stream in streams:
            batch = next(stream)
            assert padded_cost(np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in batch])) <= 300
            seen += numbers(batch)
    assert sorted(seen[:PAIRS]) == sorted(seen[PAIRS:]) == list(range(PAIRS))


def test_passes_differ_and_the_seed_decides(pairs):
    first = [numbers(batch) for batch in islice(stream_of(pairs), 200)]
    other = TokenBudgetStream(lambda number: pairs, 300, seed=20240602, pairs_in_buffer=200)
    assert first[:9] != [numbers(batch) for batch in islice(other, 9)]
    length, count = 0, 0
    while count < PAIRS:
        count += len(first[length])
        length += 1
    assert first[:10] != first[length : length + 10]
    # Workers of a loader give the order of one process.
    loader = DataLoader(stream_of(pairs), batch_size=None, num_workers=2, collate_fn=numbers)
    assert list(islice(loader, 30)) == first[:30]


def test_an_empty_stream_and_a_pair_that_no_batch_can_hold_are_refused(pairs):
    with pytest.raises(ValueError, match="at least one pair"):
        next(iter(stream_of([])))
    pairs[500] = {"input_ids": [1] * 200, "labels": [1] * 101}
    with pytest.raises(ValueError, match="number 501 of those to train on, with 200 source and 101 target"):
        list(islice(stream_of(pairs), PAIRS))


LINES = ["ab\tc", "abcd\tbcde", "", "a\tabc", "x\ty\tz", " \tb", "abcd\tbcd", "c\tcc", "d\td"]
LIMITS = {"max_source_length": 4, "max_target_length": 4}
COUNTS = ("read", "kept", "malformed", "empty_source", "empty_target", "source_too_long", "target_too_long")
COUNTS += ("source_truncated", "target_truncated")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    return path


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
@pytest.mark.parametrize("prefix", [None, "x"])
def test_a_stream_equals_reading_a_whole_file(file, too_long, prefix, tmp_path):
    place = {"file": file, "malformed": "skip", "source_prefix": prefix}
    report = DataReport()
    pairs = load_pairs(**place, report=report, cache_dir=tmp_path / "cache")
    expected, report = encode_pairs(pairs, LetterPair(), **LIMITS, too_long=too_long, report=report)
    stream = PairStream(PairSource(**place), LetterPair(), **LIMITS, too_long=too_long)
    for number in (0, 1):
        streamed = list(stream(number))
        assert [pair["input_ids"] for pair in streamed] == expected["input_ids"][:]
        assert [pair["labels"] for pair in streamed] == expected["labels"][:]
        assert [getattr(stream.report, name) for name in COUNTS] == [getattr(report, name) for name in COUNTS]


@pytest.mark.parametrize(("workers", "start"), [(2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)])
def test_pairs_read_by_workers_are_counted(file, workers, start):
    counts = []
    for options in ({}, {"num_workers": workers, "multiprocessing_context": start}):
        stream = PairStream(PairSource(file=file, malformed="skip"), LetterPair(), **LIMITS)
        loader = DataLoader(TokenBudgetStream(stream, 12, seed=0), batch_size=None, collate_fn=list, **options)
        next(iter(loader))
        counts.append(stream.to_dict())
    assert counts[1] == counts[0] and (counts[0]["read"], counts[0]["kept"], counts[0]["malformed"]) == (9, 4, 2)


def test_a_stream_refuses_pairs_takes_samples_and_has_sides(file):
    with pytest.raises(ValueError, match="`malformed: skip`"):
        list(PairSource(file=file).pairs())
    stream = PairStream(PairSource(file=file, malformed="skip"), LetterPair(), **LIMITS, too_long="error")
    with pytest.raises(ValueError, match=r"got in row 1 5 and 5 tokens"):
        list(stream(0))
    texts = PairSource(file=file, malformed="skip", max_samples=2, source_prefix="t: ")
    assert list(texts.pairs()) == [("t: ab", "c"), ("t: abcd", "bcde")]
    assert list(texts.side(0)) == ["ab", "abcd"]
    assert list(texts.side(1)) == ["c", "bcde"]


def test_a_data_set_is_streamed(tmp_path):
    pairs = [{"translation": {"en": f"a{number}", "de": f"b{number}"}} for number in range(2500)]
    datasets.Dataset.from_list(pairs).to_parquet(str(tmp_path / "train.parquet"))
    texts = PairSource(dataset_name=str(tmp_path), source_column="en", target_column="de")
    assert list(texts.pairs()) == [(f"a{number}", f"b{number}") for number in range(2500)]
