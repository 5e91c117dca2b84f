import pytest
import torch
from tiny_models import tiny_model

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.training.training_loss import TrainingLoss, weights_of_labels

PAIRS = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [2], "labels": [8, 9, 4, 2]}]


def test_both_sides_are_padded_on_the_right():
    batch = PairCollator(pad_token_id=3)(PAIRS)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 2], [2, 3, 3]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[7, 2, -100, -100], [8, 9, 4, 2]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("multiple", "widths"), [(3, (3, 6)), (8, (8, 8))])
def test_widths_are_rounded_up(multiple, widths):
    batch = PairCollator(0, pad_to_multiple_of=multiple)(PAIRS)
    assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == widths
    assert batch["attention_mask"].shape == batch["input_ids"].shape
    assert batch["attention_mask"].sum() == 4 and (batch["labels"] != -100).sum() == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fillers_change_neither_loss_nor_gradients(dtype):
    pairs = [{"input_ids": [*range(5, 5 + size), 2], "labels": [*range(9, 20 - size), 2]} for size in (3, 9, 1, 7)]
    results = []
    for multiple in (1, 32):
        batch = PackedCollator(1, multiple)(pairs)
        torch.manual_seed(0)
        model = tiny_model(max_position_embeddings=12, position_embedding_type="learned").train()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(**batch, loss_of_states=TrainingLoss(0.1)).loss
        loss.backward()
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert batch["input_ids"].shape == (1, 32) and batch["labels"].shape == (1, 32)
    assert batch["longest_source"] == 10 and max(batch["source_lengths"]) == 10
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 2e-3}
    torch.testing.assert_close(*results, **tolerance)


def test_weights_stay_with_their_pairs_and_are_left_out_where_all_are_one():
    pairs = [{**pair, "weight": weight} for pair, weight in zip(PAIRS[::-1], (0.5, 3.0), strict=True)]
    padded, packed = PairCollator(0)(pairs), PackedCollator(0, 8)(pairs)
    assert weights_of_labels(padded).tolist() == [[0.5] * 4, [3.0] * 4]
    assert weights_of_labels(packed)[0, :6].tolist() == [3.0, 3.0, 0.5, 0.5, 0.5, 0.5]
    assert len(packed["weight"]) == len(packed["target_lengths"]) > 2
    for collate in (PairCollator(0), PackedCollator()):
        assert "weight" not in collate([PAIRS[0], {**PAIRS[1], "weight": 1.0}])


def test_the_longest_sources_of_a_packed_batch_come_first():
    pairs = [{"input_ids": [4] * size, "labels": [size] * 2} for size in (2, 5, 3)]
    batch = PackedCollator()(pairs)
    assert batch["source_lengths"].tolist() == [5, 3, 2] and batch["labels"].tolist() == [[5, 5, 3, 3, 2, 2]]
