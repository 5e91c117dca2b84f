"""A record of weights that were copied, which tells whether they are still what was copied."""

from collections.abc import Sequence

import torch

_SAMPLED_ENTRIES = 16


class WeightRecord:
    """Where weights lie, how often they were written to, and a few of their entries.

    What writes into `weight.data` leaves no trace in the counts: for that there are the entries.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        """Args:
        weights: Contiguous, and not made under inference mode.
        """
        self._weights = list(weights)
        self._places = self._take_places()
        # Views, which show what is there at any time, as long as the weights lie where they do.
        self._views = [
            weight.detach().flatten()[:: max(1, weight.numel() // _SAMPLED_ENTRIES)] for weight in self._weights
        ]
        self._entries = self._take_entries()

    def is_current(self) -> bool:
        """Whether nothing has been written to the weights, as far as can be seen."""
        return self._places == self._take_places() and torch.equal(self._entries, self._take_entries())

    def _take_places(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]

    def _take_entries(self) -> torch.Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)
