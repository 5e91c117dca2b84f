"""The activation estimate: bytes that a training step keeps from the forward pass for the backward pass, term by term.

Each term is what one part of the network keeps for one token (or for one score), times their number. A tensor that two parts keep
is counted once, where it is made.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers.activations import ACT2FN

from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.chunked_loss import chunk_rows
from metaphrase.ops.grid_attention import MAX_KEPT_BYTES, MIN_HALF_WIDTH
from metaphrase.training.planning.batches import BatchShape

FLOAT32_BYTES, MASK_BYTES, INDEX_BYTES = 4, 1, 8


@dataclass(frozen=True)
class Precision:
    """In which precision, and where, a step is computed.

    Attributes:
        compute_bytes: Of an entry in the matrix products.
        stream_bytes: Of an entry of the residual stream. Where it is wider than `compute_bytes`, as under autocast, a narrow
            copy is kept of what projections read.
        on_accelerator: Whether fused kernels of an accelerator compute it.
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
        terms: What lives from the forward to the backward pass, by part.
        loss_workspace: What the loss needs beside that, when all of it is there.
        backward_workspace: The most that the backward pass of one layer needs; with checkpoints, the layer itself too.
        is_checkpointed: Whether layers are computed again in the backward pass.
    """

    terms: dict[str, int]
    loss_workspace: int
    backward_workspace: int
    is_checkpointed: bool

    @property
    def kept(self) -> int:
        return sum(self.terms.values())

    def peak(self, gradients: int = 0, gradients_persist: bool = False, cast_weights: int = 0) -> int:
        """The most that is needed at a time.

        Args:
            gradients: Bytes of the weights' gradients, which come while activations go.
            gradients_persist: Whether they are there from the start, as when they are accumulated.
            cast_weights: Bytes of the weights that autocast converts. Layers that are computed again let them go.
        """
        first = self.kept + gradients * gradients_persist
        backward = max(first, gradients) + self.backward_workspace + (0 if self.is_checkpointed else cast_weights)
        return max(first + self.loss_workspace + cast_weights, backward)


@lru_cache
def kept_by_activation(name: str) -> tuple[int, bool]:
    """What an activation function keeps for its backward pass: tensors of the size of its input, and whether its output is one.

    Found by applying it to a few numbers, so that it holds for all of transformers' functions.
    """
    states = torch.linspace(-1, 1, 1024, requires_grad=True)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # As a product it has a storage of its own, as the output of a projection.
        inner = states * 1.0
        output = ACT2FN[name](inner)
    full = {place for place, tensor in kept.items() if tensor.numel() >= states.numel()}
    place = output.untyped_storage().data_ptr()
    return len(full - {place}), place in full


def _norm(config: MetaphraseConfig, precision: Precision, width: int, rows: int = 1) -> float:
    """Bytes of a norm for one token: its input and its statistics, always in float32. The output is kept by who reads it."""
    is_composed = not precision.on_accelerator and config.norm_type == "rmsnorm"
    tensors = 2 if is_composed else 1  # without a fused kernel, the normed states before the weight too
    statistics = 1 if config.norm_type == "rmsnorm" else 2
    return FLOAT32_BYTES * rows * (tensors * width + statistics)


def _sublayer(config: MetaphraseConfig, precision: Precision) -> float:
    """Bytes for one token of what surrounds attention and feed-forward: the norm and the dropout of the output."""
    dropout = MASK_BYTES * config.hidden_size if config.dropout else 0
    return _norm(config, precision, config.hidden_size) + dropout


def _is_written_out(config: MetaphraseConfig, precision: Precision, shape: BatchShape, is_self: bool) -> bool:
    """Whether `sdpa` falls back on plain products, in float32: a CPU's kernel has neither dropout nor a bias that is trained."""
    if precision.on_accelerator or shape.is_packed or config._attn_implementation not in (None, "sdpa"):
        return False
    return config.attention_dropout > 0 or (is_self and config.position_embedding_type == "relative")


def _has_grid_kernel(config: MetaphraseConfig, precision: Precision) -> bool:
    """Whether packed attention on an accelerator gives each sequence a row: other kernels take no dropout, or no float32."""
    has_bias = config.position_embedding_type in ("relative", "alibi")
    return config.attention_dropout > 0 or (precision.compute_bytes == FLOAT32_BYTES and not has_bias)


