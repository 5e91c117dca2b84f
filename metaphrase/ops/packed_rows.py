"""Packed rows: several sequences in one row, without padding.

A packed row `(1, tokens)` holds the tokens of all sequences one after the other. Positions start again with each sequence. A
token sees only the tokens of its sequence, or of its source, so the attention is block-diagonal. Its kernels are:

- `reference`: the model's attention with a mask of the full row, quadratic in the length of the row. Tests compare the other
  kernels with `reference`.
- `varlen`: torch's flash attention, for half precision on an Ampere GPU or newer, without bias and dropout.
- `window`: blocks of the row with the keys around them, for windows. Linear in the length of the row. A padded batch is such a
  row, too: its rows are one after the other, and padding belongs to no sequence.
- `grid`: a padded grid with one row per sequence, for all other cases.
"""

import functools
import inspect
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from metaphrase.errors import MetaphraseError
from metaphrase.modeling.operators import soft_cap

# In rows of fewer than 16 entries, a CPU's softmax takes ten times as long per entry.
_MIN_GRID_WIDTH, _GRID_WIDTH_MULTIPLE = 16, 8
# Least queries of a block of the kernel `window`. Smaller blocks would have many keys for each query.
_LEAST_BLOCK = 64


Window = tuple[int, int] | None


def grid_width(longest: int) -> int:
    return max(_MIN_GRID_WIDTH, -(-longest // _GRID_WIDTH_MULTIPLE) * _GRID_WIDTH_MULTIPLE)


def block_size(window: tuple[int, int]) -> int:
    """Return the number of queries in a block of the kernel `window`, about half of its keys."""
    return max(_LEAST_BLOCK, 1 + sum(window))


class PackedSequences:
    """Sequences of `lengths` `(sequences)` in a packed row, with the tensors that attention kernels need.

    If `longest` is known, no value is read from an accelerator, which would wait.

    Attributes:
        width: Columns of the grid.
        starts: Index of the first token of each sequence, `(sequences)`.
        ids: Index of each token's sequence, `(tokens)`.
        positions: Position of each token in its sequence, from 0, `(1, tokens)`.
    """

    def __init__(self, lengths: torch.Tensor, num_tokens: int, longest: int | None = None):
        if longest is None or lengths.device.type == "cpu":
            values = lengths.tolist()
            if sum(values) != num_tokens or min(values) < 1:
                raise MetaphraseError(
                    f"Packed lengths must be at least 1 and add up to the {num_tokens} tokens of the row, got {values}."
                )
            longest = max(values)
        self.lengths, self.longest, self.width = lengths.long(), longest, grid_width(longest)
        self.num_tokens, self.starts = num_tokens, self.lengths.cumsum(0) - self.lengths
        numbers = torch.arange(num_tokens, device=lengths.device)
        self.ids = numbers[: len(lengths)].repeat_interleave(self.lengths, output_size=num_tokens)
        self.positions = (numbers - self.starts[self.ids])[None, :]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths from 0 on, in int32, `(sequences + 1)`, for attention kernels."""
        return nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()

    @cached_property
    def cells(self) -> torch.Tensor:
        """Cell of each token in the flattened grid `(sequences * width)`, `(tokens)`."""
        return self.ids * self.width + self.positions[0]


class Packing:
    """The sequences between which a packed attention runs, the name of a kernel, and the window of a token."""

    def __init__(
        self, queries: PackedSequences, keys: PackedSequences, is_causal: bool, kernel: str, window: Window = None
    ):
        if len(queries.lengths) != len(keys.lengths):
            raise MetaphraseError(
                "A packed batch must have as many sources as targets, "
                f"got {len(keys.lengths)} sources and {len(queries.lengths)} targets."
            )
        self.queries, self.keys, self.is_causal, self.kernel, self.window = queries, keys, is_causal, kernel, window
        # Storage of the kernel `grid`.
        self.grids: dict = {}
        # In a decoder, the packing of the cross-attention of the same layer.
        self.cross: Packing | None = None

    def is_seen(self) -> torch.Tensor:
        """Return True if a query sees a key, `(1, 1, query tokens, key tokens)`."""
        is_near = self._is_near(self.queries.positions.mT, self.keys.positions, self.queries.lengths[self.keys.ids])
        return (is_near & (self.queries.ids[:, None] == self.keys.ids))[None, None]

    def _is_near(self, queries: torch.Tensor, keys: torch.Tensor, query_lengths: torch.Tensor) -> torch.Tensor:
        """Return True if a query at a position sees a key at a position of the same sequence, which has so many queries."""
        left, right = (math.inf, math.inf) if self.window is None else self.window
        distance = keys - queries
        return (distance >= -left) & (distance <= (0 if self.is_causal else right))

    def is_seen_in_grid(self) -> torch.Tensor:
        """Return True if a query sees a key in the grid, `(sequences or 1, 1, query width or 1, key width)`.

        The rows of empty queries have any value.
        """
        indices = torch.arange(self.keys.width, device=self.keys.lengths.device)
        if self.is_causal:
            # An empty cell comes after all tokens of its sequence, so no token sees the cell.
            return (indices[:, None] >= indices[None, :])[None, None]
        return (indices < self.keys.lengths[:, None])[:, None, None, :]

    def is_seen_in_blocks(self) -> torch.Tensor:
        """Return True if a query of a block sees one of the keys around the block, `(blocks, 1, query, key)`."""
        (left, right), size = self.window, block_size(self.window)
        # Padding and the cells beyond the row belong to no sequence.
        ids = self.queries.ids[None, None, :, None] + 1
        queries, keys = (split_blocks(ids, size, *sides)[:, :, :, 0] for sides in ((0, 0), (left, right)))
        indices = torch.arange(left + size + right, device=ids.device)
        distance = indices[None, :] - indices[:size, None]
        is_near = (distance >= 0) & (distance <= left + right)
        return (queries[:, :, :, None] == keys[:, :, None, :]) & is_near


class MergedPacking(Packing):
    """The sequences of an attention of targets to their own tokens, and to their sources: both are the keys of one softmax."""

    def __init__(self, targets: PackedSequences, sources: PackedSequences, kernel: str, window: Window):
        longest = targets.longest + sources.longest
        keys = PackedSequences(targets.lengths + sources.lengths, targets.num_tokens + sources.num_tokens, longest)
        super().__init__(targets, keys, True, kernel, window)
        # Index of each key among all tokens of the targets, and behind them those of the sources, `(keys)`.
        self.order = torch.cat((targets.ids, sources.ids)).argsort(stable=True)

    def is_seen_in_grid(self) -> torch.Tensor:
        queries, keys = (torch.arange(side.width, device=side.lengths.device) for side in (self.queries, self.keys))
        is_near = self._is_near(queries[:, None], keys, self.queries.lengths[:, None, None])
        return (is_near & (keys < self.keys.lengths[:, None, None]))[:, None]

    def _is_near(self, queries: torch.Tensor, keys: torch.Tensor, query_lengths: torch.Tensor) -> torch.Tensor:
        # The first keys of a pair are the target's.
        return super()._is_near(queries, keys, query_lengths) | (keys >= query_lengths)


def split_blocks(states: torch.Tensor, size: int, left: int, right: int) -> torch.Tensor:
    """Split a row into blocks with the tokens around: `(1, heads, tokens, dim) -> (blocks, heads, left + size + right, dim)`."""
    tokens = states.shape[2]
    padded = nn.functional.pad(states, (0, 0, left, -tokens % size + right))
    return padded[0].unfold(1, left + size + right, size).permute(1, 0, 3, 2)


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """Return the dtype of a product of states and a weight, by autocast."""
    device_type = states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype


def packed_mask(packing: Packing, bias: nn.Module | None, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """Make the mask for the kernel of a packing and hidden states, once for all layers that share a position bias.

    The mask is added to the scores: the bias in float32, or 0, and the lowest number for a key that a query does not see.
    """
    device = hidden_states.device
    if packing.kernel == "reference":
        is_seen, positions = packing.is_seen(), (packing.queries.positions,) * 2
    elif packing.kernel == "window":
        (left, right), size = packing.window, block_size(packing.window)
        keys = torch.arange(left + size + right, device=device)[None, :]
        is_seen, positions = packing.is_seen_in_blocks(), (keys[:, left : left + size], keys)
    elif packing.kernel == "varlen" or (bias is None and not packing.is_causal):
        return None
    else:
        # A token has the same position in its grid row as in its sequence.
        is_seen = packing.is_seen_in_grid()
        positions = (torch.arange(packing.queries.width, device=device)[None, :],) * 2
    # Each layer would store a copy in another dtype.
    zeros = torch.zeros(is_seen.shape, dtype=product_dtype(hidden_states), device=device)
    scores = zeros if bias is None else bias(*positions).float()
    return scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)


@functools.cache
def varlen_causal() -> dict[str, bool | tuple[int, int]]:
    """Return the argument of `varlen_attn` for causal attention: torch 2.13 replaces `is_causal` by `window_size`."""
    names = inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}


def varlen_attention(states: Sequence[torch.Tensor], packing: Packing, scaling: float) -> torch.Tensor:
    """Attend within each sequence by torch's flash attention: `(1, heads, tokens, dim) -> (1, query tokens, heads, dim)`."""
    queries, keys = packing.queries, packing.keys
    query, key, value = (part[0].transpose(0, 1) for part in states)  # (tokens, heads, head_dim)
    # Before torch 2.13, the kernel has a fixed scale.
    rows = query * (scaling * query.shape[-1] ** 0.5), key, value
    causal = varlen_causal() if packing.is_causal else {}
    return varlen_attn(*rows, queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest, **causal)[None]


def window_attention(
    states: Sequence[torch.Tensor],
    mask: torch.Tensor,
    packing: Packing,
    scaling: float,
    dropout: float,
    cap: float | None,
) -> torch.Tensor:
    """Attend within windows of packed rows, or of a padded batch: `(batch, heads, length, dim) -> (1, tokens, heads, dim)`."""
    (left, right), size = packing.window, block_size(packing.window)
    query, *key_value = (part.transpose(0, 1).flatten(1, 2)[None] for part in states)
    blocks = split_blocks(query, size, 0, 0), *(split_blocks(part, size, left, right) for part in key_value)
    output = attend_in_blocks(blocks, mask, scaling, dropout, cap)
    return output.transpose(1, 2).flatten(0, 1)[None, : query.shape[2]]


def attend_in_blocks(
    blocks: Sequence[torch.Tensor], mask: torch.Tensor, scaling: float, dropout: float, cap: float | None
) -> torch.Tensor:
    """Attend from the queries of each block to its keys and values: `(blocks, heads, query or key, head_dim)`.

    The mask is added to the scores, or True where a key is visible.
    """
    query, key, value = blocks
    if mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if cap is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    scores = soft_cap(query @ key.mT * scaling, cap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return nn.functional.dropout(weights, dropout, training=True) @ value
