"""Tests of `metaphrase.modeling.loss`: the shift by hand, the loss against torch's and transformers' own."""

import pytest
import torch
from tiny_models import tiny_model
from transformers.trainer_pt_utils import LabelSmoother

from metaphrase.modeling import IGNORED_LABEL, sequence_loss, shift_right


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([[5, 6, 7]], [[9, 5, 6]]),
        ([[5, 6, -100]], [[9, 5, 6]]),
        ([[5, -100, -100]], [[9, 5, 8]]),
        ([[-100, 5, 6]], [[9, 8, 5]]),
        ([[-100, -100, -100]], [[9, 8, 8]]),
        ([[5]], [[9]]),
        ([[5, 6], [7, -100]], [[9, 5], [9, 7]]),
    ],
)
def test_shift_right_by_hand(labels, expected):
    labels = torch.tensor(labels)
    original = labels.clone()
    shifted = shift_right(labels, pad_token_id=8, decoder_start_token_id=9)
    assert shifted.tolist() == expected
    assert shifted.dtype == labels.dtype
    assert torch.equal(labels, original)


@pytest.mark.parametrize(("pad", "start", "field"), [(None, 9, "pad_token_id"), (8, None, "decoder_start_token_id")])
def test_shift_right_names_the_missing_id(pad, start, field):
    with pytest.raises(ValueError, match=f"`{field}` must be set in the configuration.*got None"):
        shift_right(torch.tensor([[5, 6]]), pad, start)


def test_decoder_starts_from_the_labels_where_it_should():
    model = tiny_model(pad_token_id=5, decoder_start_token_id=None, decoder_start_from_labels=True)
    labels = torch.tensor([[10, 11, 12, 13], [14, -100, 15, -100], [16, 17, 5, 5], [-100, -100, -100, -100]])
    shifted = torch.tensor([[13, 10, 11, 12], [15, 14, 5, 15], [17, 16, 17, 5], [5, 5, 5, 5]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    packed = torch.tensor([[10, 11, 12, 13, 14, 15]])
    lengths = torch.tensor([3, 1, 2])
    shifted = torch.tensor([[12, 10, 11, 13, 15, 14]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(packed, lengths), shifted)
    padded = model.prepare_decoder_input_ids_from_labels(labels)
    joined = model.prepare_decoder_input_ids_from_labels(labels.reshape(1, -1), torch.tensor([4, 4, 4, 4]))
    assert torch.equal(joined, padded.reshape(1, -1))


def batch(rows=4, target=6, vocab=11):
    """Logits and labels with rows of unequal length."""
    logits = torch.randn(rows, target, vocab) * 3
    labels = torch.randint(0, vocab, (rows, target))
    for row in range(rows):
        labels[row, target - row :] = IGNORED_LABEL
    return logits, labels


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("num_items_in_batch", [None, 40, torch.tensor(40), torch.tensor(40.0)])
def test_loss_equals_the_label_smoother_of_transformers(label_smoothing, num_items_in_batch):
    logits, labels = batch()
    smoother = LabelSmoother(epsilon=label_smoothing)
    expected = smoother({"logits": logits}, labels.clone(), num_items_in_batch=num_items_in_batch)
    loss = sequence_loss(logits, labels, num_items_in_batch, label_smoothing)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_items_in_batch", [None, 7, 0, torch.tensor(0)])
def test_loss_without_labels_is_zero_with_a_zero_gradient(label_smoothing, num_items_in_batch):
    logits, labels = batch()
    logits.requires_grad_()
    loss = sequence_loss(logits, torch.full_like(labels, IGNORED_LABEL), num_items_in_batch, label_smoothing)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_is_computed_in_float32(dtype):
    logits, labels = batch(rows=4, target=400, vocab=50)
    loss = sequence_loss(logits.to(dtype), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, sequence_loss(logits.to(dtype).float(), labels))
    # Summed in float16, this many labels would overflow.
    assert sequence_loss(torch.full((2, 9000, 3), 60.0).to(dtype), torch.zeros(2, 9000).long(), 1) > 18_000


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_eight_accumulated_batches_of_one_equal_one_batch_of_eight(smoothing):
    """Through the whole network, with rows of unequal length on both sides."""
    model = tiny_model(initializer_range=0.2)
    source = torch.randint(3, 37, (8, 9))
    labels = torch.randint(3, 37, (8, 8))
    lengths = torch.tensor([8, 1, 5, 2, 7, 3, 3, 6])
    padding = torch.arange(8)[None, :] >= lengths[:, None]
    labels[padding] = IGNORED_LABEL
    attention_mask = (torch.arange(9)[None, :] <= lengths[:, None]).long()
    count = int(lengths.sum())

    def run(rows, columns, num_items_in_batch):
        outputs = model(
            input_ids=source[rows, : columns + 1],
            attention_mask=attention_mask[rows, : columns + 1],
            labels=labels[rows, :columns],
            num_items_in_batch=num_items_in_batch,
            smoothing=smoothing,
        )
        outputs.loss.backward()
        return outputs.loss.item()

    whole = run(slice(0, 8), 8, None)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert run(slice(0, 8), 8, count) == pytest.approx(whole, abs=1e-6)
    model.zero_grad()
    # Each row alone is as wide as it is long.
    accumulated = sum(run(slice(row, row + 1), int(lengths[row]), count) for row in range(8))
    assert accumulated == pytest.approx(whole, abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4, msg=name)
