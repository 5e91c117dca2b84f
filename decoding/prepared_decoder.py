"""The layers and the head of a decoder, prepared for decoding steps: projections joined and copied, no calls of modules."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from metaphrase.decoding.prepacked_weights import LARGEST_SIZE, PrepackedWeight, can_prepack, is_plain
from metaphrase.decoding.quantization import PackedLinear
from metaphrase.decoding.shortlist import ShortlistProjection, can_shortlist
from metaphrase.decoding.weight_copies import PreparedCopies, can_record
from metaphrase.modeling.compat import is_hooked, is_offloaded
from metaphrase.modeling.layers import MetaphraseAttention, MetaphraseDecoderLayer
from metaphrase.modeling.normalization import MetaphraseRMSNorm

# A model has one head, which takes a large part of a step: a copy pays up to a larger size than in a layer.
_LARGEST_COPY = 2**26
# Every decoder layer would hold a transposed copy of a larger single weight, which gains too little for the memory.
_LARGEST_TRANSPOSED = 2**20
# A CPU multiplies up to so many rows by a transposed weight, which it reads in order of memory, up to twice as fast.
_FEW_ROWS = 64


class PreparedLinear:
    """Linear layers that read the same input, as one product.

    Small layers of torch are copied: side by side, and on a CPU in float32 also transposed and prepacked. Quantized layers are
    joined. Other layers are called one by one.

    Attributes:
        copied: Weights and biases whose copies depend on them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        copies: bool = True,
        largest: int = LARGEST_SIZE,
        largest_transposed: int = _LARGEST_TRANSPOSED,
    ):
        """Choose which copies to make. A copy is made when it is first needed.

        Args:
            layers: Layers of one input width, all with a bias or none.
            copies: True allows copies.
            largest: Most entries of a weight to be copied.
            largest_transposed: Most entries of a single layer's weight to be transposed.
        """
        self.copied: list[torch.Tensor] = []
        self._calls, self._max_transposed_rows, kind = list(layers), 0, type(layers[0])
        if copies and issubclass(kind, PackedLinear) and all(type(layer) is kind for layer in layers):
            # The call of a module takes a tenth of the time of its product.
            self._calls = [(layers[0] if len(layers) == 1 else kind(*layers)).forward]
        self._reads_weights = copies and all(can_record(layer) and layer.weight.numel() <= largest for layer in layers)
        if not self._reads_weights:
            return
        self._weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        is_single, are_plain = len(layers) == 1, all(map(is_plain, layers))
        self._is_packed = are_plain and can_prepack(sum(map(len, self._weights)), self._weights[0].shape[1])
        self._is_transposed = are_plain and not (is_single and self._weights[0].numel() > largest_transposed)
        self._bias = biases[0]
        if not is_single and biases[0] is not None:
            self._bias = torch.cat([bias.detach() for bias in biases])
            self.copied += biases
        if not is_single or self._is_packed or self._is_transposed:
            self.copied += self._weights
        if self._is_transposed:
            self._max_transposed_rows = 1 if self._is_packed else _FEW_ROWS

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features of all layers)"""
        if states.dim() == 2 and len(states) <= self._max_transposed_rows:
            weight, bias = self._transposed, self._bias
            return torch.mm(states, weight) if bias is None else torch.addmm(bias, states, weight)
        if not self._reads_weights:
            outputs = [call(states) for call in self._calls]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        has_several_rows = states.numel() > states.shape[-1]
        if self._is_packed and has_several_rows:
            return self._packed(states)
        return nn.functional.linear(states, self._weight, self._bias)

    @functools.cached_property
    def _weight(self) -> torch.Tensor:
        """All weights side by side, (out_features, in_features). A view, if there is a transposed copy."""
        return self._transposed.t() if self._is_transposed and len(self._weights) > 1 else self._join()

    @functools.cached_property
    def _transposed(self) -> torch.Tensor:
        return self._join().detach().t().contiguous()

    @functools.cached_property
    def _packed(self) -> PrepackedWeight:
        return PrepackedWeight(self._join(), self._bias)

    def _join(self) -> torch.Tensor:
        weights = self._weights
        # A single weight stays the parameter, so that `_weight` follows a cast or a move of the model.
        return weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])


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


def _prepare_layers(layers: nn.ModuleList) -> tuple[list[PreparedLayer], list[torch.Tensor]]:
    prepared = [PreparedLayer(layer) for layer in layers]
    return prepared, [weight for layer in prepared for weight in layer.copied]


def _prepare_head(head: nn.Linear) -> tuple[tuple[PreparedLinear, ShortlistProjection | None], list[torch.Tensor]]:
    linear = PreparedLinear([head], largest=_LARGEST_COPY, largest_transposed=LARGEST_SIZE)
    shortlist = ShortlistProjection(head) if can_shortlist(head) else None
    return (linear, shortlist), list(head.parameters())


_layers, _heads = PreparedCopies(_prepare_layers), PreparedCopies(_prepare_head)


def prepared_layers(decoder: nn.Module) -> list[PreparedLayer]:
    """Return the prepared layers of a decoder for its current weights."""
    if torch.is_autocast_enabled(decoder.device.type):
        # Autocast caches the cast weights of the layers. It would cast copies again at each step.
        return [PreparedLayer(layer, copies=False) for layer in decoder.layers]
    return _layers.get(decoder, decoder.layers)


def prepared_head(
    decoder: nn.Module, head: nn.Module
) -> tuple[Callable[[torch.Tensor], torch.Tensor], ShortlistProjection | None]:
    """Return the projections of a decoder's output for its current weights.

    Args:
        decoder: The decoder.
        head: Its head, from (..., D) to logits (..., V).

    Returns:
        A projection to logits, and one to shortlists, or None where all logits are computed as fast.
    """
    is_plain_call = not (is_hooked(head) or is_offloaded(head) or torch.is_autocast_enabled(decoder.device.type))
    if is_plain_call and can_record(head) and head.weight.device.type == "cpu":
        return _heads.get(decoder, head)
    return head, None


def prepared_rows(head: nn.Module, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a head's projection to the logits of some tokens, (count,), or None if its rows cannot be selected."""
    if is_hooked(head) or is_offloaded(head):
        return None
    if isinstance(head, PackedLinear):
        return head.select_outputs(tokens).forward
    if type(head) is not nn.Linear:
        return None
    # Indexing takes several times as long. A transposed or prepacked copy would not pay for one batch.
    weight, bias = (
        None if part is None else part.detach().index_select(0, tokens) for part in (head.weight, head.bias)
    )
    return functools.partial(nn.functional.linear, weight=weight, bias=bias)
