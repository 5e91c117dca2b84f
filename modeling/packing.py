"""Packing: several sequences in one row, without padding, and where each of them lies.

A packed row holds the tokens of all sequences one after the other, `(1, tokens)`. Positions start again with each sequence, and
a token sees the tokens of its own sequence (or of its own source) alone: the attention is block-diagonal.
"""

from functools import cached_property

import torch

# Below 16 entries in a row, the softmax of a CPU is ten times slower for each.
MIN_GRID_WIDTH, GRID_WIDTH_MULTIPLE = 16, 8


def grid_width(longest: int) -> int:
    """Columns of a grid whose longest row holds so many tokens."""
    return max(MIN_GRID_WIDTH, -(-longest // GRID_WIDTH_MULTIPLE) * GRID_WIDTH_MULTIPLE)


def check_lengths(lengths: torch.Tensor, num_tokens: int, waits: bool = False) -> None:
    """Refuses lengths of sequences that a row cannot hold.

    Args:
        lengths: Tokens of each sequence, `(sequences)`.
        num_tokens: Tokens in the row.
        waits: Whether an accelerator is waited for, only to ask it whether the caller counted right.

    Raises:
        ValueError: If they are not those of non-empty sequences that fill the row.
    """
    is_tensor = isinstance(lengths, torch.Tensor)
    if not is_tensor or lengths.ndim != 1 or not len(lengths) or lengths.is_floating_point():
        given = f"{tuple(lengths.shape)} of {lengths.dtype}" if is_tensor else type(lengths).__name__
        raise ValueError(
            f"Packed lengths must be a tensor of integers with one for each sequence, `(sequences)`, got {given}."
        )
    if lengths.device.type != "cpu" and not waits:
        return
    total, shortest = int(lengths.sum()), int(lengths.min())
    if total != num_tokens or shortest < 1:
        raise ValueError(
            f"Packed lengths must be at least 1 and add up to the {num_tokens} tokens of the row, "
            f"got {lengths.tolist()} with sum {total}."
        )


class Segments:
    """Where each sequence lies in a packed row, in the forms in which attention kernels ask for it. Computed when asked for."""

    def __init__(self, lengths: torch.Tensor, num_tokens: int, longest: int | None = None):
        """Args:
        lengths: Tokens of each sequence, `(sequences)`.
        num_tokens: Tokens in the row.
        longest: The largest of the lengths, where it is known: asking an accelerator for it waits for the accelerator.

        Raises:
            ValueError: If the lengths are not those of non-empty sequences that fill the row.
        """
        check_lengths(lengths, num_tokens, waits=longest is None)
        self.lengths = lengths.long()
        self.num_tokens = num_tokens
        if longest is None or lengths.device.type == "cpu":
            found = int(lengths.max())
            if longest is not None and longest != found:
                raise ValueError(f"The longest of the packed lengths must be {found}, got {longest}.")
            longest = found
        self.longest = longest

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def width(self) -> int:
        """Columns of the grid in which each sequence has a row of its own."""
        return grid_width(self.longest)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Index of the first token of each sequence, `(sequences)`."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def offsets(self) -> torch.Tensor:
        """The starts and the end, in 32 bits, `(sequences + 1)`: what kernels call cumulative sequence lengths."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()

    @cached_property
    def ids(self) -> torch.Tensor:
        """For each token the number of its sequence, `(tokens)`."""
        numbers = torch.arange(len(self), device=self.lengths.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @cached_property
    def positions(self) -> torch.Tensor:
        """For each token its place in its sequence, from 0, `(1, tokens)`."""
        indices = torch.arange(self.num_tokens, device=self.lengths.device)
        return (indices - self.starts[self.ids])[None, :]

    @cached_property
    def is_filled(self) -> torch.Tensor:
        """Which cells of the grid hold a token, `(sequences, width)`."""
        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]


class Packing:
    """What one attention is told of a packed batch: whose tokens ask, and whose are seen."""

    def __init__(self, queries: Segments, keys: Segments, is_causal: bool, kernel: str):
        """Args:
        queries: Of the row that asks.
        keys: Of the row that is seen, with as many sequences: the same for self-attention, the source for cross-attention.
        is_causal: Whether a token sees nothing that comes after it.
        kernel: What computes it (see `packed_attention`).

        Raises:
            ValueError: If the two rows hold different numbers of sequences.
        """
        if len(queries) != len(keys):
            raise ValueError(
                f"A packed batch must have as many sources as targets, got {len(keys)} sources and {len(queries)} targets."
            )
        self.queries, self.keys, self.is_causal, self.kernel = queries, keys, is_causal, kernel
        self.grids: dict = {}  # see `grid_of`

    def is_seen(self) -> torch.Tensor:
        """Which token sees which, `(1, 1, query tokens, key tokens)`: the plain form, quadratic in the length of the row."""
        seen = self.queries.ids[:, None] == self.keys.ids[None, :]
        if self.is_causal:
            seen = seen & (self.queries.positions[0][:, None] >= self.keys.positions[0][None, :])
        return seen[None, None]

    def is_seen_in_grid(self) -> torch.Tensor:
        """The same in the grid, `(sequences or 1, 1, query width or 1, key width)`. What empty cells see does not matter."""
        if self.is_causal:
            indices = torch.arange(self.queries.width, device=self.queries.lengths.device)
            # An empty cell comes after all tokens of its sequence, so none of them sees it.
            return (indices[:, None] >= indices[None, :])[None, None]
        return self.keys.is_filled[:, None, None, :]
