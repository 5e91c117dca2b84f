"""Memory of sharded models, against FSDP2 in a pretended group of processes and against the formulas of ZeRO."""

from collections import Counter

import pytest
import torch
from estimated_runs import arguments_of, meta_model
from tiny_models import tiny_config
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from metaphrase.choices.estimate import estimate_run
from metaphrase.choices.memory import Precision, Sharding, estimate_states, optimizer_bytes
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

# Kinds of the tracker: whole weights and gradients, and what is on its way.
GATHERED = ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter")
HALF = Precision(compute_bytes=2, stream_bytes=2, on_accelerator=True)


@pytest.fixture
def mesh(request):
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield init_device_mesh("cpu", (request.param,))
    distributed.destroy_process_group()


def shard(model, mesh, reshards=True):
    """The units of accelerate under `keep_embeddings_together`, in bfloat16."""
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(*[torch.bfloat16] * 3)}
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, reshard_after_forward=reshards, **options)
    fully_shard(model, **options)


@pytest.mark.parametrize("mesh", [1, 8, 64], indirect=True)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("preset", ["transformer-base", "t5-3b"])
def test_a_device_holds_what_fsdp_leaves_it(preset, is_tied, mesh, tmp_path):
    model = meta_model(MetaphraseConfig.from_preset(preset, tie_word_embeddings=is_tied))
    optimizer, _ = optimizer_bytes(model, arguments_of(tmp_path))
    estimated = estimate_states(model, optimizer, HALF, Sharding(mesh.size(), 3, "fsdp"))
    shard(model, mesh)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    gradients = [weight.grad for weight in weights]
    moments = [state[f"exp_avg{end}"] for state in optimizer.state.values() for end in ("", "_sq")]
    sizes = estimated.weights, estimated.gradients, estimated.optimizer
    # Devices hold whole rows, and the first ones most.
    for size, tensors in zip(sizes, (weights, gradients, moments), strict=True):
        held = sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)
        assert size <= held <= 1.01 * size


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [(1, {}), (8, {}), (8, {"gradient_accumulation_steps": 2}), (8, {"fsdp_config": {"reshard_after_forward": False}})],
    ids=["one device", "shared", "accumulated", "not resharded"],
    indirect=["mesh"],
)
def test_a_step_gathers_no_more_than_is_estimated(mesh, fields, tmp_path):
    config = tiny_config(vocab_size=500, hidden_size=64, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=256)
    options = {"devices": mesh.size(), "on_accelerator": True}
    arguments = arguments_of(tmp_path, bf16=True, fsdp=True, **fields)
    state = estimate_run(meta_model(config), arguments, [(4, 4)] * 64, **options).state
    most = Counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = MetaphraseForConditionalGeneration(config)
        shard(model, mesh, reshards="fsdp_config" not in fields)
        is_whole = "gradient_accumulation_steps" in fields
        tracker = FSDPMemTracker(model)
        update = tracker._update_peak_stats

        def count(kind):
            update(kind)
            sizes = tracker.get_tracker_snapshot()[torch.device("cpu")]
            named = Counter({getattr(name, "value", name): size for name, size in sizes.items()})
            gathered = sum(named[name] for name in GATHERED)
            states = gathered + named["Sharded Param"] + named["Sharded Grad"]
            most.update(
                {name: max(0, size - most[name]) for name, size in (("gathered", gathered), ("states", states))}
            )

        tracker._update_peak_stats = count
        model.set_requires_gradient_sync(not is_whole)
        ids = torch.zeros(2, 4, dtype=torch.long)
        with tracker:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gathered = state.gathered_weights + state.buffers
    held = state.weights + (0 if is_whole else state.gradients)
    assert 0.5 * gathered <= most["gathered"] <= gathered
    assert 0.7 * (held + gathered) < most["states"] <= held + gathered


@pytest.mark.parametrize("devices", [8, 64])
def test_zero_shares_as_its_paper_says(devices, tmp_path):
    model = meta_model(MetaphraseConfig.from_preset("transformer-base"))
    optimizer, _ = optimizer_bytes(model, arguments_of(tmp_path))
    # Rajbhandari et al. 2020, section 5: 2 bytes of weights, 2 of gradients, 12 of float32 weights and Adam's states.
    share = 1 / devices
    for stage, per_weight in enumerate((16, 4 + 12 * share, 2 + 14 * share, 16 * share)):
        state = estimate_states(model, optimizer, HALF, Sharding(devices, stage, "deepspeed"))
        held = state.weights + state.gradients + state.optimizer
        assert held == pytest.approx(per_weight * model.num_parameters(), rel=1e-6), stage
