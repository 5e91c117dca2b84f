"""Batches within a token budget, and batches of similar length."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_lengths import random_lengths

from metaphrase.data.token_budget import (
    LengthGroupedSampler,
    TokenBudgetSampler,
    WithFillers,
    padded_cost,
    split_to_count,
)
from metaphrase.tokenization.batches import cut_into_batches


def test_batches_are_as_large_as_the_budget_allows_and_no_larger():
    lengths = [[3, 2], [3, 3], [5, 2], [1, 1]]
    assert cut_into_batches([0, 1, 2, 3], lengths, 12) == [[0, 1], [2], [3]]
    assert cut_into_batches([0, 1, 2, 3], lengths, 11) == [[0], [1], [2], [3]]
    # A long pair does not widen the batches behind its own.
    assert cut_into_batches([2, 3, 0], [lengths[index] for index in (2, 3, 0)], 12) == [[2], [3, 0]]


@pytest.mark.parametrize(("processes", "window"), [(1, 200), (3, 2)])
def test_every_pair_occurs_once_within_the_budget_and_all_processes_have_equally_many_batches(processes, window):
    lengths = random_lengths()
    shards = [TokenBudgetSampler(lengths, 600, 7, processes, rank, window) for rank in range(processes)]
    for epoch in range(3):
        for shard in shards:
            shard.set_epoch(epoch)
        batches = [list(shard) for shard in shards]
        assert set(map(len, batches)) == {len(shards[0])}
        indices = [index for shard_batches in batches for batch in shard_batches for index in batch]
        assert sorted(indices) == list(range(len(lengths)))
        assert all(padded_cost(*lengths[batch].T) <= 600 for batch in itertools.chain(*batches))


def test_an_epoch_of_more_batches_than_planned_is_formed_anew_from_all_pairs():
    lengths = random_lengths()
    sampler = TokenBudgetSampler(lengths, 600, 7, batches_per_chunk=2)
    whole = TokenBudgetSampler(lengths, 600, 7, batches_per_chunk=10**6)
    assert len(whole) < 0.95 * len(sampler)
    sampler.batches_per_process = len(whole)
    batches = list(sampler)
    assert len(batches) == len(whole)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(padded_cost(*lengths[batch].T) <= 600 for batch in batches)


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


def test_little_is_padded():
    lengths = random_lengths()
    sampler = TokenBudgetSampler(lengths, 2000, 0)
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    costs = sum(padded_cost(*lengths[shuffled[i : i + 64]].T) for i in range(0, len(shuffled), 64))
    assert sampler.padding_share() < 0.15 < 0.4 < 1 - lengths.sum() / costs


def test_batches_do_not_run_from_short_to_long():
    lengths = random_lengths()
    widths = [lengths[batch].sum(axis=1).max() for batch in TokenBudgetSampler(lengths, 2000, 0)]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.4


def test_longest_pair_that_no_batch_can_hold_is_refused_by_name():
    lengths = np.array([[3, 2], [300, 250], [5, 2]])
    with pytest.raises(ValueError, match=r"number 2 of .*, with 300 source and 250 target tokens, 550 in all, got 549"):
        TokenBudgetSampler(lengths, 549, 0)
    assert len(TokenBudgetSampler(lengths, 550, 0)) >= 1


def test_fewer_pairs_than_processes_are_refused():
    with pytest.raises(ValueError, match="at least 3 pairs"):
        TokenBudgetSampler(np.array([[3, 2], [3, 2]]), 100, 0, num_processes=3)


def test_splitting_halves_the_largest():
    assert split_to_count([[1, 2, 3, 4], [5]], 3) == [[1, 2], [3, 4], [5]]
    # The first of equals is split, and its halves take its place.
    assert split_to_count([[1, 2], [3, 4, 5], [6, 7, 8]], 5) == [[1, 2], [3], [4, 5], [6], [7, 8]]
    assert split_to_count([[1, 2], [3, 4, 5], [6, 7, 8]], 6) == [[1], [2], [3], [4, 5], [6], [7, 8]]


@pytest.mark.parametrize(("pairs", "processes"), [(5, 2), (7, 3), (6, 3)])
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
    fillers = -pairs % processes
    assert shards[0].padding_share() == pytest.approx(fillers / (pairs + fillers), abs=0.01)


def test_a_filler_is_the_same_pair_without_labels():
    pairs = [{"input_ids": [4, 2], "labels": [5, 6, 2]}, {"input_ids": [7, 2], "labels": [8, 2]}]
    filled = WithFillers(pairs)
    assert [filled[0], filled[1]] == pairs and len(filled) == 2
    assert filled[3] == {"input_ids": [7, 2], "labels": [-100, -100]}
    filled.set_epoch(1)
    epochs = []
    WithFillers(SimpleNamespace(set_epoch=epochs.append)).set_epoch(3)
    assert epochs == [3]


def test_lengths_are_rounded_up_as_the_collator_pads():
    sampler = TokenBudgetSampler(np.full((2000, 2), 9), 4096, 0, length_multiple=8)
    assert max(len(batch) * 32 for batch in sampler) <= 4096
    assert sampler.padding_share() == pytest.approx(1 - 18 / 32)
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


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=60),
    processes=st.integers(1, 4),
    more=st.integers(0, 300),
    seed=st.integers(0, 2**31),
)
def test_no_pair_of_any_corpus_is_lost(lengths, processes, more, seed):
    lengths = np.array(lengths + [(1, 1)] * (processes - 1))
    budget = int(lengths.sum(axis=1).max()) + more
    sampler = TokenBudgetSampler(lengths, budget, seed, processes)
    for epoch in range(2):
        batches = sampler.epoch_batches(epoch)
        assert len(batches) == len(sampler) * processes
        indices = sorted(index for batch in batches for index in batch)
        # Indices behind the last pair are fillers, which have no labels.
        assert [index for index in indices if index < len(lengths)] == list(range(len(lengths)))
        pairs = [[index for index in batch if index < len(lengths)] for batch in batches]
        assert all(padded_cost(*lengths[batch].T) <= budget for batch in pairs if batch)
