"""Bytes of a training step on one device: activations by part of the network, and weights, gradients and optimizer.

Each part of the network keeps a number of bytes per token or per attention score. A tensor that two parts keep counts once, where
it is made. Weights, gradients and optimizer may be shared among devices, and are counted for any model of transformers.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from accelerate.utils import DeepSpeedPlugin, parse_flag_from_env
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.activations import ACT2FN

from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import SLIDING, SSRU
from metaphrase.ops.grid_attention import MAX_KEPT_BYTES
from metaphrase.ops.packed_rows import block_size, grid_width
from metaphrase.ops.projected_loss import chunk_rows

FLOAT32_BYTES, MASK_BYTES, INDEX_BYTES = 4, 1, 8
STACKS = {"source": "encoder", "target": "decoder"}


@dataclass(frozen=True)
class BatchShape:
    """Sizes that decide the cost of a batch, which is padded, or packed into one row.

    Tokens are cells that are computed: with padding, `pairs` times the longest sequence. Scores are those of one head, in the
    encoder (`source_scores`) and in the decoder.
    """

    pairs: int
    source_tokens: int
    target_tokens: int
    longest_source: int
    longest_target: int
    source_scores: int
    target_scores: int
    cross_scores: int
    is_packed: bool

    @classmethod
    def of(cls, source_lengths: Sequence[int], target_lengths: Sequence[int], is_packed: bool) -> "BatchShape":
        """Return the shape of a batch of pairs with these lengths in tokens."""
        lengths = np.array([source_lengths, target_lengths])
        longest = lengths.max(axis=1)
        if not is_packed:
            lengths[:] = longest[:, None]
        # A lower bound: packed sequences that are computed together have a grid of one width.
        source, target = np.vectorize(grid_width)(lengths) if is_packed else lengths
        scores = (int(queries @ keys) for queries, keys in ((source, source), (target, target), (target, source)))
        return cls(len(source), *lengths.sum(axis=1).tolist(), *longest.tolist(), *scores, is_packed)


@dataclass(frozen=True)
class Precision:
    """Bytes of an entry in matrix products and of the residual stream, and True if an accelerator's kernels compute the step.

    If the stream is wider, as under autocast, a narrow copy of the inputs of projections is kept too.
    """

    compute_bytes: int = FLOAT32_BYTES
    stream_bytes: int = FLOAT32_BYTES
    on_accelerator: bool = False


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of one step beside weights, gradients and optimizer.

    Attributes:
        kept_bytes: Bytes kept from the forward to the backward pass.
        loss_workspace: Further bytes of the loss, while all of these are there.
        backward_workspace: Maximum bytes of the backward pass of one layer; with checkpoints, the layer itself too.
    """

    kept_bytes: int
    loss_workspace: int
    backward_workspace: int
    is_checkpointed: bool


