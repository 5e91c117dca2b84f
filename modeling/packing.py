"""Packed rows: several sequences in one row, without padding.

A packed row `(1, tokens)` holds the tokens of all sequences one after the other. Positions start again with each sequence. A
token sees only the tokens of its sequence, or of its source, so the attention is block-diagonal.
"""

from functools import cached_property

import torch

# In rows of fewer than 16 entries, a CPU's softmax takes ten times as long per entry.
MIN_GRID_WIDTH, GRID_WIDTH_MULTIPLE = 16, 8


def grid_width(longest: int) -> int:
    """Return the number of columns of a grid whose longest row has `longest` tokens."""
    return max(MIN_GRID_WIDTH, -(-longest // GRID_WIDTH_MULTIPLE) * GRID_WIDTH_MULTIPLE)


def check_lengths(lengths: torch.Tensor, num_tokens: int, waits: bool = False) -> None:
    """Check the lengths of the sequences in a packed row.

    Args:
        lengths: Tokens of each sequence, `(sequences)`.
        num_tokens: Tokens in the row.
        waits: True to check values on an accelerator, too, which the CPU then has to wait for.

    Raises:
        ValueError: If the lengths are not positive or their sum is not `num_tokens`.
    """
    is_tensor = isinstance(lengths, torch.Tensor)
    if not is_tensor or lengths.ndim != 1 or not len(lengths) or lengths.is_floating_point():
        kind = f"{tuple(lengths.shape)} of {lengths.dtype}" if is_tensor else type(lengths).__name__
        raise ValueError(
            f"Packed lengths must be a tensor of integers with one for each sequence, `(sequences)`, got {kind}."
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
    """The sequences of a packed row, with the tensors that attention kernels need.

    Args:
        lengths: Tokens of each sequence, `(sequences)`.
        num_tokens: Tokens in the row.
        longest: The largest length, if known. Reading the value from an accelerator would wait for the accelerator.

    Raises:
        ValueError: If the lengths are not positive, their sum is not `num_tokens`, or `longest` is wrong.
    """

    def __init__(self, lengths: torch.Tensor, num_tokens: int, longest: int | None = None):
        check_lengths(lengths, num_tokens, waits=longest is None)
        self.lengths = lengths.long()
        self.num_tokens = num_tokens
        if longest is None or lengths.device.type == "cpu":
            largest = int(lengths.max())
            if longest is not None and longest != largest:
                raise ValueError(f"The longest of the packed lengths must be {largest}, got {longest}.")
            longest = largest
        self.longest = longest

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def width(self) -> int:
        """Number of columns of a grid with one row per sequence."""
        return grid_width(self.longest)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Index of the first token of each sequence, `(sequences)`."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Cumulative lengths from 0 on, in int32, `(sequences + 1)`: `cu_seqlens` of attention kernels."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()

    @cached_property
    def ids(self) -> torch.Tensor:
        """Index of each token's sequence, `(tokens)`."""
        numbers = torch.arange(len(self), device=self.lengths.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, from 0, `(1, tokens)`."""
        indices = torch.arange(self.num_tokens, device=self.lengths.device)
        return (indices - self.starts[self.ids])[None, :]

    @cached_property
    def cells(self) -> torch.Tensor:
        """Cell of each token in the flattened grid `(sequences * width)`, `(tokens)`."""
        return self.ids * self.width + self.positions[0]

    @cached_property
    def is_filled(self) -> torch.Tensor:
        """Mask of the grid's cells, True if a cell holds a token, `(sequences, width)`."""
        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]


class Packing:
    """The sequences between which a packed attention runs.

    Args:
        queries: Sequences of the row of queries.
        keys: Sequences of the row of keys: `queries` for self-attention, the sources for cross-attention.
        is_causal: True if a token does not see later tokens.
        kernel: Name of a kernel of `packed_attention`.

    Attributes:
        grids: Storage of the kernel `grid`.

    Raises:
        ValueError: If the two rows hold different numbers of sequences.
    """

    def __init__(self, queries: Segments, keys: Segments, is_causal: bool, kernel: str):
        if len(queries) != len(keys):
            raise ValueError(
                f"A packed batch must have as many sources as targets, got {len(keys)} sources and {len(queries)} targets."
            )
        self.queries, self.keys, self.is_causal, self.kernel = queries, keys, is_causal, kernel
        self.grids: dict = {}

    def is_seen(self) -> torch.Tensor:
        """Return True if a query sees a key, `(1, 1, query tokens, key tokens)`."""
        is_seen = self.queries.ids[:, None] == self.keys.ids[None, :]
        if self.is_causal:
            is_seen = is_seen & (self.queries.positions[0][:, None] >= self.keys.positions[0][None, :])
        return is_seen[None, None]

    def is_seen_in_grid(self) -> torch.Tensor:
        """Return True if a query sees a key in the grid, `(sequences or 1, 1, query width or 1, key width)`.

        The rows of empty queries have any value.
        """
        if self.is_causal:
            indices = torch.arange(self.queries.width, device=self.queries.lengths.device)
            # An empty cell comes after all tokens of its sequence, so no token sees the cell.
            return (indices[:, None] >= indices[None, :])[None, None]
        return self.keys.is_filled[:, None, None, :]
