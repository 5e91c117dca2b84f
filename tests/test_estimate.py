"""The estimate of a run: each part of it against what torch, transformers and the trainer really do."""

import importlib.util
import json
import os
import weakref
from pathlib import Path
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch
from tiny_models import tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainingArguments, T5Config, Trainer
from transformers import T5ForConditionalGeneration as T5
from transformers.training_args import OptimizerNames

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.training import compute_estimate
from metaphrase.training.activation_estimate import Precision, estimate_activations, kept_by_activation
from metaphrase.training.batch_estimate import BatchShape
from metaphrase.training.batching import PairCollator
from metaphrase.training.compute_estimate import measure_flops_per_second, measure_step_seconds, training_flops
from metaphrase.training.estimate import estimate_run, format_bytes, meta_model
from metaphrase.training.memory_estimate import (
    BYTE_STATES,
    FULL_STATES,
    ParameterCounts,
    Sharding,
    estimate_states,
    optimizer_bytes,
    unit_sizes,
)
from metaphrase.training.r_drop import repeat_batch
from metaphrase.training.token_budget import TokenBudgetSampler
from metaphrase.training.trainer import MetaphraseTrainer

REPOSITORY = Path(__file__).parent.parent
PAIRS, SOURCE, TARGET = 8, 32, 24
FLOAT32, AUTOCAST = Precision(), Precision(compute_bytes=2)

# Dimensions that all differ, so that none can stand for another.
WIDTHS = {
    "vocab_size": 101,
    "hidden_size": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 112,
    "initializer_range": None,
    "dropout": 0.1,
}
_CLASSIC = {"norm_type": "layernorm", "norm_position": "post", "gated_mlp": False}
DESIGNS = {
    "recommended": {},
    "without dropout": {"dropout": 0.0},
    "vaswani": {**_CLASSIC, "position_embedding_type": "sinusoidal", "activation_function": "relu"},
    "bart": {**_CLASSIC, "position_embedding_type": "learned", "activation_function": "gelu", "embedding_norm": True},
    "t5": {"position_embedding_type": "relative", "gated_mlp": False, "activation_function": "relu"},
    "t5 v1.1": {"position_embedding_type": "relative", "activation_function": "gelu_new", "mlp_bias": False},
    "bias of each layer": {"position_embedding_type": "relative", "relative_attention_shared": False},
    "alibi": {"position_embedding_type": "alibi", "activation_function": "gelu"},
    "grouped and normed": {"num_key_value_heads": 2, "qk_norm": True},
    "every dropout": {"attention_dropout": 0.1, "activation_dropout": 0.1, "position_embedding_type": "none"},
    "every dropout, plain": {
        **_CLASSIC,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "activation_function": "relu",
    },
    "no final norm": {"final_norm": False, "gated_mlp": False},
    "two vocabularies": {"share_embeddings": False, "decoder_vocab_size": 77, "logits_bias": True},
    "wide": {"encoder_ffn_dim": 512, "decoder_ffn_dim": 384, "head_dim": 32},
}


@pytest.fixture(autouse=True)
def same_environment():
    """transformers writes its FSDP settings into the environment."""
    with patch.dict(os.environ):
        yield


def training_model(**fields):
    return tiny_model(**WIDTHS | fields).train()


def batch_and_shape(is_packed, pairs=PAIRS):
    """Pairs of one length, padded or packed, and their shape."""
    shape = BatchShape.of([SOURCE] * pairs, [TARGET] * pairs, is_packed)
    source, target = (torch.randint(4, 70, (pairs, length)) for length in (SOURCE, TARGET))
    if not is_packed:
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}, shape
    lengths = {"source_lengths": torch.tensor([SOURCE] * pairs), "target_lengths": torch.tensor([TARGET] * pairs)}
    longest = {"longest_source": SOURCE, "longest_target": TARGET}
    return {"input_ids": source.view(1, -1), "labels": target.view(1, -1), **lengths, **longest}, shape


def tensors_of(model, batch):
    return [*model.parameters(), *model.buffers(), *(value for value in batch.values() if torch.is_tensor(value))]


