"""The kv cache of the fast decoder: keys and values of all layers, of the sources or of the targets so far."""

from collections.abc import Iterable

import torch

# A cache grows by so many tokens, or by one for so many tokens in it. Smaller steps would copy it more often.
_ADDED_TOKENS, _TOKENS_PER_ADDED_TOKEN = 16, 4


class KeyValueCache:
    """Keys and values of the tokens of each row.

    Keys stand in columns. On a CPU, the kernels for many small matrices read the second one by rows: a product with several
    queries takes a fraction of the time.

    Attributes:
        keys: Shape (layers, rows, heads, head_dim, capacity).
        values: Shape (layers, rows, heads, capacity, head_dim).
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    @classmethod
    def from_layers(cls, layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> "KeyValueCache":
        """Return a full cache from keys and values of each layer, shape (rows, heads, tokens, head_dim)."""
        keys, values = zip(*layers, strict=True)
        return cls(torch.stack([states.transpose(2, 3) for states in keys]), torch.stack(values))

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Most tokens of each row."""
        return self.keys.shape[4]

    def grow(self, length: int, least: int) -> None:
        """Grow the capacity to at least `least` tokens, and keep the first `length` tokens."""
        *heads, head_dim, _ = self.keys.shape
        capacity = with_reserve(length, least)
        keys = self.keys.new_empty(*heads, head_dim, capacity)
        values = self.values.new_empty(*heads, capacity, head_dim)
        keys[..., :length], values[..., :length, :] = self.keys[..., :length], self.values[..., :length, :]
        self.keys, self.values = keys, values

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace the rows by the rows with these indices, in this order. An index may repeat."""
        self.keys, self.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)

    def select_tokens(self, indices: torch.Tensor) -> None:
        """Move the tokens with these indices, (rows, count), to the front of each row."""
        count, device = indices.shape[1], indices.device
        is_in_place = (indices == torch.arange(count, device=device)).all(dim=0)
        # The first tokens that stay in place in all rows are not moved.
        start = int(is_in_place.long().cumprod(dim=0).sum())
        if start == count:
            return
        indices = indices[:, start:]
        *heads, head_dim, capacity = self.keys.shape
        columns = indices[:, None, None].expand(*heads, head_dim, -1)
        self.keys[..., start:count] = self.keys.gather(4, columns)
        # (layers, rows, heads, 1) + (rows, 1, count - start)
        flat = torch.arange(heads[0] * heads[1] * heads[2], device=device).view(*heads, 1) * capacity + indices[:, None]
        values = self.values.view(-1, head_dim).index_select(0, flat.flatten())
        self.values[..., start:count, :] = values.view(*flat.shape, head_dim)

    def views(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys (rows * heads, head_dim, length) and values (rows * heads, length, head_dim) of each layer.

        A view costs as much as a small product. One call makes the views of all layers.
        """
        keys, values = self.keys[..., :length], self.values[..., :length, :]
        return list(zip(keys.flatten(1, 2).unbind(0), values.flatten(1, 2).unbind(0), strict=True))


def with_reserve(length: int, least: int) -> int:
    """Return the capacity to allocate for at least `least` tokens, of which `length` are there."""
    return max(least, length + max(_ADDED_TOKENS, length // _TOKENS_PER_ADDED_TOKEN))
