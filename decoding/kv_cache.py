"""The cache of a decoder's steps: keys and values of all layers, of a source or of the target so far."""

from collections.abc import Iterable

import torch

# Places that are added at a time: so many, or one for so many tokens that are there. With fewer, all is copied more often.
_ADDED_PLACES, _TOKENS_PER_ADDED_PLACE = 16, 4


class KeyValueCache:
    """Keys and values of each row's tokens.

    Keys stand in columns: so a product with several queries takes a fraction of the time on a CPU, where the kernels for many
    small matrices read the second one by its rows.

    Attributes:
        keys: `(layers, rows, heads, head_dim, capacity)`.
        values: `(layers, rows, heads, capacity, head_dim)`.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    @classmethod
    def of(cls, layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> "KeyValueCache":
        """A full one: keys and values of each layer, `(rows, heads, tokens, head_dim)`."""
        keys, values = zip(*layers, strict=True)
        return cls(torch.stack([states.transpose(2, 3) for states in keys]), torch.stack(values))

    def emptied(self) -> "KeyValueCache":
        """One of the same form without any places."""
        return KeyValueCache(self.keys[..., :0], self.values[..., :0, :])

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Places for tokens in each row."""
        return self.keys.shape[4]

    def grow(self, length: int, least: int) -> None:
        """Makes room for at least so many tokens; there are `length` so far."""
        capacity, (*heads, head_dim, _) = with_reserve(length, least), self.keys.shape
        keys, values = (
            self.keys.new_empty(*heads, head_dim, capacity),
            self.values.new_empty(*heads, capacity, head_dim),
        )
        keys[..., :length], values[..., :length, :] = self.keys[..., :length], self.values[..., :length, :]
        self.keys, self.values = keys, values

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Goes on with these rows, `(rows)`, in this order; some may be missing and some there several times."""
        self.keys, self.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)

    def keep_places(self, places: torch.Tensor) -> None:
        """Goes on with these places of each row, `(rows, count)`, which come to the front."""
        count, device = places.shape[1], places.device
        is_there = (places == torch.arange(count, device=device)).all(dim=0)
        # What stands where it belongs, at the beginning of all rows, stays.
        start = int(is_there.long().cumprod(dim=0).sum())
        if start == count:
            return
        places = places[:, start:]
        *heads, head_dim, capacity = self.keys.shape
        columns = places[:, None, None].expand(*heads, head_dim, -1)
        self.keys[..., start:count] = self.keys.gather(4, columns)
        # (layers, rows, heads, 1) + (rows, 1, count - start)
        lines = torch.arange(heads[0] * heads[1] * heads[2], device=device).view(*heads, 1) * capacity + places[:, None]
        values = self.values.view(-1, head_dim).index_select(0, lines.flatten())
        self.values[..., start:count, :] = values.view(*lines.shape, head_dim)

    def views(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer's first so many tokens keys, `(rows * heads, head_dim, length)`, and values, `(rows * heads, length,
        head_dim)`.

        A view costs about as much as a small product: these are made for all layers at once.
        """
        keys, values = self.keys[..., :length], self.values[..., :length, :]
        return list(zip(keys.flatten(1, 2).unbind(0), values.flatten(1, 2).unbind(0), strict=True))


def with_reserve(length: int, least: int) -> int:
    """Places to make for at least so many tokens, `length` of which are there already."""
    return max(least, length + max(_ADDED_PLACES, length // _TOKENS_PER_ADDED_PLACE))
