"""The estimate of weights, gradients and optimizer, on one device and on many, and the page of tables that it makes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from estimated_runs import FLOAT32, arguments_of, batch_and_shape, training_model
from transformers import Trainer
from transformers.training_args import OptimizerNames

from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.planning.estimate import meta_model
from metaphrase.training.planning.memory import (
    BYTE_STATES,
    FULL_STATES,
    ParameterCounts,
    Precision,
    Sharding,
    estimate_states,
    optimizer_bytes,
    unit_sizes,
)

pytestmark = pytest.mark.usefixtures("same_environment")


REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("fields", "head"),
    [
        ({}, 0),
        ({"tie_word_embeddings": False}, 101 * 64),
        ({"share_embeddings": False, "decoder_vocab_size": 77}, 0),
        ({"logits_bias": True}, 101),
    ],
)
def test_each_weight_is_counted_once_where_it_is_first(fields, head):
    model = training_model(position_embedding_type="relative", **fields)
    counts = ParameterCounts.of(model)
    assert counts.total == counts.trainable == model.num_parameters()
    assert counts.head == head
    assert counts.embeddings == (101 * 64 if "decoder_vocab_size" not in fields else (101 + 77) * 64)
    layers = {part: getattr(model.model, part) for part in ("encoder", "decoder")}
    for part, stack in layers.items():
        inside = sum(parameter.numel() for name, parameter in stack.named_parameters() if "embed_tokens" not in name)
        assert getattr(counts, part) == inside


def test_frozen_weights_have_no_gradients():
    model = training_model()
    model.model.encoder.requires_grad_(False)
    counts = ParameterCounts.of(model)
    state = estimate_states(model, optimizer_bytes(model, "adamw_torch")[0], FLOAT32, Sharding())
    assert 0 < counts.trainable < counts.total
    assert (state.weights, state.gradients, state.optimizer) == tuple(
        size * count for size, count in ((4, counts.total), (4, counts.trainable), (8, counts.trainable))
    )


_PLAIN_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [*((name, None) for name in _PLAIN_OPTIMIZERS), ("sgd", "momentum=0.9"), ("rmsprop", "momentum=0.5")],
)
def test_optimizer_bytes_are_those_of_its_state(optim, optim_args, tmp_path):
    model = training_model()
    arguments = arguments_of(tmp_path, optim=optim, optim_args=optim_args)
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    optimizer = optimizer_class(model.parameters(), **options)
    model(**batch_and_shape(False)[0]).loss.backward()
    optimizer.step()
    # Counters and other single numbers are left out.
    values = [value for state in optimizer.state.values() for value in state.values()]
    states = [value for value in values if torch.is_tensor(value) and value.dim()]
    estimated, remark = optimizer_bytes(model, optim, optim_args)
    assert estimated == sum(state.numel() * state.element_size() for state in states)
    assert remark is None


def test_optimizers_in_8_bits_take_a_byte_for_each_state():
    model = training_model(hidden_size=128, tie_word_embeddings=False)
    names = {name.value for name in OptimizerNames}
    assert set(BYTE_STATES).isdisjoint(FULL_STATES) and set(BYTE_STATES) | set(FULL_STATES) <= names
    estimated, _ = optimizer_bytes(model, "adamw_bnb_8bit")
    embedding = model.model.encoder.embed_tokens.weight.numel()
    # Two bytes for each weight and eight for each of the embedding, and the scales of the blocks.
    least = 2 * (model.num_parameters() - embedding) + 8 * embedding
    assert least < estimated < 1.1 * least


def test_devices_share_what_their_stage_says():
    model = meta_model(MetaphraseConfig.from_preset("t5-3b"))
    count = model.num_parameters()
    half = Precision(compute_bytes=2, stream_bytes=2, on_accelerator=True)

    def states(sharding, precision=FLOAT32):
        return estimate_states(model, 8 * count, precision, sharding)

    one = states(Sharding())
    assert (one.weights, one.gradients, one.optimizer, one.buffers) == (4 * count, 4 * count, 8 * count, 0)
    every = states(Sharding(8))
    assert (every.weights, every.gradients, every.optimizer) == (one.weights, one.gradients, one.optimizer)
    assert every.buffers == 4 * count
    eighth = count // 8
    shared = states(Sharding(8, 3, "fsdp"), half)
    assert (shared.weights, shared.gradients, shared.optimizer) == (4 * eighth, 4 * eighth, 8 * eighth)
    layer, rest = unit_sizes(model)
    assert layer == sum(parameter.numel() for parameter in model.model.decoder.layers[1].parameters())
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    assert rest == count - sum(parameter.numel() for module in layers for parameter in module.parameters())
    assert shared.gathered_weights == shared.buffers == 2 * (2 * layer + rest)
    second = states(Sharding(8, 2, "deepspeed", bucket_entries=1000), half)
    # In half precision; the float32 weights belong to the optimizer.
    assert (second.weights, second.gradients, second.optimizer) == (2 * count, 2 * count // 8, 12 * count // 8)
    assert second.buffers == 2 * 2 * 1000 and second.gradients_persist
    assert states(Sharding(8, 3, "deepspeed", is_offloaded=True), half).optimizer == 0


def memory_benchmark():
    specification = importlib.util.spec_from_file_location("memory_benchmark", REPOSITORY / "benchmarks" / "memory.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_tables_of_the_page_are_those_of_the_script():
    benchmark = memory_benchmark()
    text = benchmark.PAGE.read_text(encoding="utf-8")
    assert benchmark.fill(text) == text
    for preset in benchmark.SHARED_PRESETS:
        assert [f"| {preset} " in line for line in text.splitlines()].count(True) >= len(benchmark.DEVICES)
    with pytest.raises(ValueError, match="must have the markers"):
        benchmark.fill("no markers")
