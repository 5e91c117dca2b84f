"""Packed rows: several sequences in one row, without padding.

A packed row `(1, tokens)` holds the tokens of all sequences one after the other. Positions start again with each sequence. A
token sees only the tokens of its sequence, or of its source, so the attention is block-diagonal. Its kernels are:

- `reference`: the model's attention with a mask of the full row, quadratic in the length of the row. Tests compare the other
  kernels with `reference`.
- `varlen`: torch's flash attention, for half precision on an Ampere GPU or newer, without bias and dropout.
- `flash`: a flash attention package of transformers.
- `grid`: a padded grid with one row per sequence, for all other cases. Part of `metaphrase.ops`; `reference` replaces it.
"""

from functools import cached_property

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .compat import varlen_causal
from .operators import acceleration

# In rows of fewer than 16 entries, a CPU's softmax takes ten times as long per entry.
MIN_GRID_WIDTH, GRID_WIDTH_MULTIPLE = 16, 8


def grid_width(longest: int) -> int:
    """Return the number of columns of a grid whose longest row has `longest` tokens."""
    return max(MIN_GRID_WIDTH, -(-longest // GRID_WIDTH_MULTIPLE) * GRID_WIDTH_MULTIPLE)


class Segments:
    """The sequences of a packed row, with the tensors that attention kernels need.

    Args:
        lengths: Tokens of each sequence, `(sequences)`.
        num_tokens: Tokens in the row.
        longest: The largest length, if known. Reading values from an accelerator would wait for the accelerator.

    Raises:
        ValueError: If the lengths are not positive or their sum is not `num_tokens`.
    """

    def __init__(self, lengths: torch.Tensor, num_tokens: int, longest: int | None = None):
        self.lengths, self.num_tokens, self.longest = lengths.long(), num_tokens, longest
        if longest is not None and lengths.device.type != "cpu":
            return
        values = lengths.tolist()
        if sum(values) != num_tokens or min(values) < 1:
            raise ValueError(
                f"Packed lengths must be at least 1 and add up to the {num_tokens} tokens of the row, got {values}."
            )
        self.longest = max(values)

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


# Older GPUs have no flash attention.
_LEAST_CAPABILITY = (8, 0)


def choose_kernel(implementation: str, states: torch.Tensor, head_dim: int, has_bias: bool, dropout: float) -> str:
    """Return the name of the kernel for a packed attention.

    Args:
        implementation: The model's `attn_implementation`.
        states: Input of the attention, of its device and dtype.
        head_dim: Width of a head.
        has_bias: True if a position bias is added to the scores.
        dropout: Dropout of the attention weights, 0 outside training.

    Raises:
        ValueError: If the implementation cannot attend over packed rows.
    """
    if implementation == "eager":
        return "reference"
    if implementation in ("sdpa", "flex_attention"):
        device_type = states.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_autocast else states.dtype
        can_flash = dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
        can_flash = can_flash and device_type == "cuda" and not has_bias and not dropout
        if can_flash and torch.cuda.get_device_capability(states.device) >= _LEAST_CAPABILITY:
            return "varlen"
        return "reference" if acceleration.grid is None else "grid"
    if has_bias or "flash" not in implementation:
        raise ValueError(
            "`attn_implementation` must be sdpa, eager or flex_attention (or, without a position bias, a flash attention) "
            f"for packed rows, got {implementation!r}."
        )
    return "flash"


def packed_mask(packing: Packing, bias: nn.Module | None, like: torch.Tensor):
    """Make the mask for the kernel of a packing, once for all layers that share a position bias.

    Args:
        packing: The sequences of the queries and keys, and the kernel.
        bias: Module of the position bias, or None.
        like: A tensor of the dtype of the mask.

    Returns:
        A mask in the kernel's format, or None if the kernel needs the packing only.
    """
    if packing.kernel == "grid":
        return acceleration.grid.make_mask(packing, bias, like)
    if packing.kernel in ("varlen", "flash"):
        return None
    return additive_mask(packing.is_seen(), packing.queries.positions, bias, like)


def additive_mask(
    is_seen: torch.Tensor, positions: torch.Tensor, bias: nn.Module | None, like: torch.Tensor
) -> torch.Tensor:
    """Make a mask that is added to the scores.

    Args:
        is_seen: True if a query sees a key, `(sequences or 1, 1, query or 1, key)`.
        positions: Positions of queries and keys, `(1, query)`.
        bias: Module of the position bias, or None.
        like: A tensor of the dtype of a mask without a bias.

    Returns:
        The bias, or 0, if `is_seen`, and the lowest number elsewhere. With a bias in float32.
    """
    if bias is None:
        scores = torch.zeros(is_seen.shape, dtype=like.dtype, device=like.device)
    else:
        scores = bias(positions, positions).float()
    return scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask,
    packing: Packing,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attend within each sequence of packed rows, by any kernel but `reference`.

    Args:
        module: The attention module.
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: Mask from `packed_mask`.
        packing: The sequences of the queries and keys, and the kernel.
        scaling: Factor of the scores.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    if packing.kernel == "grid":
        return acceleration.grid.attend(query, key, value, mask, packing, scaling, dropout)
    queries, keys = packing.queries, packing.keys
    if packing.kernel == "varlen":
        # Before torch 2.13, the kernel has a fixed scale.
        query = query * (scaling * query.shape[-1] ** 0.5)
        rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, head_dim)
        causal = varlen_causal() if packing.is_causal else {}
        return varlen_attn(*rows, queries.offsets, keys.offsets, queries.longest, keys.longest, **causal)[None]
    output, _ = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation](
        *(module, query, key, value, None),
        scaling=scaling,
        dropout=dropout,
        is_causal=packing.is_causal,
        cu_seq_lens_q=queries.offsets,
        cu_seq_lens_k=keys.offsets,
        max_length_q=queries.longest,
        max_length_k=keys.longest,
    )
    return output
