"""Bytes of weights, gradients and optimizer on one device, whole or shared among devices. Any model of transformers will do."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate.utils import DeepSpeedPlugin, parse_flag_from_env
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from metaphrase.training.planning.activations import FLOAT32_BYTES, ActivationEstimate, Precision

# Float32 numbers, and 8-bit numbers with a scale per block, that an optimizer keeps for each weight.
FULL_STATES = {
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), 3),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), 2),
    **dict.fromkeys(("adamw_anyprecision", "paged_adamw_32bit", "stable_adamw"), 2),
    **dict.fromkeys(("schedule_free_adamw", "schedule_free_radam"), 2),
    **dict.fromkeys(("adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit"), 1),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "schedule_free_sgd"), 1),
    **dict.fromkeys(("sgd", "lomo"), 0),
}
BYTE_STATES = {
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), 3),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), 2),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), 1),
}
# bitsandbytes keeps small weights and embeddings in float32.
_BLOCK, _MIN_BYTE_ENTRIES = 256, 4096
_ASSUMED = "adamw_torch"


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights by part. A tied weight counts once, in the first of embeddings, encoder, decoder and head."""

    total: int
    trainable: int
    embeddings: int
    encoder: int
    decoder: int
    head: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ParameterCounts":
        """Count the weights of an encoder-decoder."""
        counted: set[int] = set()

        def count(parameters: Iterable[nn.Parameter]) -> int:
            fresh = {id(parameter): parameter.numel() for parameter in parameters if id(parameter) not in counted}
            counted.update(fresh)
            return sum(fresh.values())

        # The table of a relative position bias is an embedding too, but its width is the number of heads.
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
        embeddings = count(table.weight for table in tables if table.embedding_dim == model.config.hidden_size)
        encoder = count(model.get_encoder().parameters())
        decoder = count(model.get_decoder().parameters())
        head = count(model.parameters())
        total = embeddings + encoder + decoder + head
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return cls(total, trainable, embeddings, encoder, decoder, head)


