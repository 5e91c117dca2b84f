"""The projection of a decoder's output to logits, made ready for steps of one token.

A decoder's layer, made ready for steps of one token: everything looked up, products joined and packed, no call of a module.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ReLUSquaredActivation

from metaphrase.decoding.prepared_linear import LARGEST_SIZE, PreparedLinear
from metaphrase.decoding.shortlist import ShortlistProjection, can_shortlist
from metaphrase.decoding.weight_copies import ModuleRecord, PreparedCopies, WeightRecord, can_record
from metaphrase.modeling.attention import MetaphraseAttention
from metaphrase.modeling.layers import MetaphraseDecoderLayer
from metaphrase.modeling.normalization import MetaphraseRMSNorm

# There is one head, and it takes a good part of a step: it may be larger than a layer's weight and still be worth a copy.
_LARGEST_COPY = 2**26


class _ReadyHead:
    """A head, and what was made of its weights, as soon as it was asked for."""

    def __init__(self, head: nn.Module):
        self.head, self._can_copy = head, _can_copy(head)
        self._record = ModuleRecord(head)
        self._weights = WeightRecord(list(head.parameters()) if self._can_copy else [])

    @functools.cached_property
    def linear(self) -> PreparedLinear:
        return PreparedLinear([self.head], self._can_copy, _LARGEST_COPY, LARGEST_SIZE)

    @functools.cached_property
    def shortlist(self) -> ShortlistProjection | None:
        return ShortlistProjection(self.head) if self._can_copy and can_shortlist(self.head) else None

    def is_current(self, head: nn.Module) -> bool:
        """Whether the head is the same, with the same weights."""
        return self._can_copy == _can_copy(head) and self._record.is_current(head) and self._weights.is_current()


_heads = PreparedCopies(_ReadyHead)


def prepared_head(decoder: nn.Module, head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The projection of a decoder's output to logits, `(..., hidden)` -> `(..., vocab)`, as its weights are now."""
    ready = _ready_head(decoder, head)
    return head if ready is None else ready.linear


def prepared_shortlist(decoder: nn.Module, head: nn.Module) -> ShortlistProjection | None:
    """What may be the most probable tokens, without all logits; `None` where these are made as fast."""
    ready = _ready_head(decoder, head)
    return None if ready is None else ready.shortlist


def _ready_head(decoder: nn.Module, head: nn.Module) -> _ReadyHead | None:
    """What was made before serves as long as the weights are the same; `None` for a head that must be called itself."""
    is_hooked = head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook")
    if is_hooked or torch.is_autocast_enabled(decoder.device.type):
        return None
    return _heads.get(decoder, head)


def _can_copy(head: nn.Module) -> bool:
    return can_record(head) and head.weight.device.type == "cpu"


# What is not above zero is zero.
_WITH_ZEROS = (nn.ReLU, nn.ReLU6, ReLUSquaredActivation)


class PreparedLayer:
    """The parts of one layer.

    Attributes:
        token_projection: To queries, keys and values of the self-attention, one behind the other.
        memory_query: To the queries of the cross-attention.
        memory_projection: To its keys and values, one behind the other.
        inner_projection: To the feed-forward's inner width: the gate, if there is one, and what it lets through.
    """

    def __init__(self, layer: MetaphraseDecoderLayer, copies: bool = True):
        """Looks everything up.

        Args:
            layer: The layer, in evaluation.
            copies: Whether weights may be copied, so that products are faster and one does for several.
        """
        tokens, memory, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        self.token_projection = PreparedLinear([tokens.q_proj, tokens.k_proj, tokens.v_proj], copies)
        self.token_output = PreparedLinear([tokens.o_proj], copies)
        self.memory_query, self.memory_output = (
            PreparedLinear([memory.q_proj], copies),
            PreparedLinear([memory.o_proj], copies),
        )
        self.memory_projection = PreparedLinear([memory.k_proj, memory.v_proj], copies)
        self.inner_projection = PreparedLinear([mlp.gate_proj, mlp.up_proj] if mlp.is_gated else [mlp.up_proj], copies)
        self.inner_output = PreparedLinear([mlp.down_proj], copies, has_zeros=isinstance(mlp.activation, _WITH_ZEROS))
        self.activation, self.is_gated = mlp.activation, mlp.is_gated
        self.token_norms, self.memory_norms = _head_norms(tokens), _head_norms(memory)
        self.token_scaling, self.memory_scaling = tokens.scaling, memory.scaling
        self.norms = tuple(map(prepared_norm, (layer.self_attn_norm, layer.cross_attn_norm, layer.mlp_norm)))
        self.is_pre_norm = layer.is_pre_norm
        self._linears = [part for part in vars(self).values() if isinstance(part, PreparedLinear)]

    @property
    def copied(self) -> list[torch.Tensor]:
        """Weights and biases that were copied."""
        return [weight for linear in self._linears for weight in linear.copied]

    def feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)"""
        inner = self.inner_projection(states)
        if self.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            return self.inner_output(self.activation(gate) * inner)
        return self.inner_output(self.activation(inner))


def prepared_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a norm does, without the call of a module where its kernel is all of it."""
    if type(norm) is nn.LayerNorm:
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda states: torch.layer_norm(states, shape, weight, bias, eps)
    return norm.forward if type(norm) in (MetaphraseRMSNorm, nn.Identity) else norm


def _head_norms(attention: MetaphraseAttention) -> tuple[nn.Module, nn.Module] | None:
    return (attention.q_norm, attention.k_norm) if attention.config.qk_norm else None


class _Ready:
    """The layers of a decoder, made ready, and what was copied for that."""

    def __init__(self, decoder: nn.Module):
        self.layers = [PreparedLayer(layer) for layer in decoder.layers]
        self._record = ModuleRecord(decoder.layers)
        self._weights = WeightRecord([weight for layer in self.layers for weight in layer.copied])

    def is_current(self, decoder: nn.Module) -> bool:
        return self._record.is_current(decoder.layers) and self._weights.is_current()


_layers = PreparedCopies(_Ready)


def prepared_layers(decoder: nn.Module) -> list[PreparedLayer]:
    """The layers of a decoder as its weights are now; what was made before serves as long as these are the same."""
    if torch.is_autocast_enabled(decoder.device.type):
        # It keeps the cast weights of the layers themselves from step to step, and would cast a copy anew at each.
        return [PreparedLayer(layer, copies=False) for layer in decoder.layers]
    return _layers.get(decoder, decoder).layers


def forget_copies(decoder: nn.Module) -> None:
    """Free the copies of a decoder's weights and of its head's."""
    _layers.forget(decoder)
    _heads.forget(decoder)