def _attention(
    config: MetaphraseConfig, precision: Precision, heads: int, shape: BatchShape, is_self: bool
) -> tuple[float, float]:
    """Bytes of an attention for one token that asks and for one token that is seen, but for the scores."""
    head_dim = config.get_head_dim(heads)
    key_heads = config.num_key_value_heads or heads
    is_written_out = _is_written_out(config, precision, shape, is_self)
    # Only a kernel for padded rows shares keys among query heads.
    kept_heads = heads if shape.is_packed or is_written_out else key_heads
    element = precision.compute_bytes
    kernel_element = FLOAT32_BYTES if is_written_out else element
    # What the projection reads, the query, and what the last projection reads.
    query = element * (config.hidden_size + heads * head_dim) + kernel_element * heads * head_dim
    key = kernel_element * 2 * kept_heads * head_dim
    if not is_written_out:
        query += FLOAT32_BYTES * heads  # the logarithm of each softmax's sum
    if config.qk_norm:
        query += _norm(config, precision, head_dim, heads)
        key += _norm(config, precision, head_dim, key_heads)
        if not shape.is_packed and not is_written_out:
            query += element * heads * head_dim  # the output in the order of the normed query, and once more by token
    if shape.is_packed and precision.on_accelerator and _has_grid_kernel(config, precision):
        query += element * heads * head_dim  # the output in the grid, and once more by token
    return query, key


def _num_scores(config: MetaphraseConfig, shape: BatchShape, heads: int, queries: str, keys: str) -> int:
    """Scores of an attention in which one side, `source` or `target`, asks another."""
    if shape.is_packed and config._attn_implementation == "eager":
        # The reference for packed rows: every token of the row meets every other.
        return heads * shape.tokens_of(queries) * shape.tokens_of(keys)
    return heads * shape.scores_of(queries, keys)


def _score_bytes(
    config: MetaphraseConfig, precision: Precision, shape: BatchShape, is_self: bool, scores: int, keys: str
) -> float:
    """Bytes that an attention keeps for each of its scores: none where they are computed again."""
    drops = config.attention_dropout > 0
    if config._attn_implementation == "eager":
        cast = precision.compute_bytes if precision.casts else 0
        return FLOAT32_BYTES + cast + (MASK_BYTES + precision.compute_bytes) * drops
    if precision.on_accelerator:
        return 0
    if shape.is_packed:
        entry = precision.compute_bytes if shape.width(keys) >= MIN_HALF_WIDTH else FLOAT32_BYTES
        return (entry if entry * scores <= MAX_KEPT_BYTES else 0) + MASK_BYTES * drops
    return FLOAT32_BYTES * (1 + 2 * drops) if _is_written_out(config, precision, shape, is_self) else 0


def _feed_forward(config: MetaphraseConfig, precision: Precision, inner: int) -> float:
    """Bytes of a feed-forward for one token."""
    inputs, keeps_output = kept_by_activation(config.activation_function)
    drops = config.activation_dropout > 0
    # What enters the last projection; without gate and dropout that is the activation's output itself.
    tensors = inputs + 1
    if config.gated_mlp:
        tensors += 2  # both factors of the gate's product
    elif drops and keeps_output:
        tensors += 1
    element = precision.compute_bytes
    return element * (config.hidden_size + tensors * inner) + (MASK_BYTES * inner if drops else 0)


def encoder_layer_bytes(config: MetaphraseConfig, shape: BatchShape, precision: Precision) -> int:
    """Bytes that one layer of the encoder keeps."""
    heads = config.encoder_attention_heads
    query, key = _attention(config, precision, heads, shape, is_self=True)
    token = 2 * _sublayer(config, precision) + query + key + _feed_forward(config, precision, config.encoder_ffn_dim)
    scores = _num_scores(config, shape, heads, "source", "source")
    score = _score_bytes(config, precision, shape, True, scores, "source")
    return round(shape.source_tokens * token + scores * score)


def decoder_layer_bytes(config: MetaphraseConfig, shape: BatchShape, precision: Precision) -> int:
    """Bytes that one layer of the decoder keeps."""
    heads = config.decoder_attention_heads
    query, key = _attention(config, precision, heads, shape, is_self=True)
    cross_query, cross_key = _attention(config, precision, heads, shape, is_self=False)
    token = 3 * _sublayer(config, precision) + query + key + cross_query
    token += _feed_forward(config, precision, config.decoder_ffn_dim)
    total = shape.target_tokens * token + shape.source_tokens * cross_key
    for is_self, keys in ((True, "target"), (False, "source")):
        scores = _num_scores(config, shape, heads, "target", keys)
        total += scores * _score_bytes(config, precision, shape, is_self, scores, keys)
    return round(total)


def _embedding_bytes(config: MetaphraseConfig, precision: Precision, tokens: int, heads: int) -> int:
    """Bytes from the ids to the first layer: ids, the norm, the dropout and the tables of rotary positions."""
    token = INDEX_BYTES + (_norm(config, precision, config.hidden_size) if config.embedding_norm else 0)
    token += MASK_BYTES * config.hidden_size if config.dropout else 0
    if config.position_embedding_type == "rotary":
        token += 2 * precision.stream_bytes * config.get_head_dim(heads)
    return round(tokens * token)