def kept_bytes(model, batch, is_autocast=False, **options):
    """Storages that autograd saves in a forward pass, each counted once; weights and what autocast makes of them are not."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model, batch)}
    matrices = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    sizes, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & matrices
        if storage.data_ptr() not in known and not (is_autocast and is_cast):
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
    ):
        loss = model(**batch, **options).loss
    assert loss.requires_grad
    return sum(sizes.values())


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations have made and nobody has freed, and the most there were."""

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self.storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return outputs

    def _count(self, storage):
        if storage._cdata in self.storages:
            return
        self.storages.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key, size):
        self.storages.discard(key)
        self.now -= size


def arguments_of(folder, **options):
    settings = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings |= {"remove_unused_columns": False, "dataloader_pin_memory": False}
    return Seq2SeqTrainingArguments(output_dir=str(folder), **settings | options)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("design", DESIGNS)
def test_activations_are_what_autograd_keeps(design, is_packed):
    model = training_model(**DESIGNS[design])
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape, FLOAT32).kept
    assert estimated == pytest.approx(kept_bytes(model, batch), rel=0.03)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("design", ["recommended", "vaswani", "t5", "alibi", "bart", "every dropout"])
def test_activations_under_autocast_are_what_autograd_keeps(design, is_packed):
    model = training_model(**DESIGNS[design])
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape, AUTOCAST).kept
    assert estimated == pytest.approx(kept_bytes(model, batch, is_autocast=True), rel=0.05)


@pytest.mark.parametrize("design", ["recommended", "t5 v1.1"])
def test_activations_of_states_in_half_precision(design):
    """As under FSDP, which turns weights and states to half precision."""
    model = training_model(**DESIGNS[design]).bfloat16()
    batch, shape = batch_and_shape(is_packed=False)
    estimated = estimate_activations(model.config, shape, Precision(compute_bytes=2, stream_bytes=2)).kept
    assert estimated == pytest.approx(kept_bytes(model, batch), rel=0.1)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_written_out_attention_keeps_its_scores(is_packed):
    model = training_model(attn_implementation="eager", attention_dropout=0.1)
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape, FLOAT32).kept
    assert estimated == pytest.approx(kept_bytes(model, batch), rel=0.1)


def test_all_logits_are_kept_where_the_loss_is_not_in_chunks():
    model = training_model(vocab_size=1000)
    batch, shape = batch_and_shape(is_packed=False)
    estimated = estimate_activations(model.config, shape, FLOAT32, is_loss_chunked=False).kept
    assert estimated == pytest.approx(kept_bytes(model, batch, return_logits=True), rel=0.03)
    assert estimated > 1.05 * estimate_activations(model.config, shape, FLOAT32).kept


def test_packed_rows_cost_their_tokens_and_padded_rows_their_cells():
    lengths = ([3, 9, 16], [16, 2, 4])
    assert BatchShape.of(*lengths, is_packed=True).tokens == 50
    padded = BatchShape.of(*lengths, is_packed=False)
    assert (padded.source_tokens, padded.target_tokens, padded.width("source")) == (48, 48, 16)
    assert BatchShape.of([3], [17], is_packed=True).width("target") == 24


@pytest.mark.parametrize(
    ("name", "kept"), [("relu", (0, True)), ("silu", (1, False)), ("gelu", (1, False)), ("tanh", (0, True))]
)
def test_activation_functions_keep_their_input_or_their_output(name, kept):
    assert kept_by_activation(name) == kept


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "fields",
    [{}, DESIGNS["vaswani"], {"vocab_size": 4000}, {"encoder_layers": 6, "decoder_layers": 6}, DESIGNS["wide"]],
    ids=["recommended", "vaswani", "vocabulary", "deep", "wide"],
)
def test_peak_of_a_step_is_what_is_alive_at_a_time(fields, is_packed, is_checkpointed):
    model = training_model(**fields)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    batch, shape = batch_and_shape(is_packed, pairs=16)
    with LiveBytes(tensors_of(model, batch)) as live:
        model(**batch, use_cache=False).loss.backward()
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    estimated = estimate_activations(model.config, shape, FLOAT32, is_checkpointed).peak(gradients)
    assert estimated == pytest.approx(live.most, rel=0.2)


