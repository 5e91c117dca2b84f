"""Tests of `metaphrase.decoding.prepacked_weights`: the encoder computes the same with them, and without padding."""

import pytest
import torch
from tiny_models import DESIGNS, padding_mask, random_batch, tiny_model
from torch import nn

from metaphrase.decoding import prepacked_weights
from metaphrase.decoding.prepacked_weights import PrepackedWeight, can_prepack
from metaphrase.ops import packed_stacks

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


@pytest.fixture(params=["mkl", "onednn"])
def library(request, monkeypatch):
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(prepacked_weights, "prefers_onednn", lambda: request.param == "onednn")
    can_prepack.cache_clear()
    yield request.param
    can_prepack.cache_clear()


@pytest.fixture
def products(monkeypatch):
    """Prepack weights of any size, and collect the products."""
    made = []

    def recorded(packed, states, call=PrepackedWeight.__call__):
        made.append(packed)
        return call(packed, states)

    monkeypatch.setattr(PrepackedWeight, "__call__", recorded)
    monkeypatch.setattr(prepacked_weights, "can_prepack", lambda *shape: True)
    return made


@torch.no_grad()
@pytest.mark.parametrize("rows", [(0,), (1,), (130,), (2, 3, 4)])
@pytest.mark.parametrize("shape", [(1536, 512), (1001, 333)])
@pytest.mark.parametrize("bias", [True, False])
def test_product_is_that_of_the_layer(bias, shape, rows, library):
    layer = nn.Linear(shape[1], shape[0], bias=bias)
    packed, every_other = PrepackedWeight(layer.weight, layer.bias), torch.randn(*rows, 2 * shape[1])[..., ::2]
    for states in (every_other.contiguous(), every_other):
        torch.testing.assert_close(packed(states), layer(states), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong_rows", [2, 130])
def test_nothing_is_packed_if_products_are_wrong(wrong_rows, library, monkeypatch):
    def wrong(packed, states, call=PrepackedWeight.__call__):
        return call(packed, states) + 0.1 * (len(states) == wrong_rows)

    monkeypatch.setattr(PrepackedWeight, "__call__", wrong)
    assert not can_prepack(512, 512)


def encode(model):
    batch = random_batch(model.config)
    with torch.no_grad():
        return model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state


@pytest.mark.parametrize("design", DESIGNS)
def test_encoder_computes_the_same(design, library, products):
    model = tiny_model(**DESIGNS[design])
    with torch.inference_mode():
        # Weights without versions are not packed.
        expected = encode(tiny_model(**DESIGNS[design]))
    assert not products
    torch.testing.assert_close(encode(model), expected, atol=1e-5, rtol=1e-5)
    layers = [module for module in model.get_encoder().layers.modules() if type(module) is nn.Linear]
    assert len(products) == len(layers) and not any("forward" in vars(module) for module in model.modules())


def test_hooks_and_replaced_forwards_are_called_and_layers_are_restored(products):
    model = tiny_model()
    before, layer = encode(model), model.get_encoder().layers[0].mlp.up_proj
    handle = layer.register_forward_hook(lambda module, given, output: 2 * output)
    assert not torch.allclose(encode(model), before, atol=1e-3)
    handle.remove()
    layer.forward = lambda states: 2 * type(layer).forward(layer, states)
    for _ in range(2):
        assert not torch.allclose(encode(model), before, atol=1e-3) and "forward" in vars(layer)
    del layer.forward

    def fail(*_):
        raise KeyError("stop")

    handle = model.get_encoder().layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(KeyError):
        encode(model)
    handle.remove()
    assert products and not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(encode(model), before)


def test_other_dtypes_and_training_are_not_packed(products):
    encode(tiny_model().train())
    model = tiny_model()
    model.get_encoder()(random_batch(model.config)["input_ids"]).last_hidden_state.sum().backward()
    assert model.get_encoder().layers[0].mlp.up_proj.weight.grad is not None
    encode(tiny_model().to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        encode(tiny_model())
    assert not products


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
def test_traced_encoder_calls_its_layers(products):
    model, ids = tiny_model().requires_grad_(False), torch.randint(3, 20, (2, 5))
    with torch.no_grad():
        traced = torch.jit.trace(lambda ids: model.get_encoder()(ids).last_hidden_state, ids, check_trace=False)
        assert not products
        torch.testing.assert_close(traced(ids), model.get_encoder()(ids).last_hidden_state)


# Without padding

LENGTHS = [9, 4, 1, 6]


@pytest.fixture
def skipped(monkeypatch):
    """The lengths of the sources that were encoded without their padding."""
    monkeypatch.setattr(prepacked_weights, "LEAST_HIDDEN_SIZE", 0)
    calls, original = [], packed_stacks.encode_packed

    def recorded(encoder, embeddings, sequences, **kwargs):
        calls.append(sequences.lengths.tolist())
        return original(encoder, embeddings, sequences, **kwargs)

    monkeypatch.setattr(packed_stacks, "encode_packed", recorded)
    return calls


def make_batch(config, side="right"):
    ids = torch.randint(3, config.vocab_size, (len(LENGTHS), 11), generator=torch.Generator().manual_seed(0))
    mask = padding_mask(LENGTHS, 11, side)
    return ids.masked_fill(mask == 0, config.pad_token_id), mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", list(DESIGNS))
def test_output_is_that_of_padded_rows(name, side, skipped):
    encoder = tiny_model(**DESIGNS[name]).get_encoder()
    ids, mask = make_batch(encoder.config, side)
    with torch.no_grad():
        output = encoder(ids, mask).last_hidden_state
    assert skipped == [LENGTHS]
    # With gradients it computes the padding too.
    expected = encoder(ids, mask).last_hidden_state
    assert skipped == [LENGTHS]
    torch.testing.assert_close(output[mask == 1], expected[mask == 1], rtol=1e-4, atol=5e-5)
    assert (output[mask == 0] == 0).all()


OBSTACLES = {
    "hole": lambda encoder, mask: mask[0, 4].zero_(),
    "empty row": lambda encoder, mask: mask[2].zero_(),
    "little padding": lambda encoder, mask: mask.fill_(1)[0, -1].zero_(),
    "training": lambda encoder, mask: encoder.train(),
    "another kernel": lambda encoder, mask: encoder.set_attn_implementation("eager"),
    "hook": lambda encoder, mask: encoder.layers[1].mlp.register_forward_hook(lambda *_: None),
    "small model": lambda encoder, mask: setattr(prepacked_weights, "LEAST_HIDDEN_SIZE", 256),
    "positions": lambda encoder, mask: {"position_ids": torch.arange(mask.shape[1])[None]},
    "recorded outputs": lambda encoder, mask: {"output_hidden_states": True},
}


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
@torch.no_grad()
def test_padding_is_computed(obstacle, skipped):
    encoder = tiny_model().get_encoder()
    ids, mask = make_batch(encoder.config)
    arguments = obstacle(encoder, mask)
    output = encoder(ids, mask, **arguments if type(arguments) is dict else {})
    shapes = {states.shape for states in (output.last_hidden_state, *(output.hidden_states or ()))}
    assert shapes == {(*ids.shape, encoder.config.hidden_size)} and skipped == []
