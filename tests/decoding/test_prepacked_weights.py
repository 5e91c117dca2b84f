"""Tests of `metaphrase.decoding.prepacked_weights`: products with prepacked weights are those of the layers."""

import copy

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from torch import nn

from metaphrase.decoding import decoder_state, prepacked_weights
from metaphrase.decoding.prepacked_weights import PrepackedWeight, can_prepack, is_plain, prefers_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


@pytest.fixture(params=["mkl", "onednn"])
def library(request, monkeypatch):
    """Choose the library, on any processor."""
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
    for module in (prepacked_weights, decoder_state):
        monkeypatch.setattr(module, "can_prepack", lambda *shape: True)
    return made


@torch.no_grad()
@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (130,), (600,), (2, 3, 4)])
@pytest.mark.parametrize("shape", [(1536, 512), (1001, 333)])
@pytest.mark.parametrize("bias", [True, False])
def test_product_is_that_of_the_layer(bias, shape, rows, library):
    layer = nn.Linear(shape[1], shape[0], bias=bias)
    states = torch.randn(*rows, shape[1])
    torch.testing.assert_close(PrepackedWeight(layer.weight, layer.bias)(states), layer(states), atol=1e-5, rtol=1e-5)
    every_other = torch.randn(*rows, 2 * shape[1])[..., ::2]
    torch.testing.assert_close(
        PrepackedWeight(layer.weight, layer.bias)(every_other), layer(every_other), atol=1e-5, rtol=1e-5
    )


class _Quantized(torch.Tensor):
    """A tensor like those of torchao: its dtype is float32, and it has its own product."""


def test_weight_of_another_class_is_not_plain():
    layer = nn.Linear(4, 4)
    assert is_plain(layer)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Quantized))
    assert type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not is_plain(layer)


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("vendor_id\t: AuthenticAMD", True),
        ("vendor_id\t: GenuineIntel", False),
        ("", False),
    ],
)
def test_onednn_multiplies_on_processors_of_amd(vendor, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(prepacked_weights, "_vendor", lambda: vendor)
    assert prefers_onednn.__wrapped__() == expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not prefers_onednn.__wrapped__()


@pytest.mark.parametrize("wrong_rows", [2, 130])
def test_nothing_is_packed_if_products_are_wrong(wrong_rows, library, monkeypatch):
    def wrong(packed, states, call=PrepackedWeight.__call__):
        return call(packed, states) + 0.1 * (len(states) == wrong_rows)

    monkeypatch.setattr(PrepackedWeight, "__call__", wrong)
    assert not can_prepack(512, 512)


def encode(model, **options):
    batch = random_batch(model.config)
    with torch.no_grad():
        return model.get_encoder()(batch["input_ids"], batch["attention_mask"], **options).last_hidden_state


def encode_plainly(model):
    """Encode by a copy of the model without prepacked weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepacked_weights, "can_prepack", lambda *shape: False)
        return encode(copy.deepcopy(model))


@pytest.mark.parametrize("design", DESIGNS)
def test_encoder_computes_the_same(design, library, products):
    model = tiny_model(**DESIGNS[design])
    expected = encode_plainly(model)
    assert not products
    torch.testing.assert_close(encode(model), expected, atol=1e-5, rtol=1e-5)
    layers = [module for module in model.get_encoder().layers.modules() if type(module) is nn.Linear]
    assert len(products) == len(layers) and not any("forward" in vars(module) for module in model.modules())


def test_layers_are_restored_after_an_error(products):
    model = tiny_model()

    def fail(*_):
        raise KeyError("stop")

    handle = model.get_encoder().layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(KeyError):
        encode(model)
    handle.remove()
    assert products and not any("forward" in vars(module) for module in model.modules())


def test_hooks_are_called_around_packed_layers(products):
    model = tiny_model()
    before, seen = encode(model), []
    layer = model.get_encoder().layers[0].mlp.up_proj
    handle = layer.register_forward_hook(lambda module, given, output: seen.append(output) or 2 * output)
    assert not torch.allclose(encode(model), before, atol=1e-3) and seen
    handle.remove()
    torch.testing.assert_close(encode(model), before)


def test_replaced_forward_is_called_and_stays(products):
    model = tiny_model()
    before = encode(model)
    layer = model.get_encoder().layers[0].mlp.up_proj
    layer.forward = lambda states: 2 * type(layer).forward(layer, states)
    for _ in range(2):
        assert not torch.allclose(encode(model), before, atol=1e-3) and "forward" in vars(layer)
    del layer.forward
    torch.testing.assert_close(encode(model), before)


CHANGES = {
    "written": lambda mlp: mlp.down_proj.weight.data.mul_(2),
    "another weight": lambda mlp: setattr(mlp.down_proj, "weight", nn.Parameter(mlp.down_proj.weight + 1)),
    "another layer": lambda mlp: setattr(mlp, "down_proj", nn.Linear(48, 32)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_are_packed_again(change, products):
    model = tiny_model(mlp_bias=True)
    before = encode(model)
    with torch.no_grad():
        change(model.get_encoder().layers[0].mlp)
    after = encode(model)
    assert not torch.allclose(after, before, atol=1e-3)
    torch.testing.assert_close(after, encode_plainly(model), atol=1e-5, rtol=1e-5)
    packed = prepacked_weights._copies[model.get_encoder()][prepacked_weights._prepack][0]
    assert model.get_encoder().layers[0].mlp.down_proj in [linear for linear, _ in packed]


def test_training_frees_prepacked_weights_and_they_are_not_saved(products):
    model, owners = tiny_model(), prepacked_weights._copies
    names = set(model.state_dict())
    encode(model)
    assert model.get_encoder() in owners and set(model.state_dict()) == names
    assert copy.deepcopy(model).get_encoder() not in owners
    model.train()
    assert model.get_encoder() not in owners
    count = len(products)
    encode(model)
    model.eval()
    batch = random_batch(model.config)
    model.get_encoder()(batch["input_ids"]).last_hidden_state.sum().backward()
    assert len(products) == count and model.get_encoder().layers[0].mlp.up_proj.weight.grad is not None


def test_other_dtypes_and_weights_without_versions_are_not_packed(products):
    with torch.inference_mode():
        encode(tiny_model())
    encode(tiny_model().to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        encode(tiny_model())
    assert not products


def test_traced_encoder_calls_its_layers(products):
    model, ids = tiny_model().requires_grad_(False), torch.randint(3, 20, (2, 5))
    with torch.no_grad():
        traced = torch.jit.trace(lambda ids: model.get_encoder()(ids).last_hidden_state, ids, check_trace=False)
        assert not products
        torch.testing.assert_close(traced(ids), model.get_encoder()(ids).last_hidden_state)
