"""Tests of `metaphrase.decoding.prepacked_weights` and `packed_stack`: products by packed weights are those of the layers."""

import copy

import pytest
import torch
from tiny_generator import SOURCES, tiny_generator
from tiny_models import DESIGNS, random_batch, tiny_model
from torch import nn

from metaphrase.decoding import prepacked_weights as packed_stack
from metaphrase.decoding import prepacked_weights as packed_weight
from metaphrase.decoding import prepared_linear as step_linear
from metaphrase.decoding.prepacked_weights import PrepackedWeight, can_prepack, is_plain, prefers_onednn
from metaphrase.decoding.prepared_linear import PreparedLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


@pytest.fixture(params=["mkl", "onednn"])
def library(request, monkeypatch):
    """Which packs and multiplies, whatever the processor."""
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(packed_weight, "prefers_onednn", lambda: request.param == "onednn")
    can_prepack.cache_clear()
    yield request.param
    can_prepack.cache_clear()


@pytest.fixture
def products(monkeypatch):
    """Of weights of any size, packed at once; how many were made."""
    made = []

    def recorded(packed, states, call=PrepackedWeight.__call__):
        made.append(packed)
        return call(packed, states)

    monkeypatch.setattr(PrepackedWeight, "__call__", recorded)
    monkeypatch.setattr(packed_stack, "_PATIENCE", 0)
    for module in (packed_stack, step_linear):
        monkeypatch.setattr(module, "can_prepack", lambda *shape: True)
    return made


@torch.no_grad()
@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (7,), (16,), (130,), (600,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("shape", [(512, 512), (1536, 512), (300, 1000), (1001, 333)])
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
    """As torchao's: it says that it is in float32, and multiplies in its own way."""


def test_a_weight_of_another_kind_is_not_plain():
    layer = nn.Linear(4, 4)
    assert is_plain(layer)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Quantized))
    assert type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not is_plain(layer)


def test_small_and_narrow_weights_are_not_packed(library):
    assert can_prepack(512, 512) and can_prepack(9000, 256)
    assert not can_prepack(511, 512) and not can_prepack(9000, 255)


@pytest.fixture
def untried():
    can_prepack.cache_clear()
    yield
    can_prepack.cache_clear()


