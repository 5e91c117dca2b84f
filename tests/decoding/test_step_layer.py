"""Tests of `metaphrase.decoding.prepared_decoder`: joined products are those of the layers, and never those of older weights."""

import copy
import gc

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from torch import nn

from metaphrase.decoding import prepared_decoder as step_layer
from metaphrase.decoding import prepared_linear as row_sums
from metaphrase.decoding import prepared_linear as step_linear
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.prepared_decoder import prepared_layers
from metaphrase.decoding.prepared_linear import PreparedLinear, sum_rows

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


@torch.no_grad()
@pytest.mark.parametrize("rows", [(1,), (5,), (100,), (3, 5)])
@pytest.mark.parametrize("sizes", [(4,), (4, 2, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("copies", [True, False])
def test_product_is_that_of_the_layers_side_by_side(copies, bias, sizes, rows):
    layers, states = linears(*sizes, bias=bias), torch.randn(*rows, 6)
    product = PreparedLinear(layers, copies)(states)
    assert torch.allclose(product, torch.cat([layer(states) for layer in layers], dim=-1), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 0), (torch.float64, 0)])
def test_single_weight_is_copied_where_that_makes_it_faster(dtype, count):
    layer, states = nn.Linear(6, 4).to(dtype), torch.randn(3, 6, dtype=dtype)
    linear = PreparedLinear([layer])
    assert len(linear.copied) == count
    assert torch.allclose(linear(states), layer(states), atol=1e-6)


def test_large_single_weight_is_not_copied():
    assert len(PreparedLinear(linears(4), largest_transposed=4 * 6).copied) == 1
    assert PreparedLinear(linears(5), largest_transposed=4 * 6).copied == []
    assert len(PreparedLinear(linears(5, 5), largest_transposed=4 * 6).copied) == 4


@pytest.fixture
def small_sums(monkeypatch):
    """Small weights gain by zeros too."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no kernels of FBGEMM")
    monkeypatch.setattr(row_sums, "_LEAST_SIZE", 1)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 33), (300, 256), (256, 384)])
def test_rows_for_zeros_are_left_out_of_a_sum(inputs, outputs, share, threads):
    weight, row = torch.randn(inputs, outputs), torch.randn(1, inputs)
    row[0, torch.randperm(inputs)[round(share * inputs) :]] = 0
    weight[row[0] == 0] = torch.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = sum_rows(row, weight)
    finally:
        torch.set_num_threads(before)
    assert output.shape == (1, outputs)
    assert torch.allclose(output, row @ weight.nan_to_num(0.0), atol=1e-5)


def test_a_row_with_many_entries_is_not_summed_up():
    assert sum_rows(torch.randn(1, 20), torch.randn(20, 30)) is None
    assert sum_rows(torch.full((1, 20), torch.nan), torch.randn(20, 30)) is None
    row = torch.zeros(1, 20)
    row[0, 3] = torch.nan
    assert sum_rows(row, torch.randn(20, 30)).isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_product_of_a_row_with_zeros_is_that_of_the_layer(bias, small_sums, monkeypatch):
    summed = []
    monkeypatch.setattr(step_linear, "sum_rows", lambda *args: summed.append(sum_rows(*args)) or summed[-1])
    (layer,) = linears(5, bias=bias)
    linear = PreparedLinear([layer], largest_transposed=1, has_zeros=True)
    states = torch.randn(7, 6)
    states[:, 1:5] = 0
    for part in (states[:1], states[1:2], torch.randn(1, 6), states[:2]):
        assert torch.allclose(linear(part), layer(part), atol=1e-6)
    # One row alone, and not where it has no zeros.
    assert [output is None for output in summed] == [False, False, True]
    assert linear.copied == [layer.weight]


@pytest.mark.parametrize(
    ("activation", "expected"), [("relu", True), ("relu2", True), ("gelu", False), ("silu", False)]
)
@pytest.mark.parametrize("gated", [True, False])
def test_which_layers_look_for_zeros(activation, gated, expected, small_sums, monkeypatch):
    model = tiny_model(activation_function=activation, gated_mlp=gated)
    expected_step, count = first_step(model), []
    monkeypatch.setattr(step_linear, "sum_rows", lambda *args: count.append(1) or sum_rows(*args))
    step_layer.forget_copies(model.get_decoder())
    batch = random_batch(model.config, padding=None)
    with torch.no_grad():
        memory = model.get_encoder()(batch["input_ids"][:1]).last_hidden_state
        step = DecoderState(model.get_decoder(), memory, None).step(batch["decoder_input_ids"][:1, 0])
    assert bool(count) is expected
    assert torch.allclose(step, expected_step[:1], atol=1e-5)


def test_weight_of_another_order_is_not_copied():
    layer, states = nn.Linear(6, 4), torch.randn(3, 6)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    linear = PreparedLinear([layer])
    assert linear.copied == []
    assert torch.equal(linear(states), layer(states))


def test_layer_of_another_kind_is_called_itself():
    class Doubled(nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    layers, states = [*linears(4, 2), Doubled(6, 3)], torch.randn(5, 6)
    assert torch.equal(PreparedLinear(layers)(states), torch.cat([layer(states) for layer in layers], dim=-1))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_seen(change, norm_type, dtype):
    model = tiny_model(gated_mlp=True, norm_type=norm_type).to(dtype)
    before = first_step(model)
    change(model)
    after = first_step(model)
    assert torch.equal(after, without_memory_of_it(model))
    assert not torch.allclose(after, before, atol=1e-3 if dtype == torch.float32 else 0.02)


def test_copies_serve_again_as_long_as_nothing_changes():
    model = tiny_model(**GATED)
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
    assert decoder in step_layer._layers
    model.train()
    assert decoder not in step_layer._layers
    first_step(model.eval())
    count = len(step_layer._layers._by_owner)
    del model, decoder
    gc.collect()
    assert len(step_layer._layers._by_owner) < count


def test_copies_do_not_travel(tmp_path):
    model = tiny_model()
    names = set(model.state_dict())
    first_step(model)
    assert set(model.state_dict()) == names
    assert copy.deepcopy(model).get_decoder() not in step_layer._layers


def test_large_layers_are_not_copied(monkeypatch):
    monkeypatch.setattr("metaphrase.decoding.prepared_linear.LARGEST_SIZE", 4 * 6)
    layers = linears(4, 5)
    assert not PreparedLinear(layers)._is_one
    assert PreparedLinear(linears(4, 3))._weight.shape == (7, 6)
    assert PreparedLinear(layers)(torch.ones(1, 6)).shape == (1, 9)


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
        layers = prepared_layers(model.get_decoder())
    assert not any(layer.token_projection._is_one for layer in layers)
    assert prepared_layers(model.get_decoder())[0].token_projection._is_one
