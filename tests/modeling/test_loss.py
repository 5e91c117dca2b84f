"""Tests of `metaphrase.modeling.loss`: the shift by hand, the loss against torch's and transformers', and the loss in chunks."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_models import random_batch, tiny_model
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from metaphrase.modeling import IGNORED_LABEL, sequence_loss, shift_right
from metaphrase.ops import projected_loss as module
from metaphrase.ops.projected_loss import projected_loss
from metaphrase.training.training_loss import TrainingLoss, divergence_of_halves

ROWS, HIDDEN, VOCAB = 700, 16, 53


class LargestTensor(TorchDispatchMode):
    """A context that records the largest number of elements of a new tensor."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.elements = max(self.elements, result.numel())
        return result


def test_shift_right_by_hand():
    labels = torch.tensor([[5, -100, -100], [-100, 5, 6], [5, 6, 7]])
    original = labels.clone()
    shifted = shift_right(labels, pad_token_id=8, decoder_start_token_id=9)
    assert shifted.tolist() == [[9, 5, 8], [9, 8, 5], [9, 5, 6]]
    assert shifted.dtype == labels.dtype and torch.equal(labels, original)


@pytest.mark.parametrize(("pad", "start", "field"), [(None, 9, "pad_token_id"), (8, None, "decoder_start_token_id")])
def test_shift_right_names_the_missing_id(pad, start, field):
    with pytest.raises(ValueError, match=f"`{field}`"):
        shift_right(torch.tensor([[5, 6]]), pad, start)


