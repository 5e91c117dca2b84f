"""Batches within a token budget from a stream."""

from itertools import islice

import numpy as np
import pytest
from random_lengths import random_lengths
from torch.utils.data import DataLoader

from metaphrase.data.token_budget import TokenBudgetStream, padded_cost

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


def one_pass(stream):
    """The batches until all pairs have come once."""
    batches, count = [], 0
    for batch in stream:
        batches.append(batch)
        count += len(batch)
        if count == PAIRS:
            return batches


@pytest.mark.parametrize("processes", [1, 3])
def test_every_pair_occurs_once_in_a_pass(pairs, processes):
    streams = [iter(stream_of(pairs, num_processes=processes, process_index=rank)) for rank in range(processes)]
    seen = []
    while len(seen) < 2 * PAIRS:
        for stream in streams:
            batch = next(stream)
            assert padded_cost(*np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in batch]).T) <= 300
            seen += numbers(batch)
    assert sorted(seen[:PAIRS]) == sorted(seen[PAIRS:]) == list(range(PAIRS))


@pytest.mark.parametrize("pairs_in_buffer", [349, 699, 700])
def test_a_rest_of_less_than_a_pair_for_each_process_is_not_lost(pairs, pairs_in_buffer):
    options = {"num_processes": 3, "pairs_in_buffer": pairs_in_buffer}
    streams = [iter(stream_of(pairs, process_index=rank, **options)) for rank in range(3)]
    seen = []
    while len(seen) < PAIRS:
        seen += [number for stream in streams for number in numbers(next(stream))]
    assert sorted(seen) == list(range(PAIRS))


def test_pairs_that_take_a_batch_each_are_filled_up_by_ones_that_do_not_count():
    pairs = [{"input_ids": [number] * 200, "labels": [number] * 50} for number in range(21)]
    options = {"num_processes": 2, "pairs_in_buffer": 10}
    streams = [iter(stream_of(pairs, process_index=rank, **options)) for rank in range(2)]
    batches = [next(stream) for _ in range(11) for stream in streams]
    counted = [numbers(batch)[0] for batch in batches if batch[0]["labels"][0] != -100]
    assert sorted(counted) == list(range(21))
    # The pass after it begins in the same step for all.
    assert len(batches) == 22


def test_lengths_are_rounded_up_as_the_collator_pads():
    pairs = [{"input_ids": [1] * 9, "labels": [1] * 9}] * 100
    stream = stream_of(pairs, pairs_in_buffer=100)
    stream.length_multiple = 8
    assert max(len(batch) * 32 for batch in islice(stream, 20)) <= 300


def test_fewer_pairs_than_processes_are_refused(pairs):
    with pytest.raises(ValueError, match="at least 3 pairs"):
        next(iter(stream_of(pairs[:2], num_processes=3)))


def test_passes_differ_and_the_seed_decides(pairs):
    first = [numbers(batch) for batch in islice(stream_of(pairs), 200)]
    assert first == [numbers(batch) for batch in islice(stream_of(pairs), 200)]
    other = TokenBudgetStream(lambda number: pairs, 300, seed=20240602, pairs_in_buffer=200)
    assert first[:9] != [numbers(batch) for batch in islice(other, 9)]
    length = len(one_pass(stream_of(pairs)))
    assert first[:10] != first[length : length + 10]


def test_workers_of_a_loader_give_the_order_of_one(pairs):
    expected = [numbers(batch) for batch in islice(stream_of(pairs), 30)]
    loader = DataLoader(stream_of(pairs), batch_size=None, num_workers=2, collate_fn=numbers)
    assert list(islice(loader, 30)) == expected


def test_a_pair_that_no_batch_can_hold_is_refused(pairs):
    pairs[500] = {"input_ids": [1] * 200, "labels": [1] * 101}
    with pytest.raises(ValueError, match="number 501 of those to train on, with 200 source and 101 target"):
        one_pass(stream_of(pairs))


def test_an_empty_stream_and_a_buffer_smaller_than_the_processes_are_refused(pairs):
    with pytest.raises(ValueError, match="at least one pair"):
        next(iter(stream_of([])))
    with pytest.raises(ValueError, match="at least 2 pairs"):
        next(iter(stream_of(pairs, pairs_in_buffer=1, num_processes=2)))
