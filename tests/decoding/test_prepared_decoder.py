"""Tests of `metaphrase.decoding.decoder_state`: prepared layers and heads follow the current weights of the model."""

import copy
import gc

import pytest
import torch
from tiny_models import random_batch, random_sources, tiny_model
from torch import nn
from torch.nn.utils import parametrize

from metaphrase.decoding import prepacked_weights
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.fast_generation import prepared_projections


class Doubled(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


def first_step(model):
    batch = random_batch(model.config, padding=None)
    with torch.no_grad():
        encoder_output = model.get_encoder()(batch["input_ids"]).last_hidden_state
        return DecoderState(model.get_decoder(), encoder_output, None).step(batch["decoder_input_ids"][:, 0])


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**random_batch(model.config, with_labels=True)).loss.backward()
    optimizer.step()


def in_layers(change):
    """Return a change of the whole model from a change of one decoder layer."""
    return lambda model: [change(layer) for layer in model.get_decoder().layers]


def replace(module, name="weight", factor=2):
    setattr(module, name, nn.Parameter(getattr(module, name) * factor))


def replace_by_transposed(module):
    module.weight = nn.Parameter((2 * module.weight).t().contiguous().t())


class Doubling(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "written": lambda model: [weight.mul_(2) for weight in model.parameters()],
    "written past the version": lambda model: [weight.data.mul_(2) for weight in model.parameters()],
    "silent heads": in_layers(lambda layer: layer.self_attn.o_proj.weight.data[:, 1:8].zero_()),
    "other data": lambda model: [setattr(weight, "data", weight.data * 2) for weight in model.parameters()],
    "other projections": in_layers(
        lambda layer: [
            replace(module) for module in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.up_proj)
        ]
    ),
    "training": torch.enable_grad()(train),
    "parametrization": in_layers(
        lambda layer: parametrize.register_parametrization(layer.mlp.up_proj, "weight", Doubling())
    ),
    "fewer layers": lambda model: model.get_decoder().layers.pop(-1),
    "own class": in_layers(lambda layer: setattr(layer.self_attn.v_proj, "__class__", Doubled)),
    "transposed weight": in_layers(lambda layer: replace_by_transposed(layer.mlp.up_proj)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_are_seen(change, dtype):
    model = tiny_model(gated_mlp=True).to(dtype)
    before = first_step(model)
    with torch.no_grad():
        change(model)
    after = first_step(model)
    assert torch.equal(after, first_step(copy.deepcopy(model)))
    assert not torch.allclose(after, before, atol=1e-3 if dtype == torch.float32 else 0.02)


def test_copies_serve_again_as_long_as_nothing_changes():
    model = tiny_model(gated_mlp=True, num_key_value_heads=2)
    first_step(model)
    [before] = prepacked_weights._copies[model.get_decoder()].values()
    model.float().eval().requires_grad_(False)
    first_step(model)
    assert list(prepacked_weights._copies[model.get_decoder()].values()) == [before]


def test_copies_are_freed_with_training_and_with_the_model_and_not_saved():
    model = tiny_model()
    names, decoder, owners = set(model.state_dict()), model.get_decoder(), prepacked_weights._copies
    first_step(model)
    assert decoder in owners and set(model.state_dict()) == names
    assert copy.deepcopy(model).get_decoder() not in owners
    model.train()
    assert decoder not in owners
    first_step(model.eval())
    count = len(owners)
    del model, decoder
    gc.collect()
    assert len(owners) < count


def test_weights_without_versions_are_not_copied():
    """Changes of weights that were made in inference mode cannot be seen."""
    with torch.inference_mode():
        model = tiny_model()
    before = first_step(model)
    with torch.inference_mode():
        model.get_decoder().layers[0].self_attn.v_proj.weight[3, 1] += 100
    assert not torch.allclose(first_step(model), before, atol=1e-3)


def head_of(model):
    return prepared_projections(model)[0].keywords["head"]


def test_changed_head_is_copied_again():
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
    assert model.get_decoder() not in prepacked_weights._copies


def test_hooked_head_is_called():
    model = tiny_model()
    inputs = random_sources(model.config)
    options = {"max_new_tokens": 5, "num_beams": 3, "eos_token_id": None}
    before = model.generate(**inputs, **options)
    bias = 1e4 * nn.functional.one_hot(torch.tensor(9), model.config.decoder_vocab_size)
    handle = model.lm_head.register_forward_hook(lambda module, arguments, logits: logits + bias)
    assert (model.generate(**inputs, **options)[:, 1:] == 9).all()
    handle.remove()
    assert torch.equal(model.generate(**inputs, **options), before)