def test_gradients_that_stay_are_added():
    activations = estimate_activations(tiny_config(**WIDTHS), batch_and_shape(True)[1], FLOAT32)
    small = activations.kept // 2
    assert activations.peak(small, gradients_persist=True) == activations.peak() + small
    assert activations.peak(small) == activations.peak()
    assert activations.peak(10 * activations.kept) > 10 * activations.kept


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


def test_other_families_are_counted_too():
    with torch.device("meta"):
        t5 = T5(T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=2))
        sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        bart = BartForConditionalGeneration(
            BartConfig(
                vocab_size=50, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=8, **sizes
            )
        )
    for model, positions in ((t5, 0), (bart, 2 * (8 + 2) * 16)):
        counts = ParameterCounts.of(model)
        assert counts.total == model.num_parameters()
        assert (counts.embeddings, counts.head) == (50 * 16 + positions, 0)
        shape = BatchShape.of([3, 3], [5, 5], is_packed=False)
        longer = BatchShape.of([6, 6], [5, 5], is_packed=False)
        # What more source tokens cost is the encoder, and keys and values of the memory in the decoder.
        encoder = sum(
            module.weight.numel() for module in model.get_encoder().modules() if hasattr(module, "in_features")
        )
        memory = 2 * 2 * 16 * (8 if model is t5 else 16)
        assert training_flops(model, [longer]) - training_flops(model, [shape]) == 3 * 2 * 6 * (encoder + memory)


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_torch", None),
        ("adamw_torch_fused", None),
        ("adafactor", None),
        ("sgd", None),
        ("sgd", "momentum=0.9"),
        ("adagrad", None),
        ("rmsprop", None),
        ("rmsprop", "momentum=0.5"),
    ],
)
def test_optimizer_bytes_are_those_of_its_state(optim, optim_args, tmp_path):
    model = training_model()
    arguments = arguments_of(tmp_path, optim=optim, optim_args=optim_args)
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    optimizer = optimizer_class(model.parameters(), **options)
    model(**batch_and_shape(False)[0]).loss.backward()
    optimizer.step()
    # Counters and other single numbers are left out.
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    ]
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


def test_an_unknown_optimizer_is_counted_as_another_and_said_so(tmp_path):
    model = meta_model(tiny_config(**WIDTHS))
    estimated, remark = optimizer_bytes(model, "galore_adamw")
    assert estimated == 8 * model.num_parameters() and "galore_adamw" in remark
    estimate = estimate_run(model, arguments_of(tmp_path, optim="galore_adamw"), [(4, 4)])
    assert remark in estimate.notes and remark in str(estimate)


