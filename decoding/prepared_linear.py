"""Linear layers for the few rows of a decoding step: one product for all layers that read the same input."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from metaphrase.decoding.prepacked_weights import LARGEST_SIZE, PrepackedWeight, can_prepack, is_plain
from metaphrase.decoding.weight_copies import can_record

# Every decoder layer would hold a transposed copy of a larger single weight, which gains too little for the memory.
_LARGEST_TRANSPOSED = 2**20
# A CPU multiplies up to so many rows by a transposed weight, which it reads in order of memory, up to twice as fast.
_FEW_ROWS = 64


class PreparedLinear:
    """Linear layers that read the same input, as one product.

    Small layers of torch are copied: side by side, and on a CPU in float32 also transposed and prepacked. Quantized layers are
    joined by their own `join`. Other layers are called one by one.

    Attributes:
        layers: The layers; quantized layers after they were joined.
        copied: Weights and biases whose copies depend on them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        copies: bool = True,
        largest: int | None = None,
        largest_transposed: int = _LARGEST_TRANSPOSED,
    ):
        """Choose which copies to make. A copy is made when it is first needed.

        Args:
            layers: Layers of one input width, all with a bias or none.
            copies: True allows copies.
            largest: Most entries of a weight to be copied. None means `LARGEST_SIZE`.
            largest_transposed: Most entries of a single layer's weight to be transposed.
        """
        self.copied: list[torch.Tensor] = []
        self.layers, self._max_transposed_rows, kind = list(layers), 0, type(layers[0])
        self._calls = self.layers
        if copies and hasattr(kind, "join") and all(type(layer) is kind for layer in layers):
            self.layers = self.layers if len(layers) == 1 else [kind.join(layers)]
            # The call of a module takes a tenth of the time of its product.
            self._calls = [self.layers[0].forward]
        largest = LARGEST_SIZE if largest is None else largest
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