def _bias_bytes(config: MetaphraseConfig, shape: BatchShape, precision: Precision) -> int:
    """Bytes of the masks that carry a position bias, one for each stack, or for each layer with a bias of its own."""
    if config.position_embedding_type not in ("relative", "alibi") or precision.on_accelerator:
        return 0
    is_shared = config.position_embedding_type == "alibi" or config.relative_attention_shared
    total = 0
    for side, heads, layers in (
        ("source", config.encoder_attention_heads, config.encoder_layers),
        ("target", config.decoder_attention_heads, config.decoder_layers),
    ):
        # A packed encoder masks the end of each sequence; all other masks are the same for all rows.
        rows = shape.pairs if side == "source" and shape.is_packed else 1
        masks = 1 if is_shared else layers
        total += masks * rows * heads * shape.width(side) ** 2 * FLOAT32_BYTES
    return total


def _output_bytes(config: MetaphraseConfig, shape: BatchShape, precision: Precision) -> int:
    """Bytes of the two final norms and of the memory, which all cross-attentions read."""
    norms = _norm(config, precision, config.hidden_size) if config.final_norm else 0
    return round(shape.tokens * norms + shape.source_tokens * precision.compute_bytes * config.hidden_size)


def loss_bytes(
    config: MetaphraseConfig, shape: BatchShape, precision: Precision, is_loss_chunked: bool = True
) -> tuple[int, int]:
    """Bytes that the output projection and the loss keep, and the most that they need beside that.

    Args:
        config: Of the model.
        shape: Of the batch.
        precision: Of the step.
        is_loss_chunked: Whether the logits exist in chunks alone; the gradients are made in the forward pass then.
    """
    hidden, vocabulary, tokens = config.hidden_size, config.decoder_vocab_size, shape.target_tokens
    element = precision.compute_bytes
    if not is_loss_chunked:
        return tokens * (element * hidden + FLOAT32_BYTES * vocabulary), tokens * vocabulary * (FLOAT32_BYTES + element)
    weight_gradient = FLOAT32_BYTES * vocabulary * (hidden + config.logits_bias)
    # Logits and probabilities of a chunk; later the gradients once more, scaled.
    workspace = max(2 * element * min(chunk_rows(vocabulary), tokens) * vocabulary, weight_gradient)
    return tokens * element * hidden + weight_gradient, workspace


def _backward_workspace(config: MetaphraseConfig, shape: BatchShape, precision: Precision) -> int:
    """Bytes of the gradients that the backward pass of one layer holds at a time, beside those of the weights."""
    has_grid = shape.is_packed and not precision.on_accelerator
    most = 0
    for tokens, heads, inner in (
        (shape.source_tokens, config.encoder_attention_heads, config.encoder_ffn_dim),
        (shape.target_tokens, config.decoder_attention_heads, config.decoder_ffn_dim),
    ):
        # Output, query, key and value; in the grid too, where those of one product leave it together.
        attention = (7 if has_grid else 4) * heads * config.get_head_dim(heads)
        most = max(most, precision.compute_bytes * tokens * max(attention, 2 * inner))
    return most + 2 * precision.stream_bytes * config.hidden_size * shape.tokens


def estimate_activations(
    config: MetaphraseConfig,
    shape: BatchShape,
    precision: Precision,
    is_checkpointed: bool = False,
    is_loss_chunked: bool = True,
) -> ActivationEstimate:
    """Bytes of one forward and backward pass, but for weights and their gradients.

    Source: counting what each part keeps is the method of Korthikanti et al. 2022, section 4, arXiv 2205.05198; with
    checkpoints a layer keeps its input alone and is computed again (Chen et al. 2016, section 3, arXiv 1604.06174).

    Args:
        config: Of a model all of whose weights are trained; where some are frozen, less is kept.
        shape: Of the batch.
        precision: Of the step.
        is_checkpointed: Whether layers are computed again in the backward pass (`gradient_checkpointing`).
        is_loss_chunked: See `loss_bytes`.
    """
    layers = {
        "encoder": (config.encoder_layers, encoder_layer_bytes(config, shape, precision), shape.source_tokens),
        "decoder": (config.decoder_layers, decoder_layer_bytes(config, shape, precision), shape.target_tokens),
    }
    loss, loss_workspace = loss_bytes(config, shape, precision, is_loss_chunked)
    terms = {
        "embeddings": _embedding_bytes(config, precision, shape.source_tokens, config.encoder_attention_heads)
        + _embedding_bytes(config, precision, shape.target_tokens, config.decoder_attention_heads),
        "position bias": _bias_bytes(config, shape, precision),
    }
    for name, (count, each, tokens) in layers.items():
        terms[f"{name} layers"] = count * (
            precision.stream_bytes * config.hidden_size * tokens if is_checkpointed else each
        )
    terms["outputs"] = _output_bytes(config, shape, precision)
    terms["loss"] = loss
    again = max(each for _, each, _ in layers.values()) if is_checkpointed else 0
    workspace = again + _backward_workspace(config, shape, precision)
    return ActivationEstimate(terms, loss_workspace, workspace, is_checkpointed)