def test_devices_share_what_their_stage_says():
    model = meta_model(MetaphraseConfig.from_preset("t5-3b"))
    count = model.num_parameters()
    half = Precision(compute_bytes=2, stream_bytes=2, on_accelerator=True)

    def states(sharding, precision=FLOAT32):
        return estimate_states(model, 8 * count, precision, sharding)

    one = states(Sharding())
    assert (one.weights, one.gradients, one.optimizer, one.buffers) == (4 * count, 4 * count, 8 * count, 0)
    every = states(Sharding(8))
    assert (every.weights, every.gradients, every.optimizer, every.buffers) == (
        4 * count,
        4 * count,
        8 * count,
        4 * count,
    )
    eighth = count // 8
    shared = states(Sharding(8, 3, "fsdp"), half)
    assert (shared.weights, shared.gradients, shared.optimizer) == (4 * eighth, 4 * eighth, 8 * eighth)
    layer, rest = unit_sizes(model)
    assert layer == sum(parameter.numel() for parameter in model.model.decoder.layers[1].parameters())
    assert rest + 24 * layer + 24 * unit_sizes(MetaphraseEncoderOnly(model))[0] == count
    assert shared.gathered_weights == shared.buffers == 2 * (2 * layer + rest)
    second = states(Sharding(8, 2, "deepspeed", bucket_entries=1000), half)
    # In half precision; the float32 weights belong to the optimizer.
    assert (second.weights, second.gradients, second.optimizer) == (2 * count, 2 * count // 8, 12 * count // 8)
    assert second.buffers == 2 * 2 * 1000 and second.gradients_persist
    assert states(Sharding(8, 3, "deepspeed", is_offloaded=True), half).optimizer == 0


class MetaphraseEncoderOnly(torch.nn.Module):
    """The encoder's layers as a model of their own."""

    def __init__(self, model):
        super().__init__()
        self._no_split_modules, self.layers = model._no_split_modules, model.model.encoder.layers


def test_sharding_refuses_what_there_is_not():
    for fields, message in (
        ({"devices": 0}, "`devices` must be at least 1, got 0"),
        ({"stage": 4}, "`stage` must be 0, 1, 2 or 3, got 4"),
        ({"engine": "magic"}, "`engine` must be ddp, fsdp or deepspeed, got 'magic'"),
    ):
        with pytest.raises(ValueError, match=message):
            Sharding(**fields)


def test_arguments_of_the_recipe_decide_the_sharding(tmp_path):
    assert Sharding.of(arguments_of(tmp_path)) == Sharding()
    assert Sharding.of(arguments_of(tmp_path, fsdp=True), 4) == Sharding(4, 3, "fsdp")
    config = {"reshard_after_forward": False, "cpu_offload": True}
    assert Sharding.of(arguments_of(tmp_path, fsdp=True, fsdp_config=config), 4) == Sharding(4, 2, "fsdp", True)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("design", ["recommended", "grouped and normed"])
def test_operations_are_those_that_torch_counts(design, is_checkpointed):
    # torch does not count what a CPU's fused attention does.
    model = training_model(attn_implementation="eager", **DESIGNS[design])
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    batch, shape = batch_and_shape(is_packed=False)
    with FlopCounterMode(display=False) as counter:
        model(**batch, use_cache=False).loss.backward()
    estimated = training_flops(model, [shape], is_checkpointed)
    assert estimated == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert training_flops(model, [shape, shape], is_checkpointed) == 2 * estimated


def lengths_of_pairs(count=50):
    generator = np.random.default_rng(0)
    return generator.integers(2, 20, (count, 2))


def dataset_of(lengths):
    rows = [{"input_ids": [5] * source, "labels": [6] * target} for source, target in lengths.tolist()]
    lengths = {"source_length": lengths[:, 0].tolist(), "target_length": lengths[:, 1].tolist()}
    dataset = datasets.Dataset.from_list(rows)
    for name, column in lengths.items():
        dataset = dataset.add_column(name, column)
    return dataset


@pytest.mark.parametrize("budget", [None, 100])
@pytest.mark.parametrize("options", [{"num_train_epochs": 2.5, "gradient_accumulation_steps": 3}, {"max_steps": 4}])
def test_steps_are_those_of_the_trainer(budget, options, tmp_path):
    lengths = lengths_of_pairs()
    arguments = arguments_of(tmp_path, per_device_train_batch_size=6, **options)
    model = tiny_model()
    estimate = estimate_run(model, arguments, lengths, max_tokens_per_batch=budget)
    trainer = MetaphraseTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset_of(lengths),
        data_collator=PairCollator(0),
        max_tokens_per_batch=budget,
    )
    assert estimate.data.batches_per_epoch == len(trainer.get_train_dataloader())
    trainer.train()
    assert estimate.data.steps == trainer.state.global_step


def test_padding_and_tokens_are_counted(tmp_path):
    lengths, arguments = lengths_of_pairs(), arguments_of(tmp_path, train_sampling_strategy="group_by_length")
    model = meta_model(tiny_config())
    data = estimate_run(model, arguments, lengths).data
    assert (data.pairs, data.source_tokens, data.target_tokens) == (50, *lengths.sum(axis=0))
    assert 0 < data.padding_share < 0.5
    shuffled = estimate_run(model, arguments_of(tmp_path), lengths).data
    assert shuffled.padding_share > data.padding_share
    assert estimate_run(model, arguments, lengths, max_tokens_per_batch=100).data.padding_share == 0
    # A model that reads no packed rows pays for the padding of the same batches.
    model.supports_packing = False
    padded = estimate_run(model, arguments, lengths, max_tokens_per_batch=100).data
    assert padded.padding_share == pytest.approx(TokenBudgetSampler(lengths, 100, arguments.seed).padding_share())