def test_nothing_is_packed_without_mkl_or_onednn(untried, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(packed_weight, "prefers_onednn", lambda: False)
    assert not can_prepack(512, 512)


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("vendor_id\t: AuthenticAMD", True),
        ("vendor_id\t: HygonGenuine", True),
        ("vendor_id\t: GenuineIntel", False),
        ("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", True),
        ("arm", False),
        ("", False),
    ],
)
def test_onednn_multiplies_on_processors_of_amd(vendor, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(packed_weight, "_vendor", lambda: vendor)
    assert prefers_onednn.__wrapped__() == expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not prefers_onednn.__wrapped__()


@pytest.mark.parametrize("wrong_rows", [2, 5, 16, 37, 130])
def test_nothing_is_packed_where_it_is_multiplied_wrongly(wrong_rows, library, monkeypatch):
    def wrong(packed, states, call=PrepackedWeight.__call__):
        return call(packed, states) + 0.1 * (len(states) == wrong_rows)

    monkeypatch.setattr(PrepackedWeight, "__call__", wrong)
    assert not can_prepack(512, 512)


def test_nothing_is_packed_where_the_operators_call_what_is_not_there(untried, monkeypatch):
    def missing(*_):
        raise RuntimeError("ATen not built with MKL support")

    monkeypatch.setattr(packed_weight.PrepackedWeight, "__init__", missing)
    assert not can_prepack(512, 512)


@torch.no_grad()
@pytest.mark.parametrize("rows", [(1,), (5,), (100,), (3, 5)])
@pytest.mark.parametrize("sizes", [(4,), (4, 2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_are_packed_for_several_rows(bias, sizes, rows, products):
    layers, states = [nn.Linear(6, size, bias=bias) for size in sizes], torch.randn(*rows, 6)
    expected = torch.cat([layer(states) for layer in layers], dim=-1)
    torch.testing.assert_close(PreparedLinear(layers)(states), expected, atol=1e-6, rtol=1e-5)
    assert len(products) == (rows != (1,))


def encode(model, **options):
    batch = random_batch(model.config)
    with torch.no_grad():
        return model.get_encoder()(batch["input_ids"], batch["attention_mask"], **options).last_hidden_state


def encode_plainly(model):
    """By one that was made of the same weights just now, and has been asked for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_stack, "can_prepack", lambda *shape: False)
        return encode(copy.deepcopy(model))


@pytest.mark.parametrize("design", DESIGNS)
def test_encoder_computes_the_same(design, library, products):
    model = tiny_model(**DESIGNS[design])
    expected = encode_plainly(model)
    assert not products
    torch.testing.assert_close(encode(model), expected, atol=1e-5, rtol=1e-5)
    layers = [module for module in model.get_encoder().layers.modules() if type(module) is nn.Linear]
    assert len(products) == len(layers) and not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("design", DESIGNS)
def test_searches_write_the_same(design, beams, library, products, monkeypatch):
    model = tiny_model(**DESIGNS[design])
    batch = random_batch(model.config)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 8}
    with monkeypatch.context() as patch:
        for module in (packed_stack, step_linear):
            patch.setattr(module, "can_prepack", lambda *shape: False)
        expected = copy.deepcopy(model).generate(**inputs, **options)
    assert not products
    assert torch.equal(model.generate(**inputs, **options), expected) and products


def test_what_goes_wrong_leaves_nothing_lent(products):
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


def test_what_a_user_put_in_the_place_of_a_layer_is_called_and_stays(products):
    model = tiny_model()
    before = encode(model)
    layer = model.get_encoder().layers[0].mlp.up_proj
    layer.forward = lambda states: 2 * type(layer).forward(layer, states)
    for _ in range(2):
        assert not torch.allclose(encode(model), before, atol=1e-3) and "forward" in vars(layer)
    del layer.forward
    torch.testing.assert_close(encode(model), before)


CHANGES = {
    "in place": lambda layer: layer.weight.data.mul_(2),
    "bias": lambda layer: layer.bias.data.add_(1),
    "another weight": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight + 1)),
    "another bias": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias + 1)),
    "no bias": lambda layer: setattr(layer, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_changed_are_packed_anew(change, products):
    model = tiny_model(mlp_bias=True)
    before = encode(model)
    with torch.no_grad():
        change(model.get_encoder().layers[0].mlp.down_proj)
    after = encode(model)
    assert not torch.allclose(after, before, atol=1e-3)
    torch.testing.assert_close(after, encode_plainly(model), atol=1e-5, rtol=1e-5)


def test_a_layer_in_the_place_of_another_is_called(products):
    model = tiny_model()
    encode(model)
    layer = model.get_encoder().layers[0].mlp
    layer.down_proj = nn.Linear(layer.down_proj.in_features, layer.down_proj.out_features)
    torch.testing.assert_close(encode(model), encode_plainly(model), atol=1e-5, rtol=1e-5)
    assert layer.down_proj in packed_stack._stacks._by_owner[model.get_encoder()]._linears


def test_training_frees_them_and_makes_none(products):
    model = tiny_model()
    encode(model)
    assert model.get_encoder() in packed_stack._stacks
    model.train()
    assert model.get_encoder() not in packed_stack._stacks
    count = len(products)
    encode(model)
    model.eval()
    batch = random_batch(model.config)
    model.get_encoder()(batch["input_ids"]).last_hidden_state.sum().backward()
    assert len(products) == count and model.get_encoder().layers[0].mlp.up_proj.weight.grad is not None


def test_other_precisions_have_none(products):
    encode(tiny_model().to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        encode(tiny_model())
    assert not products


def test_a_model_that_comes_to_float32_has_them(products):
    model = tiny_model().to(torch.bfloat16)
    encode(model)
    model.float()
    torch.testing.assert_close(encode(model), encode_plainly(model), atol=1e-5, rtol=1e-5)
    assert products


def test_a_traced_encoder_has_its_layers(products):
    model, ids = tiny_model().requires_grad_(False), torch.randint(3, 20, (2, 5))
    with torch.no_grad():
        traced = torch.jit.trace(lambda ids: model.get_encoder()(ids).last_hidden_state, ids, check_trace=False)
        assert not products
        torch.testing.assert_close(traced(ids), model.get_encoder()(ids).last_hidden_state)


def test_weights_without_versions_are_not_packed(products):
    with torch.inference_mode():
        encode(tiny_model())
    assert not products


def test_they_are_packed_once_they_have_been_asked_for_often(products, monkeypatch):
    monkeypatch.setattr(packed_stack, "_PATIENCE", 2)
    model, counts = tiny_model(), []
    for _ in range(4):
        encode(model)
        counts.append(len(products))
    assert counts[:2] == [0, 0] and 0 < counts[2] < counts[3]


@pytest.mark.parametrize("risk", [None, {"num_candidates": 2}])
def test_a_stream_that_is_taken_up_is_written_as_it_would_have_been(products, monkeypatch, risk):
    """What comes first from a model is made as what comes after much else."""
    monkeypatch.setattr(packed_stack, "_PATIENCE", 3)
    was_packed = []

    def run(first):
        generator = tiny_generator(seed=1)
        options = {"window": 1, "first_window": first, "seed": 0, "max_new_tokens": 4, "num_beams": 1 if risk else 2}
        candidates = []
        for found in generator.generate_stream(iter(SOURCES[first:]), risk=risk, **options):
            candidates.append([(each.text, each.score) for each in found])
            was_packed.append(bool(packed_stack._stacks._by_owner[generator.model.get_encoder()]._packed))
        return candidates

    assert run(0)[2:] == run(2)
    # From the first line on.
    assert all(was_packed)


def test_they_do_not_travel(products):
    model = tiny_model()
    names = set(model.state_dict())
    encode(model)
    assert set(model.state_dict()) == names and copy.deepcopy(model).get_encoder() not in packed_stack._stacks
