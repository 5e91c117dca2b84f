"""The estimate of the activations, against what autograd keeps and what is alive at a time."""

import pytest
import torch
from estimated_runs import AUTOCAST, DESIGNS, FLOAT32, batch_and_shape, training_model
from live_bytes import LiveBytes

from metaphrase.training.planning.memory import estimate_activations
from metaphrase.training.trainer import repeat_batch


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


EAGER = {"attn_implementation": "eager", "attention_dropout": 0.1}
NARROW = ("recommended", "vaswani", "t5", "alibi", "bart", "every dropout")


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("fields", "precision", "tolerance"),
    [
        *(pytest.param(fields, FLOAT32, 0.03, id=name) for name, fields in DESIGNS.items()),
        *(pytest.param(DESIGNS[name], AUTOCAST, 0.05, id=f"{name}, autocast") for name in NARROW),
        pytest.param(EAGER, FLOAT32, 0.1, id="scores that are written out"),
    ],
)
def test_activations_are_what_autograd_keeps(fields, precision, tolerance, is_packed):
    model = training_model(**fields)
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape, precision).kept
    assert estimated == pytest.approx(kept_bytes(model, batch, is_autocast=precision is AUTOCAST), rel=tolerance)


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


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_r_drop_keeps_the_activations_of_both_passes(is_packed):
    model = training_model(dropout=0.1)
    batch, shape = batch_and_shape(is_packed)
    estimated = estimate_activations(model.config, shape.repeated(2), FLOAT32).kept
    assert estimated == pytest.approx(kept_bytes(model, repeat_batch(batch), r_drop_alpha=5.0), rel=0.03)
