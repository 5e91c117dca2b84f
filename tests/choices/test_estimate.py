import weakref

import numpy as np
import pytest
import torch
from estimated_runs import AUTOCAST, DESIGNS, FLOAT32, WIDTHS, arguments_of, batch_and_shape, meta_model, training_model
from small_experiments import make_recipe
from small_trainers import with_lengths
from tiny_generator import save_generator, tiny_generator
from tiny_models import tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metaphrase.choices.estimate import dry_run, estimate_run
from metaphrase.choices.memory import BatchShape, Precision, StateMemory, estimate_activations, optimizer_bytes
from metaphrase.data.collators import PairCollator
from metaphrase.data.token_budget import TokenBudgetSampler
from metaphrase.training.experiment import Experiment
from metaphrase.training.trainer import MetaphraseTrainer
from metaphrase.training.training_loss import TrainingLoss

pytestmark = pytest.mark.usefixtures("same_environment")


def lengths_of_pairs():
    return np.random.default_rng(0).integers(2, 20, (50, 2))


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
    pairs = with_lengths([{"input_ids": [5] * source, "labels": [6] * target} for source, target in lengths.tolist()])
    parts = {"train_dataset": pairs, "data_collator": PairCollator(0), "max_tokens_per_batch": budget}
    trainer = MetaphraseTrainer(model=model, args=arguments, **parts)
    assert estimate.batches_per_epoch == len(trainer.get_train_dataloader())
    trainer.train()
    assert estimate.steps == trainer.state.global_step


def test_padding_and_tokens_are_counted(tmp_path):
    lengths, arguments = lengths_of_pairs(), arguments_of(tmp_path, train_sampling_strategy="group_by_length")
    model = meta_model(tiny_config())
    data = estimate_run(model, arguments, lengths)
    assert (data.pairs, data.source_tokens, data.target_tokens) == (50, *lengths.sum(axis=0))
    assert 0 < data.padding_share < 0.5
    many = np.tile(lengths, (20, 1))
    shuffled, grouped = (estimate_run(model, each, many) for each in (arguments_of(tmp_path), arguments))
    assert shuffled.padding_share > 1.5 * grouped.padding_share
    assert estimate_run(model, arguments, lengths, max_tokens_per_batch=100).padding_share == 0
    # A model that reads no packed rows pays for the padding of the same batches.
    model.supports_packing = False
    padded = estimate_run(model, arguments, lengths, max_tokens_per_batch=100)
    batches = [lengths[batch] for batch in TokenBudgetSampler(lengths, 100, arguments.seed)]
    computed = sum(len(batch) * batch.max(axis=0).sum() for batch in batches)
    assert padded.padding_share == pytest.approx(1 - lengths.sum() / computed)


def test_largest_batch_decides_the_memory(tmp_path):
    lengths = np.array([(4, 4)] * 80 + [(60, 60)] * 8)
    arguments = arguments_of(tmp_path, train_sampling_strategy="group_by_length")
    estimate = estimate_run(meta_model(tiny_config(**WIDTHS)), arguments, lengths)
    shape = BatchShape.of([60] * 8, [60] * 8, is_packed=False)
    assert estimate.largest_batch == shape
    expected, checkpointed = (estimate_activations(tiny_config(**WIDTHS), shape, FLOAT32, on) for on in (False, True))
    assert estimate.activations == expected
    weights = 4 * estimate.parameters
    state = StateMemory(weights, 0, 0, gradients=weights, buffers=0, optimizer=2 * weights, gradients_persist=False)
    assert estimate.peak == state.peak(expected) and estimate.other_peak == state.peak(checkpointed)


def test_r_drop_takes_twice_the_time_and_memory(tmp_path):
    model, arguments, lengths = meta_model(tiny_config()), arguments_of(tmp_path), [(4, 4), (5, 3)]
    options = [{"r_drop_start_step": start, "tokens_per_second": 1.0} for start in (None, 0, 2)]
    plain, twice, last = (estimate_run(model, arguments, lengths, **each) for each in options)
    assert plain.steps == twice.steps == 3
    assert (twice.hours, last.hours) == pytest.approx((2 * plain.hours, plain.hours * 4 / 3))
    assert twice.largest_batch == BatchShape.of(2 * [4, 5], 2 * [4, 3], plain.largest_batch.is_packed)
    assert last.peak == twice.peak > plain.peak
    assert any("R-Drop" in note for note in twice.notes) and not any("R-Drop" in note for note in plain.notes)