def test_more_devices_make_fewer_steps(tmp_path):
    lengths, arguments = lengths_of_pairs(400), arguments_of(tmp_path, num_train_epochs=1)
    model = meta_model(tiny_config())
    one, four = (estimate_run(model, arguments, lengths, devices=devices, flops_per_second=1e9) for devices in (1, 4))
    assert four.data.steps == pytest.approx(one.data.steps / 4, abs=1)
    assert four.hours == pytest.approx(one.hours / 4, rel=0.05)
    assert four.flops_per_step == pytest.approx(4 * one.flops_per_step, rel=0.05)


def test_largest_batch_decides_the_memory(tmp_path):
    lengths = np.array([(4, 4)] * 80 + [(60, 60)] * 8)
    arguments = arguments_of(tmp_path, train_sampling_strategy="group_by_length")
    estimate = estimate_run(meta_model(tiny_config(**WIDTHS)), arguments, lengths)
    shape = BatchShape.of([60] * 8, [60] * 8, is_packed=False)
    assert estimate.largest_batch == shape
    expected = estimate_activations(tiny_config(**WIDTHS), shape, FLOAT32)
    assert estimate.activations == expected
    weights = 4 * estimate.parameters.total
    assert estimate.peak == weights + 2 * weights + expected.peak(weights)
    assert estimate.other_peak == 3 * weights + estimate_activations(
        tiny_config(**WIDTHS), shape, FLOAT32, is_checkpointed=True
    ).peak(weights)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_r_drop_keeps_the_activations_of_both_passes(is_packed):
    model = training_model(dropout=0.1)
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape.repeated(2), FLOAT32).kept
    assert estimated == pytest.approx(kept_bytes(model, repeat_batch(batch), r_drop_alpha=5.0), rel=0.03)


def test_r_drop_takes_twice_the_operations(tmp_path):
    model, arguments, lengths = meta_model(tiny_config()), arguments_of(tmp_path), [(4, 4), (5, 3)]
    plain = estimate_run(model, arguments, lengths)
    twice = estimate_run(model, arguments, lengths, r_drop_start_step=0)
    assert twice.flops_per_step == 2 * plain.flops_per_step
    assert twice.largest_batch == plain.largest_batch.repeated(2) and twice.largest_batch.pairs == 4
    assert twice.data == plain.data
    last = estimate_run(model, arguments, lengths, r_drop_start_step=2)
    assert plain.data.steps == 3 and last.flops_per_step == plain.flops_per_step * 4 // 3
    assert last.peak == twice.peak
    assert any("R-Drop" in note for note in twice.notes) and not any("R-Drop" in note for note in plain.notes)


