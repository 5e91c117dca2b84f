"""Bytes of a training step on one device: activations by part of the network, and weights, gradients and optimizer.

Each part of the network keeps a number of bytes per token or per attention score. A tensor that two parts keep counts once, where
it is made. Weights, gradients and optimizer may be shared among devices, and are counted for any model of transformers.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from accelerate.utils import DeepSpeedPlugin, parse_flag_from_env
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.activations import ACT2FN

from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.loss import chunk_rows
from metaphrase.ops.grid_attention import MAX_KEPT_BYTES, MIN_HALF_WIDTH
from metaphrase.training.planning.batches import BatchShape

FLOAT32_BYTES, MASK_BYTES, INDEX_BYTES = 4, 1, 8


@dataclass(frozen=True)
class Precision:
    """Precision and device of a step.

    Attributes:
        compute_bytes: Bytes of an entry in matrix products.
        stream_bytes: Bytes of an entry of the residual stream. If it is wider than `compute_bytes`, as under autocast, a narrow
            copy of the inputs of projections is kept too.
        on_accelerator: True if an accelerator's fused kernels compute the step.
    """

    compute_bytes: int = FLOAT32_BYTES
    stream_bytes: int = FLOAT32_BYTES
    on_accelerator: bool = False

    @property
    def casts(self) -> bool:
        return self.stream_bytes != self.compute_bytes


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of one step beside weights, gradients and optimizer.

    Attributes:
        terms: Bytes kept from the forward to the backward pass, by part.
        loss_workspace: Further bytes of the loss, while all terms are there.
        backward_workspace: Maximum bytes of the backward pass of one layer; with checkpoints, the layer itself too.
        is_checkpointed: True if layers are computed again in the backward pass.
    """

    terms: dict[str, int]
    loss_workspace: int
    backward_workspace: int
    is_checkpointed: bool

    @property
    def kept(self) -> int:
        return sum(self.terms.values())

    def peak(self, gradients: int = 0, gradients_persist: bool = False, cast_weights: int = 0) -> int:
        """Return the maximum bytes at a time.

        Args:
            gradients: Bytes of the weights' gradients, which appear while activations are freed.
            gradients_persist: True if they exist from the start, as when they are accumulated.
            cast_weights: Bytes of weights that autocast converts. Layers that are computed again free them.
        """
        first = self.kept + gradients * gradients_persist
        backward = max(first, gradients) + self.backward_workspace + (0 if self.is_checkpointed else cast_weights)
        return max(first + self.loss_workspace + cast_weights, backward)


