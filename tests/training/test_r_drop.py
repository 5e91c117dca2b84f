"""R-Drop: the divergence against torch's own, the loss against two passes by hand, and its division under accumulation."""

import pytest
import torch
from small_trainers import make_sgd_trainer, model_of_two_passes, pairs_of_eight_lengths
from tiny_models import random_batch, tiny_model
from torch import nn

from metaphrase import plugins
from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.modeling import IGNORED_LABEL, sequence_loss
from metaphrase.ops import projected_loss as projected
from metaphrase.training.training_loss import TrainingLoss, divergence_of_halves, repeat_batch


def two_predictions():
    first, second = (torch.randn(23, 11).mul(3).requires_grad_() for _ in range(2))
    labels = torch.randint(0, 11, (23,))
    labels[[4, 5, 20]] = IGNORED_LABEL
    return first, second, labels


def reference_divergence(first, second, labels):
    first, second = (logits[labels != IGNORED_LABEL].double().log_softmax(dim=-1) for logits in (first, second))
    there = nn.functional.kl_div(first, second, reduction="sum", log_target=True)
    back = nn.functional.kl_div(second, first, reduction="sum", log_target=True)
    return (there + back) / 2


def test_divergence_and_its_gradients_equal_torch():
    first, second, labels = two_predictions()
    expected = reference_divergence(first, second, labels)
    expected_gradients = torch.autograd.grad(expected, (first, second))
    divergence = divergence_of_halves(torch.cat((first, second)), labels.repeat(2))
    torch.testing.assert_close(divergence.double(), expected, rtol=1e-5, atol=0)
    for gradient, wanted in zip(torch.autograd.grad(divergence, (first, second)), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
        assert wanted.abs().max() > 0.1


def test_rows_without_a_label_have_no_say_whatever_stands_there():
    first, second, labels = two_predictions()
    expected = divergence_of_halves(torch.cat((first, second)), labels.repeat(2)).item()
    with torch.no_grad():
        first[4], second[5] = torch.inf, torch.nan
    divergence = divergence_of_halves(torch.cat((first, second)), labels.repeat(2))
    divergence.backward()
    assert divergence.item() == pytest.approx(expected, rel=1e-6)
    for logits in (first, second):
        assert torch.equal(logits.grad[[4, 5, 20]], torch.zeros(3, 11)) and logits.grad.isfinite().all()
    assert divergence_of_halves(torch.cat((first, second)), torch.full((46,), IGNORED_LABEL)).item() == 0


def twice(batch, alpha, num_items_in_batch=None, smoothing=0.0):
    items = None if num_items_in_batch is None else 2 * num_items_in_batch
    loss = TrainingLoss(smoothing, alpha)
    return {**repeat_batch(batch), "loss_of_states": loss, "num_items_in_batch": items}


@pytest.mark.parametrize(("smoothing", "num_items_in_batch"), [(0.0, None), (0.2, 40), (0.2, torch.tensor(40))])
def test_loss_equals_two_passes_by_hand(smoothing, num_items_in_batch):
    model = tiny_model(dropout=0.3, initializer_range=0.2).train()
    batch = random_batch(model.config, with_labels=True)
    labels = batch["labels"]
    torch.manual_seed(5)
    loss = model(**twice(batch, 5.0, num_items_in_batch, smoothing)).loss
    torch.manual_seed(5)
    first, second = model(**repeat_batch(batch)).logits.chunk(2)
    count = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else 40
    entropies = [sequence_loss(logits, labels, num_items_in_batch, smoothing) for logits in (first, second)]
    divergence = reference_divergence(first.flatten(0, 1), second.flatten(0, 1), labels.flatten()) / count
    assert divergence > 0.05
    # Half of the paper's equation 4.
    expected = (entropies[0] + entropies[1] + 5.0 * divergence.float()) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "smoothing", "rows"),
    [({}, 0.0, 1), ({"logits_bias": True}, 0.2, 4), ({"logits_scale": 0.5, "tie_word_embeddings": False}, 0.2, 1000)],
)
def test_without_logits_loss_and_gradients_are_the_same(fields, smoothing, rows, monkeypatch):
    monkeypatch.setattr(projected, "_CHUNK_ENTRIES", 1)
    monkeypatch.setattr(projected, "_MIN_CHUNK_ROWS", rows)
    model = tiny_model(dropout=0.3, initializer_range=0.2, **fields).train()
    batch = random_batch(model.config, with_labels=True)
    found = []
    for places in ({"projected_loss": "metaphrase.absent.ring:none"}, {}):
        model.zero_grad()
        torch.manual_seed(5)
        with monkeypatch.context() as patch:
            patch.setattr(plugins, "PLACES", plugins.PLACES | places)
            outputs = model(**twice(batch, 5.0, 40, smoothing))
        outputs.loss.backward()
        found.append((outputs.loss.detach(), {name: value.grad for name, value in model.named_parameters()}))
    assert outputs.logits is None
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_an_accelerator_counts_labels_by_a_mask(monkeypatch):
    hidden, weight = torch.randn(40, 16), torch.randn(53, 16)
    labels = torch.randint(0, 53, (20,)).masked_fill(torch.arange(20) % 3 == 0, IGNORED_LABEL).repeat(2)
    expected = projected.projected_loss(hidden, weight, None, labels, 0.1, 3.0)
    hidden, labels = (tensor[torch.arange(40).view(2, 20).T.flatten()] for tensor in (hidden, labels))
    arguments = (hidden, weight, None, labels.clamp(min=0), labels != IGNORED_LABEL, 2, 0.1, 3.0, torch.float32)
    torch.testing.assert_close(projected._ProjectedLoss.apply(*arguments), expected / 2, rtol=1e-5, atol=1e-5)


def test_packed_batch_equals_padded_batch():
    model, pairs = model_of_two_passes(), pairs_of_eight_lengths()
    packed, padded = (collator(0)(pairs) for collator in (PackedCollator, PairCollator))
    packed["labels"][0, 4] = IGNORED_LABEL
    padded["labels"][0, 4] = IGNORED_LABEL
    loss = model(**twice(packed, 3.0, 50)).loss
    expected = model(**twice(padded, 3.0, 50)).loss
    assert loss - model(**twice(packed, 0.0, 50)).loss > 0.04
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_trainer_computes_the_loss_of_two_passes(tmp_path):
    trainer = make_sgd_trainer(model_of_two_passes(), tmp_path, r_drop_alpha=3.0, label_smoothing_factor=0.2)
    batch = PairCollator(0)(pairs_of_eight_lengths())
    loss, expected = (trainer.model(**twice(batch, alpha, 50, smoothing=0.2)).loss for alpha in (0.0, 3.0))
    assert expected - loss > 0.05
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(50))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_is_left_alone(tmp_path):
    model, rows = tiny_model(dropout=0.3), []
    trainer = make_sgd_trainer(model, tmp_path, r_drop_alpha=3.0)
    expected = model(**PairCollator(0)(pairs_of_eight_lengths())).loss.item()
    model.get_encoder().register_forward_hook(lambda module, arguments, output: rows.append(len(output[0])))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert sum(rows) == 8
