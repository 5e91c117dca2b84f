"""Linear layers for a decoder's step, of few rows: one product for those that read the same input, over a packed weight."""

from collections.abc import Sequence

import torch
from torch import nn

# A larger matrix takes so long that one call more does not count, and its copy would be much to hold.
LARGEST_SIZE = 2**22
# A larger one, of a layer by itself, is not worth a second copy, of which each layer of the decoder would need one.
_LARGEST_TRANSPOSED = 2**20
# A CPU multiplies so few rows by a transposed weight, which it reads in the order in which it lies, up to twice as fast.
_FEW_ROWS = 64


class StepLinear:
    """Some layers as one.

    Where they are plain and small their weights are copied, side by side and, for float32 on a CPU, transposed; where they know
    how to be one, they are; others are called one by one.

    Attributes:
        layers: The layers, in order.
        copied: Weights and biases that were copied.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        copies: bool = True,
        largest: int | None = None,
        largest_transposed: int = _LARGEST_TRANSPOSED,
    ):
        """Copies what helps.

        Args:
            layers: Of one input width, all with a bias or none.
            copies: Whether weights may be copied.
            largest: Entries of the largest weight to be copied at all, if not of that of a layer.
            largest_transposed: Entries of the largest weight of a layer by itself to be copied.
        """
        self.layers, self.copied = list(layers), []
        self._weight = self._bias = self._transposed = None
        kind = type(layers[0])
        if copies and len(layers) > 1 and hasattr(kind, "join") and all(type(layer) is kind for layer in layers):
            # Packed already, in a way that only the layers know.
            self.layers = [kind.join(layers)]
        largest = LARGEST_SIZE if largest is None else largest
        if not (copies and all(_is_small(layer, largest) for layer in layers)):
            return
        self._sources = [(layer, layer.weight, layer.bias) for layer in layers]
        first, *others = layers
        packs = first.weight.device.type == "cpu" and first.weight.dtype == torch.float32
        if others:
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
            self._weight = torch.cat([weight.detach() for weight in weights])
            if first.bias is not None:
                self._bias = torch.cat([bias.detach() for bias in biases])
            self.copied = weights + [bias for bias in biases if bias is not None]
        else:
            packs = packs and first.weight.numel() <= largest_transposed
            self._weight, self._bias = first.weight, first.bias
            self.copied = [first.weight] if packs else []
        if packs:
            self._transposed = self._weight.detach().t().contiguous()
            # One copy is enough.
            self._weight = self._transposed.t() if others else self._weight

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features of all)"""
        if self._weight is None:
            outputs = [layer(states) for layer in self.layers]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if self._transposed is None or states.dim() > 2 or states.size(0) > _FEW_ROWS:
            return nn.functional.linear(states, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(states, self._transposed)
        return torch.addmm(self._bias, states, self._transposed)

    def is_current(self) -> bool:
        """Whether the layers are still plain, with the weights and biases that they had; not whether these have changed."""
        return self._weight is None or all(
            type(layer) is nn.Linear and layer.weight is weight and layer.bias is bias
            for layer, weight, bias in self._sources
        )


def _is_small(layer: nn.Module, largest: int) -> bool:
    if type(layer) is not nn.Linear or layer.weight.numel() > largest or not layer.weight.is_contiguous():
        return False
    # A tensor that was made under inference mode has no version.
    return not any(part.is_inference() for part in layer.parameters())
