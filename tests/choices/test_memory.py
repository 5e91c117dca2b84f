import weakref

import pytest
import torch
from estimated_runs import AUTOCAST, DESIGNS, FLOAT32, arguments_of, batch_and_shape, training_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metaphrase.choices.memory import Sharding, estimate_activations, estimate_states, optimizer_bytes
from metaphrase.training.training_loss import TrainingLoss

pytestmark = pytest.mark.usefixtures("same_environment")


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
    estimated = estimate_activations(model.config, shape, FLOAT32, is_checkpointed).peak(gradients)
    assert estimated == pytest.approx(live.most, rel=0.2)


def test_frozen_weights_have_no_gradients(tmp_path):
    model = training_model()
    model.model.encoder.requires_grad_(False)
    total, trained = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or not is_trained) for is_trained in (False, True)
    )
    optimizer, _ = optimizer_bytes(model, arguments_of(tmp_path, optim="adamw_torch"))
    state = estimate_states(model, optimizer, FLOAT32, Sharding())
    assert 0 < trained < total
    assert (state.weights, state.gradients, state.optimizer) == (4 * total, 4 * trained, 8 * trained)


@pytest.mark.parametrize(
    ("optim", "optim_args", "expected"),
    [
        ("adamw_torch_fused", None, 8),
        ("adagrad", None, 4),
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 4),
        ("adamw_bnb_8bit", None, 2),
        ("apollo_adamw", None, 8),
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