def test_arguments_decide_precision_and_checkpoints(tmp_path):
    model, lengths = meta_model(tiny_config()), [(4, 4)]
    assert estimate_run(model, arguments_of(tmp_path), lengths).precision == FLOAT32
    half = estimate_run(model, arguments_of(tmp_path, bf16=True), lengths)
    assert half.precision == AUTOCAST and half.state.cast_weights > 0
    again = estimate_run(model, arguments_of(tmp_path, gradient_checkpointing=True), lengths)
    assert again.activations.is_checkpointed and not half.activations.is_checkpointed
    arguments = arguments_of(tmp_path, bf16=True, fsdp=True)
    shared = estimate_run(model, arguments, lengths * 8, devices=8, on_accelerator=True)
    assert shared.precision == Precision(2, 2, True) and shared.state.cast_weights == 0
    arguments = arguments_of(tmp_path, fsdp=True, gradient_accumulation_steps=2)
    whole = estimate_run(model, arguments, lengths * 8, devices=8)
    assert whole.state.buffers == 4 * model.num_parameters() and not whole.state.gradients_persist
    assert any("FSDP on accel" in note for note in whole.notes)


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens_per_batch": 300, "gradient_checkpointing": "true", "bf16": "true"}]
)
def test_parameters_steps_and_time_are_told_and_nothing_is_written(data, tmp_path, fields):
    recipe = make_recipe(data, tmp_path / "run", max_steps=None, num_train_epochs=3, **fields)
    estimate = dry_run(Experiment(recipe))
    assert not (tmp_path / "run").exists()
    text = str(estimate)
    assert "unknown" not in text and "time" in text
    assert estimate.parameters == Experiment(recipe).make_model().num_parameters()


@pytest.mark.parametrize("technique", [{"freeze": ["encoder"]}, {"lora_rank": 4}])
def test_only_what_is_trained_has_gradients_and_states(data, tmp_path, technique):
    if "lora_rank" in technique:
        pytest.importorskip("peft")
    fields = {"model_name_or_path": save_generator(tiny_generator(), tmp_path / "base")}
    whole, adapted = (Experiment(make_recipe(data, tmp_path / "run", **fields, **more)) for more in ({}, technique))
    whole, part, model = dry_run(whole), dry_run(adapted), adapted.make_model()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert part.trained_parameters == trained < whole.trained_parameters
    assert (part.state.gradients, part.state.optimizer) == (4 * trained, 8 * trained)


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of live storages made by operations: `now`, and at the peak `most`."""

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
        loss = model(**batch, loss_of_states=TrainingLoss(), **options).loss
    assert loss.requires_grad
    return sum(sizes.values())


NARROW = ("recommended", "vaswani", "alibi", "bart", "windows")


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("fields", "precision", "tolerance"),
    [
        *(pytest.param(fields, FLOAT32, 0.03, id=name) for name, fields in DESIGNS.items()),
        *(pytest.param(DESIGNS[name], AUTOCAST, 0.05, id=f"{name}, autocast") for name in NARROW),
    ],
)
def test_activations_are_what_autograd_keeps(fields, precision, tolerance, is_packed):
    model = training_model(**fields)
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape, precision).kept_bytes
    assert estimated == pytest.approx(kept_bytes(model, batch, is_autocast=precision is AUTOCAST), rel=tolerance)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "fields",
    [{}, DESIGNS["vaswani"], {"vocab_size": 4000}, DESIGNS["wide"], DESIGNS["windows"]],
    ids=["recommended", "vaswani", "vocabulary", "wide", "windows"],
)
def test_peak_of_a_step_is_what_is_alive_at_a_time(fields, is_packed, is_checkpointed):
    model = training_model(**fields)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    batch, shape = batch_and_shape(is_packed, pairs=16)
    with LiveBytes(tensors_of(model, batch)) as live:
        model(**batch, loss_of_states=TrainingLoss(), use_cache=False).loss.backward()
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    activations = estimate_activations(model.config, shape, FLOAT32, is_checkpointed)
    estimated = StateMemory(0, 0, 0, gradients, 0, 0, gradients_persist=False).peak(activations)
    assert estimated == pytest.approx(live.most, rel=0.2)


@pytest.mark.parametrize(
    ("optim", "optim_args", "expected"),
    [
        *((name, None, size) for name, size in (("adamw_torch_fused", 8), ("adagrad", 4), ("adamw_bnb_8bit", 2))),
        *(("apollo_adamw", None, 8), ("sgd", None, 0), ("sgd", "momentum=0.9", 4)),
    ],
)
def test_an_optimizer_has_the_bytes_of_its_state(optim, optim_args, expected, tmp_path):
    model, arguments = training_model(), arguments_of(tmp_path, optim=optim, optim_args=optim_args)
    estimated, remark = optimizer_bytes(model, arguments)
    assert estimated == expected * model.num_parameters()
    # The package of this one is not installed.
    assert (remark is not None) is (optim == "apollo_adamw")
    factored, _ = optimizer_bytes(model, arguments_of(tmp_path, optim="adafactor"))
    assert 0 < factored < 0.1 * model.num_parameters()
