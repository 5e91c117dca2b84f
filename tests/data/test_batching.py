"""Batching: which pairs share a batch, what pads them, and to which width."""

import itertools

import pytest
import torch

from metaphrase.data.collators import LengthGroupedSampler, PairCollator

PAIRS = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [2], "labels": [8, 9, 4, 2]}]


def test_sides_are_padded_apart_on_the_right():
    batch = PairCollator(pad_token_id=3)(PAIRS)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 2], [2, 3, 3]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[7, 2, -100, -100], [8, 9, 4, 2]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_padding_id_inside_a_text_is_still_seen():
    batch = PairCollator(pad_token_id=5)(PAIRS)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(("multiple", "widths"), [(1, (3, 4)), (4, (4, 4)), (3, (3, 6)), (8, (8, 8))])
def test_widths_are_rounded_up(multiple, widths):
    batch = PairCollator(0, pad_to_multiple_of=multiple)(PAIRS)
    assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == widths
    assert batch["attention_mask"].shape == batch["input_ids"].shape
    assert batch["attention_mask"].sum() == 4 and (batch["labels"] != -100).sum() == 6


def test_sources_alone_have_no_labels():
    batch = PairCollator(0)([{"input_ids": pair["input_ids"]} for pair in PAIRS])
    assert batch.keys() == {"input_ids", "attention_mask"}


def test_multiple_must_be_positive():
    with pytest.raises(ValueError, match="`pad_to_multiple_of` must be at least 1, got 0"):
        PairCollator(0, pad_to_multiple_of=0)


def lengths_of(count):
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def test_every_pair_once_in_an_order_of_seed_and_epoch():
    sampler = LengthGroupedSampler(lengths_of(103), batch_size=8, seed=1, batches_per_window=4)
    first = list(sampler)
    assert sorted(first) == list(range(103)) and len(sampler) == 103
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first and sorted(second) == list(range(103))
    assert list(LengthGroupedSampler(lengths_of(103), 8, seed=2, batches_per_window=4)) != first


def test_batches_hold_like_lengths_and_come_in_no_order_of_length():
    lengths = lengths_of(800)
    order = list(LengthGroupedSampler(lengths, batch_size=8, seed=1, batches_per_window=100))
    batches = [[lengths[index] for index in order[place : place + 8]] for place in range(0, 800, 8)]
    assert max(max(batch) - min(batch) for batch in batches) <= 2
    longest = [max(batch) for batch in batches]
    falls = sum(later < earlier for earlier, later in itertools.pairwise(longest))
    assert 30 < falls < 70