@lru_cache
def kept_by_activation(name: str) -> tuple[int, bool]:
    """Return how many tensors of its input's size an activation function keeps, and True if its output is kept too.

    The function is applied to a few numbers, so that the answer holds for all functions of transformers.
    """
    states, saved = torch.linspace(-1, 1, 1024, requires_grad=True), {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        # The product has a storage of its own, like the output of a projection.
        output = ACT2FN[name](states * 1.0)
    full = {pointer for pointer, tensor in saved.items() if tensor.numel() >= states.numel()}
    pointer = output.untyped_storage().data_ptr()
    return len(full - {pointer}), pointer in full


class _Side(NamedTuple):
    """Sizes of the encoder with its sources, or of the decoder with its targets."""

    name: str
    tokens: int
    layers: int
    heads: int
    inner: int


@dataclass(frozen=True)
class _Counter:
    """Bytes kept by each part of a network for one batch."""

    config: MetaphraseConfig
    shape: BatchShape
    precision: Precision

    @cached_property
    def sides(self) -> tuple[_Side, _Side]:
        return tuple(
            _Side(
                side,
                getattr(self.shape, f"{side}_tokens"),
                *(getattr(self.config, f"{stack}_{name}") for name in ("layers", "attention_heads", "ffn_dim")),
            )
            for side, stack in (("source", "encoder"), ("target", "decoder"))
        )

    def _norm(self, width: int, rows: int = 1) -> int:
        """Return the bytes of a norm per token: input and statistics, in float32. Its output counts where it is read."""
        is_rms = self.config.norm_type == "rmsnorm"
        # Without a fused kernel, RMSNorm also keeps the normed states before the weight.
        tensors = 2 if is_rms and not self.precision.on_accelerator else 1
        return FLOAT32_BYTES * rows * (tensors * width + (1 if is_rms else 2))

    def _dropout(self) -> int:
        return MASK_BYTES * self.config.hidden_size if self.config.dropout else 0

    def _is_written_out(self, is_self: bool) -> bool:
        """Return True if `sdpa` uses plain products in float32: a CPU's kernel has no dropout and no trained bias."""
        config = self.config
        if self.precision.on_accelerator or self.shape.is_packed or config._attn_implementation not in (None, "sdpa"):
            return False
        return config.attention_dropout > 0 or (is_self and config.position_embedding_type == "relative")

    def _attention(self, heads: int, is_self: bool) -> tuple[int, int]:
        """Return the bytes of an attention per query token and per key token, without the scores."""
        config, element, is_packed = self.config, self.precision.compute_bytes, self.shape.is_packed
        head_dim, key_heads = config.get_head_dim(heads), config.num_key_value_heads or heads
        is_written_out = self._is_written_out(is_self)
        kernel_element = FLOAT32_BYTES if is_written_out else element
        # Input of the projections, query, and input of the output projection.
        query = element * (config.hidden_size + heads * head_dim) + kernel_element * heads * head_dim
        # Only kernels for padded rows share keys among query heads.
        key = kernel_element * 2 * (heads if is_packed or is_written_out else key_heads) * head_dim
        if not is_written_out:
            query += FLOAT32_BYTES * heads  # the logarithm of the sum of each softmax
        # Some outputs are kept in the kernel's order, and once more by token.
        if config.qk_norm:
            query += self._norm(head_dim, heads)
            key += self._norm(head_dim, key_heads)
            query += element * heads * head_dim * (not is_packed and not is_written_out)
        if is_packed and self.precision.on_accelerator:
            has_bias = config.position_embedding_type in ("relative", "alibi")
            # The grid kernel: others have no dropout, or no float32.
            is_grid = config.attention_dropout > 0 or (element == FLOAT32_BYTES and not has_bias)
            query += element * heads * head_dim * is_grid
        return query, key

    def _scores(self, heads: int, queries: str, keys: str) -> int:
        """Return the bytes of all attention scores between two sides, `source` or `target`."""
        config, shape, element = self.config, self.shape, self.precision.compute_bytes
        is_self, is_eager = queries == keys, config._attn_implementation == "eager"
        scores = heads * getattr(shape, f"{keys if is_self else 'cross'}_scores")
        if shape.is_packed and is_eager:
            # In the reference for packed rows, every token attends to every other.
            scores = heads * getattr(shape, f"{queries}_tokens") * getattr(shape, f"{keys}_tokens")
        drops = config.attention_dropout > 0
        if is_eager:
            cast = element if self.precision.casts else 0
            return scores * (FLOAT32_BYTES + cast + (MASK_BYTES + element) * drops)
        if self.precision.on_accelerator:
            return 0
        if shape.is_packed:
            entry = element if shape.width(keys) >= MIN_HALF_WIDTH else FLOAT32_BYTES
            # Larger scores are computed again.
            return scores * ((entry if entry * scores <= MAX_KEPT_BYTES else 0) + MASK_BYTES * drops)
        return scores * FLOAT32_BYTES * (1 + 2 * drops) if self._is_written_out(is_self) else 0

    def _feed_forward(self, inner: int) -> int:
        """Return the bytes of a feed-forward per token."""
        config = self.config
        inputs, keeps_output = kept_by_activation(config.activation_function)
        drops = config.activation_dropout > 0
        # One more tensor enters the last projection: the activation's output, if there is neither gate nor dropout.
        tensors = inputs + 1
        if config.gated_mlp:
            tensors += 2  # both factors of the gate
        elif drops and keeps_output:
            tensors += 1
        element = self.precision.compute_bytes
        return element * (config.hidden_size + tensors * inner) + MASK_BYTES * inner * drops

    def layer(self, side: _Side) -> int:
        is_decoder = side.name == "target"
        query, key = self._attention(side.heads, is_self=True)
        sublayers = (3 if is_decoder else 2) * (self._norm(self.config.hidden_size) + self._dropout())
        size = side.tokens * (sublayers + query + key + self._feed_forward(side.inner))
        size += self._scores(side.heads, side.name, side.name)
        if is_decoder:
            query, key = self._attention(side.heads, is_self=False)
            size += side.tokens * query + self.shape.source_tokens * key + self._scores(side.heads, "target", "source")
        return size

    def embeddings(self, side: _Side) -> int:
        """Return the bytes from ids to the first layer: ids, norm, dropout and rotary tables."""
        config = self.config
        token = INDEX_BYTES + self._dropout() + (self._norm(config.hidden_size) if config.embedding_norm else 0)
        if config.position_embedding_type == "rotary":
            token += 2 * self.precision.stream_bytes * config.get_head_dim(side.heads)
        return side.tokens * token

    def position_bias(self, side: _Side) -> int:
        """Return the bytes of masks with a position bias, one for the stack, or one per layer with a bias of its own."""
        config, shape = self.config, self.shape
        if config.position_embedding_type not in ("relative", "alibi") or self.precision.on_accelerator:
            return 0
        is_shared = config.position_embedding_type == "alibi" or config.relative_attention_shared
        # A packed encoder masks the end of each sequence. All other masks are shared by all rows.
        rows = shape.pairs if side.name == "source" and shape.is_packed else 1
        return (1 if is_shared else side.layers) * rows * side.heads * shape.width(side.name) ** 2 * FLOAT32_BYTES

    def outputs(self) -> int:
        """Return the bytes of the final norms and of the encoder output, which all cross-attentions read."""
        norms = self._norm(self.config.hidden_size) if self.config.final_norm else 0
        output = self.precision.compute_bytes * self.config.hidden_size
        return self.shape.tokens * norms + self.shape.source_tokens * output

    def loss(self) -> tuple[int, int]:
        """Return the bytes that output projection and loss keep, and their workspace.

        Logits exist in chunks alone, and their gradients are made in the forward pass.
        """
        vocabulary, tokens = self.config.decoder_vocab_size, self.shape.target_tokens
        hidden, element = self.config.hidden_size, self.precision.compute_bytes
        weight_gradient = FLOAT32_BYTES * vocabulary * (hidden + self.config.logits_bias)
        # Logits and probabilities of a chunk; later a scaled copy of the gradients.
        workspace = max(2 * element * min(chunk_rows(vocabulary), tokens) * vocabulary, weight_gradient)
        return tokens * element * hidden + weight_gradient, workspace

    def backward_workspace(self) -> int:
        """Return the bytes of gradients, beside those of weights, that the backward pass of one layer holds at a time."""
        config, precision = self.config, self.precision
        # Output, query, key and value; in a CPU's grid too, where those of one product are freed together.
        tensors = 7 if self.shape.is_packed and not precision.on_accelerator else 4
        largest = max(
            side.tokens * max(tensors * side.heads * config.get_head_dim(side.heads), 2 * side.inner)
            for side in self.sides
        )
        return precision.compute_bytes * largest + 2 * precision.stream_bytes * config.hidden_size * self.shape.tokens


def estimate_activations(
    config: MetaphraseConfig, shape: BatchShape, precision: Precision, is_checkpointed: bool = False
) -> ActivationEstimate:
    """Estimate the bytes of one forward and backward pass, without weights and their gradients.

    Source: counting by part is the method of Korthikanti et al. 2022, section 4, arXiv 2205.05198. With checkpoints a layer keeps
    its input alone and is computed again (Chen et al. 2016, section 3, arXiv 1604.06174).

    Args:
        config: Configuration of a model with all weights trained. Frozen weights keep less.
        shape: Shape of the batch.
        precision: Precision of the step.
        is_checkpointed: True if layers are computed again in the backward pass (`gradient_checkpointing`).
    """
    counter = _Counter(config, shape, precision)
    encoder, decoder = counter.sides
    layers = stored = counter.layer(encoder), counter.layer(decoder)
    if is_checkpointed:
        stored = [precision.stream_bytes * config.hidden_size * side.tokens for side in counter.sides]
    loss, loss_workspace = counter.loss()
    terms = {
        "embeddings": sum(map(counter.embeddings, counter.sides)),
        "position bias": sum(map(counter.position_bias, counter.sides)),
        "encoder layers": encoder.layers * stored[0],
        "decoder layers": decoder.layers * stored[1],
        "outputs": counter.outputs(),
        "loss": loss,
    }
    workspace = counter.backward_workspace() + (max(layers) if is_checkpointed else 0)
    return ActivationEstimate(terms, loss_workspace, workspace, is_checkpointed)


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