def test_decoder_starts_from_the_labels_where_it_should():
    model = tiny_model(pad_token_id=5, decoder_start_token_id=None, decoder_start_from_labels=True)
    labels = torch.tensor([[10, 11, 12, 13], [14, -100, 15, -100], [16, 17, 5, 5], [-100, -100, -100, -100]])
    shifted = torch.tensor([[13, 10, 11, 12], [15, 14, 5, 15], [17, 16, 17, 5], [5, 5, 5, 5]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    packed, lengths = torch.tensor([[10, 11, 12, 13, 14, 15]]), torch.tensor([3, 1, 2])
    assert model.prepare_decoder_input_ids_from_labels(packed, lengths).tolist() == [[12, 10, 11, 13, 15, 14]]
    joined = model.prepare_decoder_input_ids_from_labels(labels.reshape(1, -1), torch.tensor([4, 4, 4, 4]))
    assert torch.equal(joined, shifted.reshape(1, -1))


def batch(rows=4, target=6, vocab=11):
    """Logits and labels with rows of unequal length."""
    logits = torch.randn(rows, target, vocab) * 3
    labels = torch.randint(0, vocab, (rows, target))
    for row in range(rows):
        labels[row, target - row :] = IGNORED_LABEL
    return logits, labels


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("num_items_in_batch", [None, 40, torch.tensor(40.0)])
def test_loss_equals_the_label_smoother_of_transformers(label_smoothing, num_items_in_batch):
    logits, labels = batch()
    smoother = LabelSmoother(epsilon=label_smoothing)
    expected = smoother({"logits": logits}, labels.clone(), num_items_in_batch=num_items_in_batch)
    loss = sequence_loss(logits, labels, num_items_in_batch, label_smoothing)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_items_in_batch", [None, 7, 0, torch.tensor(0)])
def test_loss_without_labels_is_zero_with_a_zero_gradient(num_items_in_batch):
    logits, labels = batch()
    logits.requires_grad_()
    loss = sequence_loss(logits, torch.full_like(labels, IGNORED_LABEL), num_items_in_batch, 0.1)
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


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks and strips, the last of them smaller, at sizes that a test can afford."""
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", 1)
    monkeypatch.setattr(module, "_MIN_CHUNK_ROWS", 128)
    monkeypatch.setattr(module, "_STRIP_ROWS", 20)


def problem(has_bias=True, dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCAB, generator=generator, dtype=dtype, requires_grad=True) if has_bias else None
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < ignored] = IGNORED_LABEL
    return hidden, weight, bias, labels


def plain_loss(hidden, weight, bias, labels, smoothing):
    logits = nn.functional.linear(hidden, weight, bias)
    return nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_loss_and_gradients_are_those_of_the_plain_loss(has_bias, smoothing, ignored):
    inputs = problem(has_bias, ignored=ignored)
    leaves = [tensor for tensor in inputs[:3] if tensor is not None]
    expected = plain_loss(*inputs, smoothing)
    expected_gradients = torch.autograd.grad(0.37 * expected, leaves)
    actual = projected_loss(*inputs, smoothing)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(torch.autograd.grad(0.37 * actual, leaves), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_tokens_without_a_label_count_nothing_where_they_stay(smoothing, alpha, is_weighted):
    """An accelerator masks them, since removing them would wait for it."""
    *leaves, labels = problem()
    # The two rows of a pair are neighbours.
    labels = labels[: ROWS // 2].repeat_interleave(2)
    is_label = labels != IGNORED_LABEL
    dtype, losses = leaves[0].dtype, []
    factors = torch.rand(ROWS // 2, generator=torch.Generator().manual_seed(4)).repeat_interleave(2)
    masked = is_label * factors if is_weighted else is_label
    for mask in (factors[is_label] if is_weighted else None, masked):
        states, targets = (
            (leaves[0], labels.clamp(min=0)) if mask is masked else (leaves[0][is_label], labels[is_label])
        )
        losses.append(module._ProjectedLoss.apply(states, *leaves[1:], targets, mask, 7, smoothing, alpha, dtype))
    torch.testing.assert_close(losses[1], losses[0])
    expected, actual = (torch.autograd.grad(loss, leaves) for loss in losses)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divisor", [13, torch.tensor(13)])
def test_a_loss_that_is_divided_can_be_differentiated_again_and_again(divisor):
    *leaves, labels = problem()
    expected = plain_loss(*leaves, labels, 0.1) / 13
    expected_gradients = torch.autograd.grad(expected, leaves)
    actual = projected_loss(*leaves, labels, 0.1, divisor=divisor)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    for factor in (1.0, 3.0, 1.0):
        actual.backward(torch.tensor(factor), retain_graph=True)
    for leaf, wanted in zip(leaves, expected_gradients, strict=True):
        torch.testing.assert_close(leaf.grad, 5 * wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_that_is_divided_and_scaled_has_gradients_of_full_precision(dtype):
    """Check a scaled loss: gradients that are divided before they are scaled are too small for float16."""
    hidden, weight, _, labels = problem(has_bias=False, dtype=torch.float32)
    expected = torch.autograd.grad(plain_loss(hidden, weight, None, labels, 0.1) * (2**16 / 1e6), [hidden, weight])
    with torch.autocast("cpu", dtype):
        loss = projected_loss(hidden, weight, None, labels, 0.1, divisor=1e6)
    for gradient, near in zip(torch.autograd.grad(loss * 2**16, [hidden, weight]), expected, strict=True):
        assert (gradient - near).norm() < 0.02 * near.norm()


def confident_problem(certainty):
    """Hidden states that point to their labels, twice and not quite alike: more certainly for a larger number."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 64, generator=generator) / 8
    labels = torch.randint(0, 300, (ROWS // 2,), generator=generator)
    hidden = certainty * nn.functional.normalize(weight[labels]) / weight[labels].norm(dim=1, keepdim=True)
    hidden = torch.cat([hidden + 0.3 * torch.randn(hidden.shape, generator=generator) for _ in range(2)])
    return hidden.requires_grad_(), weight.requires_grad_(), labels.repeat(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("alpha", "smoothing"), [(0.0, 0.0), (0.0, 0.1), (3.0, 0.1)])
@pytest.mark.parametrize("certainty", [4, 11, 18])
def test_what_is_nearly_certain_is_learned_as_precisely_as_with_logits(certainty, smoothing, alpha, dtype):
    hidden, weight, labels = confident_problem(certainty)

    def plain():
        logits = nn.functional.linear(hidden, weight)
        loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing)
        return loss + alpha * divergence_of_halves(logits, labels) if alpha else loss

    def found(loss):
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    exact = found(plain())
    with torch.autocast("cpu", dtype):
        made = found(plain())
        ours = found(projected_loss(hidden, weight, None, labels, smoothing, alpha))
    # Probabilities are rounded once. In float16 those below 0.00006 have fewer digits, or are 0.
    slack = 2e-2 if dtype == torch.float16 else torch.finfo(dtype).eps / 2
    for name, value, reference, wanted in zip(("loss", "hidden", "weight"), ours, made, exact, strict=True):
        error, allowed = ((result - wanted).norm() / wanted.norm() for result in (value, reference))
        assert error <= 1.1 * allowed + slack, name


@pytest.mark.parametrize("is_autocast", [False, True])
def test_no_gradient_begins_with_what_was_in_memory(is_autocast, monkeypatch):
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = projected_loss(hidden, weight, bias, labels, 0.1)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [hidden, weight, bias]))


@pytest.mark.parametrize("fields", [{}, {"logits_bias": True}, {"logits_scale": 0.5}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("num_items", [None, 13])
def test_a_model_in_training_has_the_loss_and_the_gradients_it_has_with_logits(fields, num_items, monkeypatch):
    model = tiny_model(**fields).train()
    calls, project = [], type(model).project
    monkeypatch.setattr(type(model), "project", lambda *inputs: calls.append(1) or project(*inputs))
    inputs = random_batch(model.config, with_labels=True) | {"num_items_in_batch": num_items}

    def run(loss_of_states):
        model.zero_grad()
        output = model(**inputs, loss_of_states=loss_of_states)
        output.loss.backward()
        return output, [parameter.grad.clone() for parameter in model.parameters()]

    expected, expected_gradients = run(None)
    actual, gradients = run(TrainingLoss())
    assert expected.logits is not None and actual.logits is None and calls == [1]
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


class Watch(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return [5 * argument for argument in args], kwargs


def clamped(model):
    with torch.no_grad():
        model.half().lm_head.weight.mul_(5e4)


# The weight of a pruned head is the product of the step before.
CALLED = {
    "pruned": lambda model: prune.l1_unstructured(model.lm_head, "weight", 0.3),
    "hooked": lambda model: model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.tanh()),
    "brought from elsewhere by accelerate": lambda model: add_hook_to_module(model.lm_head, Watch()),
    "clamped in float16": clamped,
    "capped": lambda model: setattr(model.config, "final_logit_softcapping", 2.0),
}


@pytest.mark.parametrize("change", CALLED.values(), ids=CALLED)
def test_a_head_that_does_more_than_a_product_is_called(change):
    model = tiny_model(tie_word_embeddings=False).train()
    batch = random_batch(model.config, with_labels=True)
    plain = model(**batch).loss
    change(model)
    for _ in range(2):
        loss, expected = model(**batch, loss_of_states=TrainingLoss()).loss, model(**batch).loss
        torch.testing.assert_close(loss, expected)
        assert not torch.allclose(loss, plain)
        if model.dtype == torch.float32:
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_no_more_than_a_chunk_of_logits_is_there_at_a_time(alpha):
    hidden, weight, _, labels = problem(has_bias=False, ignored=0.0)
    labels = labels[: ROWS // 2].repeat(2)
    with LargestTensor() as largest:
        projected_loss(hidden, weight, None, labels, 0.1, alpha).backward()
    assert module.chunk_rows(VOCAB) * VOCAB <= largest.elements <= ROWS * HIDDEN < ROWS * VOCAB