@lru_cache
def kept_by_activation(name: str) -> int:
    """Return how many tensors of its input's size any activation function of transformers keeps, beside its output."""
    states, saved = torch.linspace(-1, 1, 1024, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        # The product has a storage of its own, like the output of a projection.
        output = ACT2FN[name](states * 1.0)
    full = {tensor.untyped_storage().data_ptr() for tensor in saved if tensor.numel() >= states.numel()}
    return len(full - {output.untyped_storage().data_ptr()})


def estimate_activations(
    config: PreTrainedConfig, shape: BatchShape, precision: Precision, is_checkpointed: bool = False
) -> ActivationEstimate:
    """Estimate the bytes of one forward and backward pass, without weights and their gradients.

    Source: counting by part is the method of Korthikanti et al. 2022, section 4, arXiv 2205.05198. With checkpoints a layer keeps
    its input alone and is computed again (Chen et al. 2016, section 3, arXiv 1604.06174). The layers of other families follow
    equation 1 of the former, and their logits, softmax and gradient are in float32. Frozen weights would keep less.
    """
    hidden, element = config.hidden_size, precision.compute_bytes
    widths = hidden, getattr(config, "decoder_hidden_size", None) or hidden
    tokens_of_sides = shape.source_tokens, shape.target_tokens
    inputs = [precision.stream_bytes * width * tokens for width, tokens in zip(widths, tokens_of_sides, strict=True)]
    if config.model_type != MetaphraseConfig.model_type:
        heads, both = config.num_attention_heads, shape.longest_source + shape.longest_target
        # The decoder has a second attention, to all of the source.
        entries = 34 * hidden + 5 * heads * shape.longest_source, 45 * hidden + 5 * heads * both
        sizes = [element * tokens * per_token // 2 for tokens, per_token in zip(tokens_of_sides, entries, strict=True)]
        layers = [config.num_hidden_layers * [size] for size in sizes]
        total, loss_workspace, workspace = 0, 0, 0
        loss = 3 * FLOAT32_BYTES * shape.target_tokens * getattr(config, "vocab_size", 0)
    else:
        outside, layers = zip(*(_stack(config, shape, precision, side) for side in STACKS), strict=True)
        # All cross-attentions read the encoder output.
        total = sum(outside) + shape.source_tokens * element * hidden
        # Logits exist in chunks alone, and their gradients are made in the forward pass.
        vocabulary, tokens = config.decoder_vocab_size, shape.target_tokens
        weight_gradient = FLOAT32_BYTES * vocabulary * (widths[1] + config.logits_bias)
        loss = tokens * element * widths[1] + weight_gradient
        if config.head_transform:
            tensors = 1 + kept_by_activation(config.activation_function)
            loss += tokens * (tensors * element * widths[1] + _norm(config, precision, widths[1]))
        if config.final_logit_softcapping is not None:
            # All logits, their caps and their probabilities.
            loss += 3 * FLOAT32_BYTES * tokens * vocabulary
        # Logits and probabilities of a chunk; later a scaled copy of the gradients.
        loss_workspace = max(2 * element * min(chunk_rows(vocabulary), tokens) * vocabulary, weight_gradient)
        # Gradients, beside those of weights, that the backward pass of one layer holds at a time: of output, query, key and
        # value; in a CPU's grid too.
        tensors = 7 if shape.is_packed and not precision.on_accelerator else 4
        stacks = zip(tokens_of_sides, map(config.stack_sizes, STACKS.values()), strict=True)
        workspace = 2 * sum(inputs) + element * max(
            tokens * max(tensors * sizes.attention_heads * sizes.head_dim, 2 * sizes.ffn_dim)
            for tokens, sizes in stacks
        )
    for size, sizes in zip(inputs, layers, strict=True):
        total += len(sizes) * size if is_checkpointed else sum(sizes)
    workspace += max(map(max, layers)) * is_checkpointed
    return ActivationEstimate(total + loss, loss_workspace, workspace, is_checkpointed)


def _norm(config: MetaphraseConfig, precision: Precision, width: int) -> int:
    """Return the bytes of a norm per token: input and statistics, in float32. Its output counts where it is read."""
    is_rms = config.norm_type == "rmsnorm"
    # Without a fused kernel, RMSNorm also keeps the normed states before the weight.
    tensors = 2 if is_rms and not precision.on_accelerator else 1
    return FLOAT32_BYTES * (tensors * width + (1 if is_rms else 2))


def _stack(config: MetaphraseConfig, shape: BatchShape, precision: Precision, side: str) -> tuple[int, list[int]]:
    """Return the bytes that a stack keeps for embeddings, position biases and final norms, and for each layer."""
    sizes, tokens = config.stack_sizes(STACKS[side]), getattr(shape, f"{side}_tokens")
    heads, norm = sizes.attention_heads, _norm(config, precision, sizes.hidden_size)
    longest = getattr(shape, f"longest_{side}")
    block_scores = 0  # scores of a head in layers whose windows are computed in blocks
    if SLIDING in sizes.layer_types and (side == "source" or (shape.is_packed and not config.merged_attention)):
        (left, right), size = sizes.window, block_size(sizes.window)
        if longest > 1 + (left if side == "target" else min(left, right)):
            block_scores = -(-tokens // size) * size * (left + size + right)
    token = INDEX_BYTES + MASK_BYTES * sizes.hidden_size * (config.dropout > 0)
    token += norm * (config.embedding_norm + config.final_norm)
    kind, num_layers = config.position_embedding_type, sizes.layers
    if kind == "rotary":
        token += 2 * precision.stream_bytes * sizes.head_dim
    outside = token * tokens
    if block_scores:
        num_layers -= sizes.layer_types.count(SLIDING)
        # All layers share the mask of the blocks. Plain products, for a trained bias, do not keep the mask.
        entry = {"relative": 0, "alibi": heads * FLOAT32_BYTES}.get(kind, precision.compute_bytes)
        outside += block_scores * entry
    if kind in ("relative", "alibi") and num_layers and not precision.on_accelerator:
        is_shared = kind == "alibi" or config.relative_attention_shared
        # A packed encoder masks the end of each sequence. All other masks are shared by all rows.
        rows = shape.pairs if side == "source" and shape.is_packed else 1
        width = grid_width(longest) if shape.is_packed else longest
        outside += (1 if is_shared else num_layers) * rows * heads * width**2 * FLOAT32_BYTES
    scores = (block_scores * (kind == SLIDING) for kind in sizes.layer_types)
    return outside, [_layer(config, shape, precision, side, size) for size in scores]


def _layer(config: MetaphraseConfig, shape: BatchShape, precision: Precision, side: str, block_scores: int) -> int:
    """Return the bytes that a layer keeps. `block_scores` are the scores of a head if the layer has blocks."""
    sizes, element = config.stack_sizes(STACKS[side]), precision.compute_bytes
    heads, inner, hidden = sizes.attention_heads, sizes.ffn_dim, sizes.hidden_size
    tokens, head_dim, key_heads = getattr(shape, f"{side}_tokens"), sizes.head_dim, sizes.key_value_heads

    def score_bytes(scores: int, keys: str, has_blocks: bool = False) -> int:
        """Return the bytes of attention scores. An accelerator's kernels keep none."""
        drops, has_cap = config.attention_dropout > 0, config.attn_logit_softcapping is not None
        if precision.on_accelerator and not has_cap:
            return 0
        if shape.is_packed and not precision.on_accelerator and not has_blocks and not has_cap:
            # Larger scores are computed again.
            return scores * ((element if element * scores <= MAX_KEPT_BYTES else 0) + MASK_BYTES * drops)
        # A CPU's kernel for padded rows and blocks has no dropout and no trained bias: then plain products in float32 are used.
        is_plain = drops or has_cap or (keys == side and config.position_embedding_type == "relative")
        return scores * FLOAT32_BYTES * (1 + 2 * drops) * is_plain

    # Input of the projections, query, input of the output projection, and the logarithm of the sum of each softmax.
    query = element * (hidden + 2 * heads * head_dim) + FLOAT32_BYTES * heads
    # Only kernels for padded rows share keys among query heads.
    key = element * 2 * (heads if shape.is_packed or block_scores else key_heads) * head_dim
    if config.qk_norm:
        query += heads * (_norm(config, precision, head_dim) + element * head_dim * (not shape.is_packed))
        key += key_heads * _norm(config, precision, head_dim)
    # Both factors of a gate, and what enters the last projection.
    # The network's own name of the activation.
    name = config.activation_function.replace("gelu_new", "gelu_pytorch_tanh")
    tensors = kept_by_activation(name) + 1 + 2 * config.gated_mlp
    feed_forward = element * (hidden + tensors * inner) + MASK_BYTES * inner * (config.activation_dropout > 0)
    norms = 2 if config.norm_position == "both" else 1
    sublayer = norms * _norm(config, precision, hidden) + MASK_BYTES * hidden * (config.dropout > 0)
    scores = heads * (block_scores or getattr(shape, f"{side}_scores"))
    self_attention = tokens * (query + key) + score_bytes(scores, side, block_scores > 0)
    if side == "target" and config.decoder_self_attention == SSRU:
        # Its input, and in float32 both factors, the states and the output.
        self_attention = tokens * hidden * (2 * element + FLOAT32_BYTES * (4 + shape.is_packed))
    size = tokens * (2 * sublayer + feed_forward) + self_attention
    if side == "target":
        size += tokens * (sublayer + query) * (not config.merged_attention) + shape.source_tokens * key
        size += score_bytes(heads * shape.cross_scores, "source")
    return size


@dataclass(frozen=True)
class Sharding:
    """Distribution of weights, gradients and optimizer among the devices that train one model.

    Source: the stages of Rajbhandari et al. 2020, section 5, arXiv 1910.02054.

    Attributes:
        stage: 0 shares nothing, 1 the optimizer, 2 the gradients too, 3 the weights too. FSDP's stage 2 shares weights too, but
            leaves them gathered from the forward to the backward pass.
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
        """Read the training arguments and the environment of `accelerate launch`, for the devices of this run by default."""
        devices = arguments.world_size if devices is None else devices
        if arguments.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            settings = arguments.hf_deepspeed_config if arguments.deepspeed else DeepSpeedPlugin().hf_ds_config
            zero = settings.config.get("zero_optimization") or {}
            offload = (zero.get("offload_optimizer") or {}).get("device", "none")
            bucket = zero.get("reduce_bucket_size", 5 * 10**8)
            bucket = int(bucket) if isinstance(bucket, int | float) else 0
            return cls(devices, int(zero.get("stage", 0)), "deepspeed", offload not in (None, "none"), bucket)
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


def optimizer_bytes(model: PreTrainedModel, arguments: TrainingArguments) -> tuple[int, str | None]:
    """Return the bytes of an optimizer's state for all trained weights, and a remark if they are assumed.

    The optimizer takes a step with one matrix, whose state is counted. 8-bit optimizers need an accelerator, and are counted with
    two bytes.
    """
    name = getattr(arguments.optim, "value", arguments.optim)
    entries = model.num_parameters(only_trainable=True)
    if "8bit" in name:
        return 2 * entries, None
    matrix = nn.Parameter(torch.zeros(256, 256))
    matrix.grad = torch.zeros_like(matrix)
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        optimizer = kind([matrix], **options)
        optimizer.step()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        # Its package is not here, or it takes other arguments.
        remark = f"The state of the optimizer {name} is counted as that of AdamW, as it cannot be made here: {error}"
        return 8 * entries, remark
    states = (value for state in optimizer.state.values() for value in state.values())
    sizes = [value.numel() * value.element_size() for value in states if torch.is_tensor(value) and value.dim()]
    return entries * sum(sizes) // matrix.numel(), None


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one device that do not depend on the batch.

    Weights are shared in the precision in which they are updated, and cast by autocast to half precision or gathered for the
    computation. Buffers are gradients in transfer. Gradients persist if they stay while the next batch is computed.
    """

    weights: int
    cast_weights: int
    gathered_weights: int
    gradients: int
    buffers: int
    optimizer: int
    gradients_persist: bool

    def peak(self, activations: ActivationEstimate) -> int:
        """Return the maximum bytes at a time. Gradients that do not persist appear while activations are freed."""
        fixed = self.weights + self.gathered_weights + self.buffers + self.optimizer
        first = activations.kept_bytes + self.gradients * self.gradients_persist
        # Layers that are computed again free the weights that autocast converts.
        cast_weights = 0 if activations.is_checkpointed else self.cast_weights
        backward = max(first, self.gradients) + activations.backward_workspace + cast_weights
        return fixed + max(first + activations.loss_workspace + self.cast_weights, backward)


def estimate_states(
    model: PreTrainedModel, optimizer: int, precision: Precision, sharding: Sharding, accumulates: bool = False
) -> StateMemory:
    """Estimate the bytes of weights, gradients and optimizer on one device.

    `optimizer` are the bytes of the optimizer's whole state. `accumulates` is true if gradients of several batches are added up.
    """
    devices, stage = sharding.devices, sharding.stage

    def share(size: int, first_stage: int) -> int:
        return -(-size // devices) if stage >= first_stage else size

    states = [(weight.numel() * weight.element_size(), weight.requires_grad) for weight in model.parameters()]
    weights, trained = sum(size for size, _ in states), sum(size for size, is_trained in states if is_trained)
    is_deepspeed, is_fsdp = (sharding.engine == engine for engine in ("deepspeed", "fsdp"))
    if is_deepspeed and precision.compute_bytes < FLOAT32_BYTES:
        # Weights and gradients are in half precision. The optimizer holds the float32 weights that it updates.
        optimizer += trained
        weights, trained = (size * precision.compute_bytes // FLOAT32_BYTES for size in (weights, trained))
    cast_weights = 0
    if sharding.engine == "ddp" and precision.compute_bytes != precision.stream_bytes:
        # Autocast converts all projections but the last, which the loss converts itself.
        head = model.get_output_embeddings()
        projections = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
        cast_weights = precision.compute_bytes * sum(projection.weight.numel() for projection in projections)
    gathered, buffers = 0, trained * (devices > 1)
    if sharding.engine != "ddp":
        # FSDP casts and DeepSpeed fills buckets on one device too.
        element, entries = precision.compute_bytes, model.num_parameters()
        layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        # The next layer is gathered during the computation of one. Weights outside layers stay.
        units = element * min(2 * max(sizes, default=0) + entries - sum(sizes), entries)
        gathered = units if stage == 3 else element * entries * is_fsdp
        buffers = 2 * element * min(sharding.bucket_entries, entries) if is_deepspeed else units
        if is_fsdp and accumulates:
            # accelerate lets each device add up whole gradients, and shares out those of the last batch.
            buffers = element * model.num_parameters(only_trainable=True)
    is_away = sharding.is_offloaded and is_fsdp
    return StateMemory(
        weights=0 if is_away else share(weights, 2 if is_fsdp else 3),
        cast_weights=cast_weights,
        gathered_weights=gathered,
        gradients=0 if is_away else share(trained, 2),
        buffers=buffers,
        optimizer=0 if sharding.is_offloaded else share(optimizer, 1),
        gradients_persist=(accumulates and not is_fsdp) or is_deepspeed,
    )
