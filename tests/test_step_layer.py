"""Tests of `metaphrase.modeling.step_layer`: joined products are those of the layers, and never those of older weights."""

import copy
import gc

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from torch import nn

from metaphrase.modeling import step_layer
from metaphrase.modeling.decoder_state import DecoderState
from metaphrase.modeling.joined_linear import JoinedLinear
from metaphrase.modeling.step_layer import step_layers

GATED = {"gated_mlp": True, "num_key_value_heads": 2}


def linears(*sizes, bias=True):
    return [nn.Linear(6, size, bias=bias) for size in sizes]


def first_step(model):
    batch = random_batch(model.config, padding=None)
    with torch.no_grad():
        memory = model.get_encoder()(batch["input_ids"]).last_hidden_state
        return DecoderState(model.get_decoder(), memory, None).step(batch["decoder_input_ids"][:, 0])


def without_memory_of_it(model):
    """A step of a model that was made of the same weights just now."""
    return first_step(copy.deepcopy(model))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("joins", [True, False])
def test_joined_layers_are_the_layers_side_by_side(joins, bias):
    layers, states = linears(4, 2, 2, bias=bias), torch.randn(3, 5, 6)
    joined = JoinedLinear(layers, joins)
    assert torch.allclose(joined(states), torch.cat([layer(states) for layer in layers], dim=-1), atol=1e-6)


def test_layer_of_another_kind_is_called_itself():
    class Doubled(nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    layers, states = [*linears(4, 2), Doubled(6, 3)], torch.randn(5, 6)
    assert torch.equal(JoinedLinear(layers)(states), torch.cat([layer(states) for layer in layers], dim=-1))


def double_in_place(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)


def double_one_number(model):
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.v_proj.weight[3, 1] += 100


def write_past_the_version(model):
    for weight in model.parameters():
        weight.data.mul_(2)


def load(model):
    model.load_state_dict({name: weight * 2 for name, weight in model.state_dict().items()})


def put_others_in_place(model):
    for weight in model.parameters():
        weight.data = weight.data * 2


def put_a_layer_in_place(model):
    attention = model.get_decoder().layers[-1].self_attn
    attention.v_proj = copy.deepcopy(attention.q_proj)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = random_batch(model.config, with_labels=True)
    model(**batch).loss.backward()
    optimizer.step()


def drop_a_layer(model):
    del model.get_decoder().layers[-1]


CHANGES = [
    *(double_in_place, double_one_number, write_past_the_version, load),
    *(put_others_in_place, put_a_layer_in_place, train, drop_a_layer),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_seen(change):
    model = tiny_model(gated_mlp=True)
    before = first_step(model)
    change(model)
    after = first_step(model)
    assert torch.equal(after, without_memory_of_it(model))
    assert not torch.allclose(after, before, atol=1e-3)


def test_copies_serve_again_as_long_as_nothing_changes():
    model = tiny_model(**GATED)
    first_step(model)
    before = step_layers(model.get_decoder())
    first_step(model)
    assert step_layers(model.get_decoder()) is before
    model.float().eval().requires_grad_(False)
    assert step_layers(model.get_decoder()) is before


def test_copies_are_dropped_when_training_starts_and_with_the_model():
    model = tiny_model()
    decoder = model.get_decoder()
    first_step(model)
    assert decoder in step_layer._ready
    model.train()
    assert decoder not in step_layer._ready
    first_step(model.eval())
    count = len(step_layer._ready)
    del model, decoder
    gc.collect()
    assert len(step_layer._ready) < count


def test_copies_do_not_travel(tmp_path):
    model = tiny_model()
    names = set(model.state_dict())
    first_step(model)
    assert set(model.state_dict()) == names
    assert copy.deepcopy(model).get_decoder() not in step_layer._ready


def test_large_layers_are_not_copied(monkeypatch):
    monkeypatch.setattr("metaphrase.modeling.joined_linear._LARGEST_SIZE", 4 * 6)
    layers = linears(4, 5)
    assert JoinedLinear(layers)._weight is None
    assert JoinedLinear(linears(4, 3))._weight.shape == (7, 6)
    assert JoinedLinear(layers)(torch.ones(1, 6)).shape == (1, 9)


def test_weights_without_versions_are_not_copied():
    """Those of a model that was made under inference mode cannot be told from changed ones."""
    with torch.inference_mode():
        model = tiny_model()
    before = first_step(model)
    with torch.inference_mode():
        model.get_decoder().layers[0].self_attn.v_proj.weight[3, 1] += 100
    assert not torch.allclose(first_step(model), before, atol=1e-3)


@pytest.mark.parametrize("design", DESIGNS)
def test_parts_under_autocast_are_the_layers_own(design):
    model = tiny_model(**DESIGNS[design])
    with torch.autocast("cpu", torch.bfloat16):
        layers = step_layers(model.get_decoder())
    assert all(layer.token_projection._weight is None for layer in layers)
    assert step_layers(model.get_decoder())[0].token_projection._weight is not None