def test_arguments_decide_precision_and_checkpoints(tmp_path):
    model, lengths = meta_model(tiny_config()), [(4, 4)]
    assert estimate_run(model, arguments_of(tmp_path), lengths).precision == FLOAT32
    half = estimate_run(model, arguments_of(tmp_path, bf16=True), lengths)
    assert half.precision == AUTOCAST and half.state.cast_weights > 0
    again = estimate_run(model, arguments_of(tmp_path, gradient_checkpointing=True), lengths)
    assert again.is_checkpointed and again.flops_per_step > half.flops_per_step
    arguments = arguments_of(tmp_path, bf16=True, fsdp=True)
    shared = estimate_run(model, arguments, lengths * 8, devices=8, on_accelerator=True)
    assert shared.precision == Precision(2, 2, True) and shared.state.cast_weights == 0
    assert shared.state.weights == -(-4 * model.num_parameters() // 8)
    assert any("on a CPU" in note for note in estimate_run(model, arguments, lengths * 8, devices=8).notes)


def test_time_needs_a_rate(tmp_path):
    model, arguments = meta_model(tiny_config()), arguments_of(tmp_path, max_steps=100)
    without = estimate_run(model, arguments, [(4, 4)])
    assert without.hours is None and any("no rate" in note for note in without.notes)
    estimate = estimate_run(model, arguments, [(4, 4)], flops_per_second=1e6)
    assert estimate.hours == pytest.approx(100 * estimate.flops_per_step / 1e6 / 3600)


def test_timed_steps_change_nothing():
    model = tiny_model(**WIDTHS)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batches = [batch_and_shape(True)[0]] * 3
    state = torch.get_rng_state()
    seconds = measure_step_seconds(model, batches)
    assert len(seconds) == 2 and min(seconds) > 0
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measured_rate_is_operations_by_seconds(monkeypatch):
    model = tiny_model(**WIDTHS)
    batches, shapes = zip(*(batch_and_shape(True, pairs) for pairs in (2, 4, 8, 16)), strict=True)
    monkeypatch.setattr(compute_estimate, "measure_step_seconds", lambda *_, bf16: [1.0, 100.0, 2.0] if bf16 else [])
    # The first batch warms up; the rate of the second lies between the others'.
    expected = training_flops(model, [shapes[1]], is_checkpointed=True) / 1.0
    assert measure_flops_per_second(model, batches, is_checkpointed=True, bf16=True) == expected


def test_a_batch_has_the_shape_of_its_tensors():
    for is_packed in (False, True):
        batch, shape = batch_and_shape(is_packed)
        assert BatchShape.of_tensors(batch) == shape


def test_steps_are_timed_on_real_weights_and_enough_batches():
    with pytest.raises(ValueError, match="must have real weights to be timed"):
        measure_step_seconds(meta_model(tiny_config()), [])
    with pytest.raises(ValueError, match="`batches` must be at least 2, of which one warms up, got 1"):
        measure_step_seconds(tiny_model(**WIDTHS), [batch_and_shape(False)[0]])


def test_table_and_values_say_the_same(tmp_path):
    model = meta_model(MetaphraseConfig.from_preset("t5-11b"))
    arguments = arguments_of(tmp_path, bf16=True, fsdp=True, gradient_checkpointing=True, max_steps=10)
    estimate = estimate_run(
        model,
        arguments,
        [(128, 128)] * 512,
        max_tokens_per_batch=16384,
        devices=8,
        on_accelerator=True,
        flops_per_second=1e14,
    )
    text, values = str(estimate), estimate.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert "11,307,321,344" in text and values["parameters"]["total"] == 11_307_321_344
    assert format_bytes(values["peak"]) in text and format_bytes(values["state"]["optimizer"]) in text
    assert "8 devices by fsdp, sharing optimizer, gradients and weights" in text
    batch = estimate.largest_batch
    assert batch.tokens <= 16384
    assert f"{batch.pairs} pairs, {batch.source_tokens:,} source and {batch.target_tokens:,} target tokens" in text
    assert values["data"]["steps"] == 10 and f"10, {values['data']['steps_per_epoch']} for each epoch" in text
    assert f"{estimate.hours * 60:.1f} minutes" in text


def test_sizes_are_written_in_binary_units():
    assert [format_bytes(size) for size in (2**19, 3 * 2**20, 2**30, 5 * 2**29)] == [
        "0.5 MiB",
        "3.0 MiB",
        "1.00 GiB",
        "2.50 GiB",
    ]


def test_activations_of_other_families_are_unknown(tmp_path):
    with torch.device("meta"):
        model = T5(T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=2))
    estimate = estimate_run(model, arguments_of(tmp_path), lengths_of_pairs(), max_tokens_per_batch=100)
    assert estimate.activations is None and estimate.other_peak is None
    assert estimate.peak == 16 * model.num_parameters()
    assert any("not for t5" in note for note in estimate.notes) and "and activations" in str(estimate)


def test_wrong_arguments_are_refused(tmp_path):
    model, arguments = meta_model(tiny_config()), arguments_of(tmp_path)
    for lengths in ([], [1, 2], [(1, 2, 3)]):
        with pytest.raises(ValueError, match="`lengths` must be those of at least one pair"):
            estimate_run(model, arguments, lengths)
    with pytest.raises(ValueError, match="`flops_per_second` must be above 0, got 0"):
        estimate_run(model, arguments, [(1, 1)], flops_per_second=0)
    with pytest.raises(ValueError, match="`max_tokens_per_batch` must hold the longest pair"):
        estimate_run(model, arguments, [(50, 60)], max_tokens_per_batch=100)


def test_a_model_on_the_meta_device_takes_no_memory():
    model = meta_model(MetaphraseConfig.from_preset("t5-11b"))
    assert isinstance(model, MetaphraseForConditionalGeneration)
    assert all(parameter.is_meta for parameter in model.parameters())


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