@dataclass(frozen=True)
class Sharding:
    """Distribution of weights, gradients and optimizer among the devices that train one model.

    Source: the stages of Rajbhandari et al. 2020, section 5, arXiv 1910.02054.

    Attributes:
        devices: Number of devices.
        stage: 0 shares nothing, 1 the optimizer, 2 the gradients too, 3 the weights too.
        engine: `ddp`, `fsdp` or `deepspeed`; their buffers differ.
        is_offloaded: True if the optimizer's share is in host memory.
        bucket_entries: DeepSpeed's `reduce_bucket_size`.
    """

    devices: int = 1
    stage: int = 0
    engine: str = "ddp"
    is_offloaded: bool = False
    bucket_entries: int = 0

    @classmethod
    def of(cls, arguments: TrainingArguments, devices: int | None = None) -> "Sharding":
        """Read the training arguments and the environment of `accelerate launch`.

        Args:
            arguments: Training arguments.
            devices: Number of devices to plan for; those of this run by default.
        """
        devices = arguments.world_size if devices is None else devices
        if (zero := _zero_settings(arguments)) is not None:
            offload = (zero.get("offload_optimizer") or {}).get("device", "none")
            bucket = zero.get("reduce_bucket_size", 5 * 10**8)
            bucket = bucket if isinstance(bucket, int | float) else 0
            return cls(devices, int(zero.get("stage", 0)), "deepspeed", offload not in (None, "none"), int(bucket))
        if arguments.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
            plugin = arguments.fsdp_plugin_args or {}
            reshards = plugin.get("reshard_after_forward", os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"))
            offloads = plugin.get("cpu_offload", parse_flag_from_env("FSDP_OFFLOAD_PARAMS"))
            stage = 2 if str(reshards).lower() in ("false", "shard_grad_op", "2") else 3
            return cls(devices, stage, "fsdp", bool(offloads))
        return cls(devices)

    def __str__(self) -> str:
        if self.devices == 1:
            return "one device"
        shared = ("nothing", "optimizer", "optimizer and gradients", "optimizer, gradients and weights")[self.stage]
        return f"{self.devices} devices by {self.engine}, sharing {shared}"


def _zero_settings(arguments: TrainingArguments) -> dict | None:
    if arguments.deepspeed:
        return dict(arguments.hf_deepspeed_config.config.get("zero_optimization", {}))
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return None
    return dict(DeepSpeedPlugin().deepspeed_config.get("zero_optimization", {}))


def optimizer_bytes(model: PreTrainedModel, optim: str, optim_args: str | None = None) -> tuple[int, str | None]:
    """Return the bytes of an optimizer's state for all trained weights, and a remark if another optimizer was assumed.

    Args:
        model: The model.
        optim: Name of the optimizer in the training arguments.
        optim_args: Its options there, `name=value,...`. Momentum is one more number per weight.
    """
    optim = getattr(optim, "value", optim)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optim in ("adafactor", "adalomo"):
        return sum(_factored_bytes(weight.shape) for weight in weights), None
    if optim in BYTE_STATES:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        sizes = [(weight.numel(), id(weight) in embeddings) for weight in weights]
        total = sum(
            FLOAT32_BYTES * size
            if is_embedding or size < _MIN_BYTE_ENTRIES
            else size + FLOAT32_BYTES * -(-size // _BLOCK)
            for size, is_embedding in sizes
        )
        return BYTE_STATES[optim] * total, None
    remark = None
    if optim not in FULL_STATES:
        remark = f"The state of the optimizer {optim} is not known: it is counted as that of {_ASSUMED}."
    states = FULL_STATES.get(optim, FULL_STATES[_ASSUMED])
    options = dict(option.split("=") for option in (optim_args or "").replace(" ", "").split(",") if "=" in option)
    states += optim in ("sgd", "rmsprop") and float(options.get("momentum", 0)) > 0
    return states * FLOAT32_BYTES * sum(weight.numel() for weight in weights), remark


def _factored_bytes(shape: torch.Size) -> int:
    """Return the bytes of Adafactor's means of rows and columns (Shazeer and Stern 2018, section 3, arXiv 1804.04235)."""
    entries = shape.numel()
    return FLOAT32_BYTES * (entries // shape[-1] + entries // shape[-2] if len(shape) > 1 else entries)


def unit_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of weights of the largest layer that is gathered as one, and of everything outside layers."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return max(sizes, default=0), sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one device that do not depend on the batch.

    Attributes:
        weights: Share of the weights, in the precision in which they are updated.
        cast_weights: Copies of weights that autocast makes in half precision.
        gathered_weights: Weights of other devices, gathered for the computation.
        gradients: Share of the gradients.
        buffers: Gradients in transfer between devices.
        optimizer: Share of the optimizer's state.
        gradients_persist: True if gradients stay while the next batch is computed.
    """

    weights: int
    cast_weights: int
    gathered_weights: int
    gradients: int
    buffers: int
    optimizer: int
    gradients_persist: bool

    def peak(self, activations: ActivationEstimate | None) -> int:
        """Return the maximum bytes at a time, with activations if they are known."""
        fixed = self.weights + self.gathered_weights + self.buffers + self.optimizer
        if activations is None:
            return fixed + self.gradients + self.cast_weights
        return fixed + activations.peak(self.gradients, self.gradients_persist, self.cast_weights)


def estimate_states(
    model: PreTrainedModel,
    optimizer: int,
    precision: Precision,
    sharding: Sharding,
    accumulates: bool = False,
) -> StateMemory:
    """Estimate the bytes of weights, gradients and optimizer on one device.

    Args:
        model: The model.
        optimizer: Bytes of the optimizer's whole state.
        precision: Precision of the step.
        sharding: Distribution among devices.
        accumulates: True if gradients of several batches are added up.
    """
    devices, stage = sharding.devices, sharding.stage

    def share(size: int, first_stage: int) -> int:
        return -(-size // devices) if stage >= first_stage else size

    parameters = list(model.parameters())
    trained_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    weights, trained = (sum(p.numel() * p.element_size() for p in group) for group in (parameters, trained_parameters))
    is_deepspeed = sharding.engine == "deepspeed"
    if is_deepspeed and precision.compute_bytes < FLOAT32_BYTES:
        # Weights and gradients are in half precision. The optimizer holds the float32 weights that it updates.
        optimizer += trained
        weights, trained = (size * precision.compute_bytes // FLOAT32_BYTES for size in (weights, trained))
    gathered, buffers = _traffic(model, precision, sharding, trained)
    is_away = sharding.is_offloaded and sharding.engine == "fsdp"
    return StateMemory(
        weights=0 if is_away else share(weights, 3),
        cast_weights=_cast_bytes(model, precision) if sharding.engine == "ddp" else 0,
        gathered_weights=gathered,
        gradients=0 if is_away else share(trained, 2),
        buffers=buffers,
        optimizer=0 if sharding.is_offloaded else share(optimizer, 1),
        gradients_persist=accumulates or is_deepspeed,
    )


def _traffic(model: PreTrainedModel, precision: Precision, sharding: Sharding, trained: int) -> tuple[int, int]:
    """Return the bytes of gathered weights, and of gradients in transfer between devices."""
    element, entries = precision.compute_bytes, sum(parameter.numel() for parameter in model.parameters())
    if sharding.devices == 1:
        return 0, 0
    if sharding.engine == "ddp":
        return 0, trained
    layer, rest = unit_sizes(model)
    # The next layer is gathered during the computation of one. Weights outside layers stay.
    units = element * min(2 * layer + rest, entries)
    if sharding.engine == "fsdp":
        return (units, units) if sharding.stage == 3 else (element * entries, element * entries)
    return units if sharding.stage == 3 else 0, 2 * element * min(sharding.bucket_entries, entries)


def _cast_bytes(model: PreTrainedModel, precision: Precision) -> int:
    """Return the bytes of weights that autocast converts: all projections but the last, which the loss converts itself."""
    if not precision.casts:
        return 0
    head = model.get_output_embeddings()
    projections = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return precision.compute_bytes * sum(projection.weight.numel() for projection in projections)
