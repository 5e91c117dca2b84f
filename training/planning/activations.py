"""Bytes that a training step keeps from the forward pass for the backward pass, by part of the network.

Each part keeps a number of bytes per token or per attention score. A tensor that two parts keep counts once, where it is made.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
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
