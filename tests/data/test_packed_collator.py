"""Packed rows that are filled up to few lengths, and the order of the pairs in them."""

import pytest
import torch
from tiny_models import tiny_model

from metaphrase.data.collators import PackedCollator, filler_lengths


@pytest.mark.parametrize("multiple", [2, 8, 32])
@pytest.mark.parametrize("tokens", [(32, 64), (31, 64), (32, 33), (1, 1), (45, 19)])
@pytest.mark.parametrize("longest", [(1, 19), (7, 5), (31, 1), (45, 64)])
def test_fillers_complete_both_rows(tokens, longest, multiple):
    fillers = filler_lengths(tokens, longest, multiple)
    assert len(fillers[0]) == len(fillers[1])
    assert bool(fillers[0]) == any(count % multiple for count in tokens)
    for count, limit, side in zip(tokens, longest, fillers, strict=True):
        assert (count + sum(side)) % multiple == 0
        assert all(1 <= filler <= limit for filler in side)


def test_no_more_is_filled_up_than_must_be():
    assert filler_lengths((30, 29), (20, 20), 32) == [[2], [3]]
    assert filler_lengths((33, 64), (20, 40), 32) == [[16, 15], [16, 16]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fillers_change_neither_loss_nor_gradients(dtype):
    pairs = [{"input_ids": [*range(5, 5 + size), 2], "labels": [*range(9, 20 - size), 2]} for size in (3, 9, 1, 7)]
    results = []
    for multiple in (1, 32):
        batch = PackedCollator(1, multiple)(pairs)
        torch.manual_seed(0)
        model = tiny_model(max_position_embeddings=12, position_embedding_type="learned").train()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(**batch, smoothing=0.1).loss
        loss.backward()
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert batch["input_ids"].shape == (1, 32) and batch["labels"].shape == (1, 32)
    assert batch["longest_source"] == 10 and max(batch["source_lengths"]) == 10
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 2e-3}
    torch.testing.assert_close(*results, **tolerance)


def test_the_longest_sources_of_a_packed_batch_come_first():
    pairs = [{"input_ids": [4] * size, "labels": [size] * 2} for size in (2, 5, 3)]
    batch = PackedCollator()(pairs)
    assert batch["source_lengths"].tolist() == [5, 3, 2] and batch["labels"].tolist() == [[5, 5, 3, 3, 2, 2]]
