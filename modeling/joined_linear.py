"""Linear layers that read the same input, as one product: for a decoder's step, in which a call costs more than its work."""

from collections.abc import Sequence

import torch
from torch import nn

# A larger matrix takes so long that one call more does not count, and its copy would be much to hold.
_LARGEST_SIZE = 2**22


class JoinedLinear:
    """Some layers as one.

    Where they are plain and small their weights are copied side by side; others are called one by one.
    """

    def __init__(self, layers: Sequence[nn.Module], joins: bool = True):
        self.layers = list(layers)
        self._weight = self._bias = None
        self._versions, self._sample = [], None
        if joins and len(layers) > 1 and all(_is_small(layer) for layer in layers):
            self._weight = torch.cat([layer.weight.detach() for layer in layers])
            if layers[0].bias is not None:
                self._bias = torch.cat([layer.bias.detach() for layer in layers])
            self._versions, self._sample = self._take_versions(), self._take_sample()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features of all)"""
        if self._weight is not None:
            return nn.functional.linear(states, self._weight, self._bias)
        outputs = [layer(states) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def is_current(self) -> bool:
        """Whether the layers still have the weights that were copied.

        What writes into `weight.data` leaves no trace in the versions, so that a sample of the numbers is looked at too.
        """
        if self._weight is None:
            return True
        are_plain = all(_is_small(layer) for layer in self.layers)
        return are_plain and self._versions == self._take_versions() and torch.equal(self._sample, self._take_sample())

    def _parts(self) -> list[torch.Tensor]:
        return [part for layer in self.layers for part in (layer.weight, layer.bias) if part is not None]

    def _take_versions(self) -> list[tuple[int, int]]:
        return [(part.data_ptr(), part._version) for part in self._parts()]

    def _take_sample(self) -> torch.Tensor:
        return torch.cat([part.detach().flatten()[:: max(1, part.numel() // 16)] for part in self._parts()])


def _is_small(layer: nn.Module) -> bool:
    # A tensor that was made under inference mode has no version.
    return type(layer) is nn.Linear and layer.weight.numel() <= _LARGEST_SIZE and not layer.weight.is_inference()
