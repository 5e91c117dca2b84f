"""Records of weights that were copied, which tell whether they are still what was copied."""

import math
from collections.abc import Sequence

import torch
from torch import nn

# A read takes as long as a hundred additions, and there is one for each entry.
_SAMPLED_ENTRIES = 64


class WeightRecord:
    """Where weights lie, how often they were written to, and some of their entries.

    What writes into `weight.data`, or into an array that shares its memory, leaves no trace in the counts. For that there are the
    entries, spread over rows and columns: a write of a good part of a weight is seen, one of a single row may not be.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        """Args:
        weights: Contiguous, and not made under inference mode.
        """
        self._weights = list(weights)
        self._places = self._take_places()
        # Views, which show what is there at any time, as long as the weights lie where they do.
        self._views = [weight.detach().flatten()[:: _stride(weight)] for weight in self._weights]
        self._entries = self._take_entries()

    def is_current(self) -> bool:
        """Whether nothing has been written to the weights, as far as can be seen."""
        return self._places == self._take_places() and torch.equal(self._entries, self._take_entries())

    def _take_places(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]

    def _take_entries(self) -> torch.Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


def can_record(layer: nn.Module) -> bool:
    """Whether a layer is a linear one of torch's own, and changes of its weights can be seen."""
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous():
        return False
    # A tensor that was made under inference mode has no version.
    return not any(part.is_inference() for part in layer.parameters())


def _stride(weight: torch.Tensor) -> int:
    """A step through all entries that meets other columns in each row: it has no divisor in common with the length of a row."""
    longest = max(1, weight.numel() // _SAMPLED_ENTRIES)
    return next(stride for stride in range(longest, 0, -1) if math.gcd(stride, weight.shape[-1]) == 1)
