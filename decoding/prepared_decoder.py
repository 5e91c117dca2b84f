"""The layers and the head of a decoder, prepared for decoding steps: projections joined and copied, no calls of modules."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from metaphrase.decoding.prepared_linear import LARGEST_SIZE, PreparedLinear
from metaphrase.decoding.shortlist import ShortlistProjection, can_shortlist
from metaphrase.decoding.weight_copies import ModuleRecord, PreparedCopies, WeightRecord, can_record
from metaphrase.modeling.attention import MetaphraseAttention
from metaphrase.modeling.compat import is_hooked, is_offloaded
from metaphrase.modeling.layers import MetaphraseDecoderLayer
from metaphrase.modeling.normalization import MetaphraseRMSNorm

# A model has one head, which takes a large part of a step: a copy pays up to a larger size than in a layer.
_LARGEST_COPY = 2**26


class PreparedLayer:
    """The projections, norms and activation of one decoder layer.

    Attributes:
        self_qkv: Projection to queries, keys and values of the self-attention, side by side.
        self_output: Output projection of the self-attention.
        cross_query: Projection to the queries of the cross-attention.
        cross_key_value: Projection to its keys and values, side by side.
        cross_output: Output projection of the cross-attention.
        mlp_input: Projection to the inner width: gate, if there is one, and up projection, side by side.
        mlp_output: Down projection.
        norms: Norms of self-attention, cross-attention and feed-forward network.
    """

    def __init__(self, layer: MetaphraseDecoderLayer, copies: bool = True):
        """Args:
        layer: The layer, in evaluation mode.
        copies: True allows copies of weights.
        """
        attention, cross, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        self.self_qkv = PreparedLinear([attention.q_proj, attention.k_proj, attention.v_proj], copies)
        self.self_output = PreparedLinear([attention.o_proj], copies)
        self.cross_query = PreparedLinear([cross.q_proj], copies)
        self.cross_key_value = PreparedLinear([cross.k_proj, cross.v_proj], copies)
        self.cross_output = PreparedLinear([cross.o_proj], copies)
        self.mlp_input = PreparedLinear([mlp.gate_proj, mlp.up_proj] if mlp.is_gated else [mlp.up_proj], copies)
        self.mlp_output = PreparedLinear([mlp.down_proj], copies)
        self.activation, self.is_gated = mlp.activation, mlp.is_gated
        self.self_head_norms, self.cross_head_norms = _head_norms(attention), _head_norms(cross)
        self.self_scaling, self.cross_scaling = attention.scaling, cross.scaling
        self.norms = tuple(map(prepared_norm, (layer.self_attn_norm, layer.cross_attn_norm, layer.mlp_norm)))
        self.is_pre_norm = layer.is_pre_norm

    @property
    def copied(self) -> list[torch.Tensor]:
        """The weights and biases that were copied."""
        linears = [value for value in vars(self).values() if isinstance(value, PreparedLinear)]
        return [weight for linear in linears for weight in linear.copied]

    def feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)"""
        inner = self.mlp_input(states)
        if self.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            return self.mlp_output(self.activation(gate) * inner)
        return self.mlp_output(self.activation(inner))


def prepared_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of a norm, without the call of a module where the class is known."""
    if type(norm) is nn.LayerNorm:
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda states: torch.layer_norm(states, shape, weight, bias, eps)
    return norm.forward if type(norm) in (MetaphraseRMSNorm, nn.Identity) else norm


def _head_norms(attention: MetaphraseAttention) -> tuple[nn.Module, nn.Module] | None:
    return (attention.q_norm, attention.k_norm) if attention.config.qk_norm else None


class _PreparedLayers:
    """The prepared layers of a decoder, and a record of the weights that were copied."""

    def __init__(self, decoder: nn.Module):
        self.layers = [PreparedLayer(layer) for layer in decoder.layers]
        self._record = ModuleRecord(decoder.layers)
        self._weights = WeightRecord([weight for layer in self.layers for weight in layer.copied])

    def is_current(self, decoder: nn.Module) -> bool:
        return self._record.is_current(decoder.layers) and self._weights.is_current()


class _PreparedHead:
    """The prepared forms of a head, made when first needed, and a record of its weights."""

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
        return self._can_copy == _can_copy(head) and self._record.is_current(head) and self._weights.is_current()


def _can_copy(head: nn.Module) -> bool:
    return can_record(head) and head.weight.device.type == "cpu"


_layers, _heads = PreparedCopies(_PreparedLayers), PreparedCopies(_PreparedHead)


def prepared_layers(decoder: nn.Module) -> list[PreparedLayer]:
    """Return the prepared layers of a decoder for its current weights."""
    if torch.is_autocast_enabled(decoder.device.type):
        # Autocast caches the cast weights of the layers. It would cast copies again at each step.
        return [PreparedLayer(layer, copies=False) for layer in decoder.layers]
    return _layers.get(decoder, decoder).layers


def prepared_head(decoder: nn.Module, head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the projection of a decoder's output (..., D) to logits (..., V), for its current weights."""
    return _heads.get(decoder, head).linear if _can_prepare(decoder, head) else head


def prepared_shortlist(decoder: nn.Module, head: nn.Module) -> ShortlistProjection | None:
    """Return the projection of a decoder's output to shortlists, or None where all logits are computed as fast."""
    return _heads.get(decoder, head).shortlist if _can_prepare(decoder, head) else None


def _can_prepare(decoder: nn.Module, head: nn.Module) -> bool:
    return not (is_hooked(head) or is_offloaded(head) or torch.is_autocast_enabled(decoder.device.type))


def forget_copies(decoder: nn.Module) -> None:
    """Free the copies of a decoder's weights and of its head's."""
    _layers.forget(decoder)
    _heads.forget(decoder)
