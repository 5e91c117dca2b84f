"""Tests of `metaphrase.decoding.prepared_decoder`: prepared layers and heads follow the current weights of the model."""

import copy
import gc

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from torch import nn

from metaphrase.decoding import prepared_decoder
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.prepared_decoder import prepared_head, prepared_layers


def first_step(model):
    batch = random_batch(model.config, padding=None)
    with torch.no_grad():
        encoder_output = model.get_encoder()(batch["input_ids"]).last_hidden_state
        return DecoderState(model.get_decoder(), encoder_output, None).step(batch["decoder_input_ids"][:, 0])


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


def silence_heads(model):
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.weight.data[:, 1:8] = 0


def write_some_rows(model):
    for layer in model.get_decoder().layers:
        layer.mlp.down_proj.weight.data[16:] = 0.5


def load(model):
    model.load_state_dict({name: weight * 2 for name, weight in model.state_dict().items()})


def put_others_in_place(model):
    for weight in model.parameters():
        weight.data = weight.data * 2


def put_weights_in_place(model):
    for layer in model.get_decoder().layers:
        for module in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.up_proj):
            module.weight = nn.Parameter(module.weight * 2)


def put_norm_weights_in_place(model):
    for layer in model.get_decoder().layers:
        layer.mlp_norm.weight = nn.Parameter(layer.mlp_norm.weight * 2)


def put_biases_in_place(model):
    for layer in model.get_decoder().layers:
        layer.mlp.down_proj.bias = nn.Parameter(layer.mlp.down_proj.bias * 3)


def write_past_the_version_of_a_single_weight(model):
    for layer in model.get_decoder().layers:
        layer.mlp.down_proj.weight.data.mul_(2)


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
    *(double_in_place, double_one_number, write_past_the_version, silence_heads, write_some_rows, load),
    *(put_others_in_place, put_weights_in_place, put_norm_weights_in_place, put_biases_in_place),
    *(write_past_the_version_of_a_single_weight, put_a_layer_in_place, train, drop_a_layer),
]


@pytest.mark.parametrize(("norm_type", "dtype"), [("layernorm", torch.float32), ("rmsnorm", torch.bfloat16)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_seen(change, norm_type, dtype):
    model = tiny_model(gated_mlp=True, norm_type=norm_type).to(dtype)
    before = first_step(model)
    change(model)
    after = first_step(model)
    assert torch.equal(after, first_step(copy.deepcopy(model)))
    assert not torch.allclose(after, before, atol=1e-3 if dtype == torch.float32 else 0.02)


def test_copies_serve_again_as_long_as_nothing_changes():
    model = tiny_model(gated_mlp=True, num_key_value_heads=2)
    first_step(model)
    before = prepared_layers(model.get_decoder())
    first_step(model)
    assert prepared_layers(model.get_decoder()) is before
    model.float().eval().requires_grad_(False)
    assert prepared_layers(model.get_decoder()) is before


def test_copies_are_dropped_when_training_starts_and_with_the_model():
    model = tiny_model()
    decoder = model.get_decoder()
    first_step(model)
    assert decoder in prepared_decoder._layers
    model.train()
    assert decoder not in prepared_decoder._layers
    first_step(model.eval())
    count = len(prepared_decoder._layers._by_owner)
    del model, decoder
    gc.collect()
    assert len(prepared_decoder._layers._by_owner) < count


def test_copies_do_not_travel(tmp_path):
    model = tiny_model()
    names = set(model.state_dict())
    first_step(model)
    assert set(model.state_dict()) == names
    assert copy.deepcopy(model).get_decoder() not in prepared_decoder._layers


def test_weights_without_versions_are_not_copied():
    """Those of a model that was made under inference mode cannot be told from changed ones."""
    with torch.inference_mode():
        model = tiny_model()
    before = first_step(model)
    with torch.inference_mode():
        model.get_decoder().layers[0].self_attn.v_proj.weight[3, 1] += 100
    assert not torch.allclose(first_step(model), before, atol=1e-3)


@pytest.mark.parametrize("design", DESIGNS)
def test_layers_are_called_under_autocast(design):
    model = tiny_model(**DESIGNS[design])
    with torch.autocast("cpu", torch.bfloat16):
        layers = prepared_layers(model.get_decoder())
    assert not any(layer.self_qkv._reads_weights for layer in layers)
    assert prepared_layers(model.get_decoder())[0].self_qkv._reads_weights


def head_of(model):
    return prepared_head(model.get_decoder(), model.lm_head)


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
    assert model.get_decoder() not in prepared_decoder._heads


@pytest.mark.parametrize("beams", [1, 3])
def test_hooked_head_is_called(beams):
    model = tiny_model()
    inputs = {name: tensor for name, tensor in random_batch(model.config).items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    before = model.generate(**inputs, **options)
    bias = 1e4 * nn.functional.one_hot(torch.tensor(9), model.config.decoder_vocab_size)
    handle = model.lm_head.register_forward_hook(lambda module, arguments, logits: logits + bias)
    assert (model.generate(**inputs, **options)[:, 1:] == 9).all()
    handle.remove()
    assert torch.equal(model.generate(**inputs, **options), before)


def test_head_that_becomes_contiguous_is_copied():
    # As after a move from a GPU: the parameter is the same, and its memory is another.
    model, states = tiny_model(tie_word_embeddings=False), torch.randn(3, 32)
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not head_of(model)._reads_weights
    weight.data = weight.data.contiguous()
    assert head_of(model)._reads_weights
    torch.testing.assert_close(head_of(model)(states), model.lm_head(states))


def test_large_head_has_no_copy(monkeypatch):
    model, states = tiny_model(tie_word_embeddings=False), torch.randn(1, 32)
    monkeypatch.setattr(prepared_decoder, "LARGEST_SIZE", model.lm_head.weight.numel() - 1)
    assert head_of(model)._reads_weights and not head_of(model)._is_transposed
    torch.testing.assert_close(head_of(model)(states), model.lm_head(states))
    monkeypatch.setattr(prepared_decoder, "_LARGEST_COPY", 32)
    model = tiny_model()
    assert not head_of(model)._reads_weights
    torch.testing.assert_close(head_of(model)(states), model.lm_head(states))
