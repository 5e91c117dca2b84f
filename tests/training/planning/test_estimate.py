"""The estimate of a run as a whole: its steps, its data and its largest batch, against those of the trainer."""

import dataclasses

import datasets
import numpy as np
import pytest
import torch
from estimated_runs import AUTOCAST, FLOAT32, WIDTHS, arguments_of
from tiny_models import tiny_config, tiny_model
from transformers import T5Config
from transformers import T5ForConditionalGeneration as T5

from metaphrase.data.collators import PairCollator
from metaphrase.data.token_budget import TokenBudgetSampler
from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.planning.batches import BatchShape
from metaphrase.training.planning.estimate import estimate_run, meta_model
from metaphrase.training.planning.memory import Precision, estimate_activations
from metaphrase.training.trainer import MetaphraseTrainer

pytestmark = pytest.mark.usefixtures("same_environment")


def lengths_of_pairs(count=50):
    generator = np.random.default_rng(0)
    return generator.integers(2, 20, (count, 2))


def trainer_of(model, arguments, lengths, budget, pad_to_multiple_of=1):
    rows = [
        {"input_ids": [5] * source, "labels": [6] * target, "source_length": source, "target_length": target}
        for source, target in lengths.tolist()
    ]
    return MetaphraseTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=PairCollator(0, pad_to_multiple_of),
        max_tokens_per_batch=budget,
    )


DROPPED = {"num_train_epochs": 2, "dataloader_drop_last": True}


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        *((budget, {"num_train_epochs": 2.5, "gradient_accumulation_steps": 3}) for budget in (None, 100)),
        *((budget, {"max_steps": 4}) for budget in (None, 100)),
        *((None, DROPPED | {"train_sampling_strategy": strategy}) for strategy in ("random", "group_by_length")),
    ],
)
def test_steps_are_those_of_the_trainer(budget, options, tmp_path):
    lengths = lengths_of_pairs()
    arguments = arguments_of(tmp_path, per_device_train_batch_size=6, **options)
    model = tiny_model()
    estimate = estimate_run(model, arguments, lengths, max_tokens_per_batch=budget)
    trainer = trainer_of(model, arguments, lengths, budget)
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


@pytest.mark.parametrize("budget", [None, 100])
def test_widths_that_a_collator_rounds_up_are_counted_so(budget, tmp_path):
    lengths, arguments = lengths_of_pairs(), arguments_of(tmp_path, per_device_train_batch_size=6)
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    options = {"max_tokens_per_batch": budget, "pad_to_multiple_of": 8}
    estimate = estimate_run(T5(T5Config(**sizes)), arguments, lengths, **options)
    model = T5(T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0))
    trainer = trainer_of(model, arguments, lengths, budget, pad_to_multiple_of=8)
    batches = list(trainer.get_train_dataloader())
    cells = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
    assert estimate.data.batches_per_epoch == len(batches)
    assert estimate.data.source_tokens + estimate.data.target_tokens == lengths.sum()
    if budget is not None:
        assert estimate.data.padding_share == pytest.approx(1 - lengths.sum() / cells)
    # Packed pairs have no width.
    packed = [
        estimate_run(tiny_model(), arguments, lengths, max_tokens_per_batch=100, pad_to_multiple_of=multiple).data
        for multiple in (1, 8)
    ]
    assert packed[0] == packed[1]


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
    expected, checkpointed = (
        estimate_activations(tiny_config(**WIDTHS), shape, FLOAT32, is_checkpointed)
        for is_checkpointed in (False, True)
    )
    assert estimate.activations == expected
    weights = 4 * estimate.parameters.total
    assert estimate.peak == 3 * weights + expected.peak(weights)
    assert estimate.other_peak == 3 * weights + checkpointed.peak(weights)


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
    assert any("FSDP on accel" in note for note in estimate_run(model, arguments, lengths * 8, devices=8).notes)
    # What else a process takes is known for a CPU.
    assert any("heap" in note for note in half.notes) and not any("heap" in note for note in shared.notes)


def test_table_and_values_say_the_same(tmp_path):
    model = meta_model(MetaphraseConfig.from_preset("t5-11b"))
    arguments = arguments_of(tmp_path, bf16=True, fsdp=True, gradient_checkpointing=True, max_steps=10)
    options = {"max_tokens_per_batch": 16384, "devices": 8, "on_accelerator": True, "flops_per_second": 1e14}
    estimate = estimate_run(model, arguments, [(128, 128)] * 512, **options)
    text, values = str(estimate), dataclasses.asdict(estimate)
    assert "11,307,321,344" in text and values["parameters"]["total"] == 11_307_321_344
    assert f"{values['peak'] / 2**30:.2f} GiB" in text and f"{values['state']['optimizer'] / 2**30:.2f} GiB" in text
    assert f"{values['activations']['terms']['embeddings'] / 2**20:.1f} MiB" in text
    assert "8 devices by fsdp, sharing optimizer, gradients and weights" in text
    batch = estimate.largest_batch
    assert batch.tokens <= 16384
    assert f"{batch.pairs} pairs, {batch.source_tokens:,} source and {batch.target_tokens:,} target tokens" in text
    assert values["data"]["steps"] == 10 and f"10, {values['data']['steps_per_epoch']} for each epoch" in text
    assert f"{estimate.hours * 60:.1f} minutes" in text


def test_activations_of_other_families_are_unknown(tmp_path):
    with torch.device("meta"):
        model = T5(T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=2))
    estimate = estimate_run(model, arguments_of(tmp_path), lengths_of_pairs(), max_tokens_per_batch=100)
    assert estimate.activations is None and estimate.other_peak is None
    assert estimate.peak == 16 * model.num_parameters()
    assert any("not for t5" in note for note in estimate.notes) and "and activations" in str(estimate)
