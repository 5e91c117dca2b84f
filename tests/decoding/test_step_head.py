"""Tests of `metaphrase.decoding.prepared_decoder`: the projection that was made ready is that of the weights as they are."""

import pytest
import torch
from tiny_models import random_batch, tiny_model
from torch import nn

from metaphrase.decoding import prepared_decoder as step_head_module
from metaphrase.decoding.prepared_decoder import prepared_head


def head_of(model):
    return prepared_head(model.get_decoder(), model.lm_head)


def test_the_head_is_copied_and_its_changes_are_seen():
    model, states = tiny_model(tie_word_embeddings=False), torch.randn(3, 32)
    first = head_of(model)
    assert first is not model.lm_head and head_of(model) is first and first._is_transposed
    torch.testing.assert_close(first(states), model.lm_head(states))
    for change in (
        lambda: model.lm_head.weight.data.mul_(2),
        lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight + 1)),
        lambda: setattr(model, "lm_head", nn.Linear(32, 50, bias=False)),
    ):
        before = head_of(model)
        with torch.no_grad():
            change()
        assert head_of(model) is not before
        torch.testing.assert_close(head_of(model)(states), model.lm_head(states))
    model.train()
    assert model.get_decoder() not in step_head_module._heads


@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_hooked_to_the_head_is_called(beams):
    model = tiny_model()
    inputs = {name: tensor for name, tensor in random_batch(model.config).items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    before = model.generate(**inputs, **options)
    calls = []

    def favour(module, given, logits):
        calls.append(len(logits))
        return logits + 1e4 * nn.functional.one_hot(torch.tensor(9), logits.shape[-1])

    handle = model.lm_head.register_forward_hook(favour)
    assert (model.generate(**inputs, **options)[:, 1:] == 9).all() and calls
    handle.remove()
    assert torch.equal(model.generate(**inputs, **options), before)


def test_a_head_that_could_not_be_copied_before_is():
    # As after a move from a GPU: the parameter is the same, and its memory is another.
    model, states = tiny_model(tie_word_embeddings=False), torch.randn(3, 32)
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not head_of(model)._is_one
    weight.data = weight.data.contiguous()
    assert head_of(model)._is_one
    torch.testing.assert_close(head_of(model)(states), model.lm_head(states))


def test_a_head_of_some_size_has_no_copy_for_one_row(monkeypatch):
    model, states = tiny_model(tie_word_embeddings=False), torch.randn(1, 32)
    monkeypatch.setattr(step_head_module, "LARGEST_SIZE", model.lm_head.weight.numel() - 1)
    assert head_of(model)._is_one and not head_of(model)._is_transposed
    torch.testing.assert_close(head_of(model)(states), model.lm_head(states))


def test_a_large_head_is_called_itself(monkeypatch):
    monkeypatch.setattr(step_head_module, "_LARGEST_COPY", 32)
    model = tiny_model()
    assert not head_of(model)._is_one
    torch.testing.assert_close(head_of(model)(torch.ones(2, 32)), model.lm_head(torch.ones(2, 32)))
