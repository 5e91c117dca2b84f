"""A decoder's layer, made ready for steps of one token: everything looked up, and what can be one product joined into one."""

import operator
import weakref

import torch
from torch import nn

from .attention import MetaphraseAttention
from .joined_linear import JoinedLinear
from .layers import MetaphraseDecoderLayer

# What was made ready, for as long as the decoder is there; not in the decoder, which is copied and saved.
_ready: weakref.WeakKeyDictionary[nn.Module, list["StepLayer"]] = weakref.WeakKeyDictionary()


class StepLayer:
    """The parts of one layer.

    Attributes:
        token_projection: To queries, keys and values of the self-attention, one behind the other.
        memory_query: To the queries of the cross-attention.
        inner_projection: To the feed-forward's inner width: the gate, if there is one, and what it lets through.
    """

    def __init__(self, layer: MetaphraseDecoderLayer, joins: bool = True):
        """Looks everything up.

        Args:
            layer: The layer, in evaluation.
            joins: Whether weights may be copied, so that one product does for several.
        """
        tokens, memory, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        self._parts = _parts(layer)
        self.token_projection = JoinedLinear([tokens.q_proj, tokens.k_proj, tokens.v_proj], joins)
        self.inner_projection = JoinedLinear([mlp.gate_proj, mlp.up_proj] if mlp.is_gated else [mlp.up_proj], joins)
        self.token_output, self.memory_query, self.memory_output = tokens.o_proj, memory.q_proj, memory.o_proj
        self.inner_output, self.activation, self.is_gated = mlp.down_proj, mlp.activation, mlp.is_gated
        self.token_norms, self.memory_norms = _head_norms(tokens), _head_norms(memory)
        self.token_scaling, self.memory_scaling = tokens.scaling, memory.scaling
        self.norms = (layer.self_attn_norm, layer.cross_attn_norm, layer.mlp_norm)
        self.is_pre_norm = layer.is_pre_norm

    def is_current(self, layer: MetaphraseDecoderLayer) -> bool:
        """Whether the layer still has the parts, and these the weights, that it had."""
        parts = _parts(layer)
        are_same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return are_same and self.token_projection.is_current() and self.inner_projection.is_current()

    def feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)"""
        inner = self.inner_projection(states)
        if self.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            return self.inner_output(self.activation(gate) * inner)
        return self.inner_output(self.activation(inner))


def _head_norms(attention: MetaphraseAttention) -> tuple[nn.Module, nn.Module] | None:
    return (attention.q_norm, attention.k_norm) if attention.config.qk_norm else None


def _parts(layer: MetaphraseDecoderLayer) -> list[nn.Module]:
    """What may be put in place of something else, as adapters and quantization do."""
    return [*layer.children(), *layer.self_attn.children(), *layer.cross_attn.children(), *layer.mlp.children()]


def step_layers(decoder: nn.Module) -> list[StepLayer]:
    """The layers of a decoder as its weights are now; what was made before serves as long as these are the same."""
    if torch.is_autocast_enabled(decoder.device.type):
        # It keeps the cast weights of the layers themselves from step to step, and would cast a copy anew at each.
        return [StepLayer(layer, joins=False) for layer in decoder.layers]
    layers = _ready.get(decoder)
    are_there = layers is not None and len(layers) == len(decoder.layers)
    if not are_there or not all(map(StepLayer.is_current, layers, decoder.layers)):
        layers = _ready[decoder] = [StepLayer(layer) for layer in decoder.layers]
    return layers


def forget(decoder: nn.Module) -> None:
    """Frees the copies of a decoder's weights."""
    _ready.pop(decoder, None)
