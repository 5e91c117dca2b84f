"""The cache of a decoder's steps: keys and values of all layers in one tensor, whose rows change places as targets do."""

import torch

# Places that are added at a time: so many, or one for so many tokens that are there. With fewer, all is copied more often.
_ADDED_PLACES, _TOKENS_PER_ADDED_PLACE = 16, 4


class StepCache:
    """Keys and values of the tokens so far. Which rows go on is noted when it is said, and done when they are read.

    Attributes:
        states: `(layers, keys and values, rows, heads, capacity, head_dim)`, once `settle` was called.
    """

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, like: torch.Tensor):
        self.states = like.new_empty(layers, 2, rows, heads, 0, head_dim)
        # What `states` was before rows changed places, to be written over when they do so again.
        self._spare: torch.Tensor | None = None
        self._chosen: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.states.shape[2] if self._chosen is None else len(self._chosen)

    @property
    def capacity(self) -> int:
        """Places for tokens in each row."""
        return self.states.shape[4]

    def grow(self, length: int, least: int) -> None:
        """Makes room for at least so many tokens; there are `length` so far."""
        self.settle(length)
        capacity = max(least, length + max(_ADDED_PLACES, length // _TOKENS_PER_ADDED_PLACE))
        grown = self.states.new_empty((*self.states.shape[:4], capacity, self.states.shape[5]))
        grown[:, :, :, :, :length] = self.states[:, :, :, :, :length]
        self.states, self._spare = grown, None

    def choose(self, rows: torch.Tensor) -> None:
        """Goes on with these rows, `(rows)`, in this order; some may be missing and some there several times."""
        self._chosen = rows if self._chosen is None else self._chosen[rows]

    def settle(self, length: int, unchanged: int = 0) -> None:
        """Lets the rows that were chosen take their places.

        Args:
            length: Tokens so far; behind them is nothing to be kept.
            unchanged: So many first tokens are the same in rows that change places.
        """
        rows, self._chosen = self._chosen, None
        if rows is None:
            return
        is_size_kept = len(rows) == self.states.shape[2]
        if is_size_kept and rows.device.type == "cpu":
            moved = (rows != torch.arange(len(rows))).nonzero()[:, 0]
            if len(moved) == 0:
                return
            # What is not moved need not be copied, but copying parts of rows costs several times as much.
            if 4 * len(moved) < len(rows) or 2 * unchanged > length:
                part = self.states[:, :, :, :, unchanged:length]
                part[:, :, moved] = part[:, :, rows[moved]]
                return
        shape = (*self.states.shape[:2], len(rows), *self.states.shape[3:])
        if self._spare is None or self._spare.shape != shape:
            self._spare = self.states.new_empty(shape)
        torch.index_select(self.states, 2, rows, out=self._spare)
        # A spare one of another size is of no use.
        self.states, self._spare = self._spare, self.states if is_size_kept else None


def layer_views(states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer `(rows * heads, length, head_dim)`, of `(layers, 2, rows, heads, length, head_dim)`.

    A view costs about as much as a small product: these are made for all layers at once.
    """
    return [layer.unbind(0) for layer in states.flatten(2, 3).unbind(0)]
