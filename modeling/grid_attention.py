"""Attention over packed rows on a CPU: each sequence in a row of a grid, in blocks that stay in the cache.

The token-wise parts of the network never see the grid, and sequences of like length leave few of its cells empty.
"""

import torch
from torch import nn

from .dropout import apply_mask, random_mask
from .grid import Block, Grid, GridSide, grid_of
from .packing import Packing

# Scores that may be kept for the backward pass rather than computed again.
MAX_KEPT_ENTRIES = 2**24
# In rows of fewer entries, a CPU's softmax in bfloat16 is many times slower than in float32, conversions counted.
MIN_HALF_WIDTH = 32


def _gather(rows: torch.Tensor, side: GridSide, heads: int) -> torch.Tensor:
    """(tokens, heads * head_dim) -> (cells, head_dim)"""
    return rows.reshape(-1, rows.shape[-1] // heads).index_select(0, side.to_grid)


def _cut(cells: torch.Tensor, place: slice, rows: int) -> torch.Tensor:
    """(cells, head_dim) -> those of a block, (rows, width, head_dim)"""
    return cells[place].view(rows, -1, cells.shape[-1])


class _GridAttention(torch.autograd.Function):
    """Softmax attention with its gradient written out (Vaswani et al. 2017, section 3.2, arXiv 1706.03762)."""

    @staticmethod
    def forward(ctx, query, key, value, mask, grid: Grid, keeps_weights: bool, scaling: float, p: float):
        """Args:
        query: `(query tokens, heads * head_dim)`.
        key: `(key tokens, heads * head_dim)`.
        value: `(key tokens, heads * head_dim)`.
        mask: Added to the scores, `(sequences or 1, heads or 1, query width or 1, key width)`.
        grid: Of the two rows, in blocks.
        keeps_weights: Whether the weights are kept for the backward pass, rather than computed again.
        scaling: Factor of the scores.
        p: Dropout of the weights.
        """
        ctx.grid, ctx.scaling, ctx.keeps_weights, ctx.mask_shape = grid, scaling, keeps_weights, mask.shape
        ctx.kept_share = 1.0
        asked, seen, content = _grids(query, key, value, grid)
        output = torch.empty_like(asked)
        all_weights, all_kept = [], []
        for block in grid.blocks:
            queries, keys, rows = block.query_cells, block.key_cells, block.rows
            weights = _weights(_cut(asked, queries, rows), _cut(seen, keys, rows), _block_mask(mask, block), scaling)
            if keeps_weights:
                all_weights.append(weights)
            used = weights.to(content.dtype)
            if p:
                kept, ctx.kept_share = random_mask(used.shape, p, query.device)
                all_kept.append(kept)
                used = apply_mask(used, kept, ctx.kept_share)
            torch.bmm(used, _cut(content, keys, rows), out=_cut(output, queries, rows))
        ctx.save_for_backward(query, key, value, mask, *all_kept, *all_weights)
        # (cells, head_dim) -> (query tokens, heads * head_dim)
        return output.index_select(0, grid.queries.from_grid).view(query.shape)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        saved = ctx.saved_tensors  # may be asked for once
        *states, mask = saved[:4]
        # What else is in the grid is let go before its gradients leave it.
        cells, mask_gradient = _grid_gradients(ctx, gradient, *saved)
        sides = (ctx.grid.queries, ctx.grid.keys, ctx.grid.keys)
        of_states = [
            of_cells.index_select(0, side.from_grid).view(rows.shape)
            for of_cells, side, rows in zip(cells, sides, states, strict=True)
        ]
        if mask_gradient is not None:
            mask_gradient = mask_gradient.to(mask.dtype)
        return *of_states, mask_gradient, None, None, None, None


def _grid_gradients(
    ctx, gradient: torch.Tensor, query, key, value, mask, *saved: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Gradients of query, key and value in the grid, and of the mask."""
    grid, scaling = ctx.grid, ctx.scaling
    all_weights = saved[-len(grid.blocks) :] if ctx.keeps_weights else []
    all_kept = saved[: len(saved) - len(all_weights)]
    grids = _grids(query, key, value, grid)
    lower = tuple(torch.empty_like(cells) for cells in grids)
    # Empty cells repeat a token in the forward pass; here they must be empty.
    upper = torch.zeros_like(grids[0])
    upper.index_copy_(0, grid.queries.from_grid, gradient.reshape(-1, upper.shape[-1]))
    mask_gradient = torch.zeros(ctx.mask_shape, dtype=torch.float32) if ctx.needs_input_grad[3] else None
    for number, block in enumerate(grid.blocks):
        places = (block.query_cells, block.key_cells, block.key_cells)
        asked, seen, content = (_cut(cells, place, block.rows) for cells, place in zip(grids, places, strict=True))
        of_asked, of_seen, of_content = (
            _cut(cells, place, block.rows) for cells, place in zip(lower, places, strict=True)
        )
        incoming = _cut(upper, block.query_cells, block.rows)
        weights = all_weights[number] if all_weights else _weights(asked, seen, _block_mask(mask, block), scaling)
        used, slope = weights.to(content.dtype), torch.bmm(incoming, content.transpose(1, 2))
        if all_kept:
            used, slope = (apply_mask(entries, all_kept[number], ctx.kept_share) for entries in (used, slope))
        torch.bmm(used.transpose(1, 2), incoming, out=of_content)
        # The softmax's gradient: weights * (slope - sum(weights * slope)), in the precision of the weights.
        slope = torch._softmax_backward_data(slope.to(weights.dtype), weights, -1, weights.dtype)
        if mask_gradient is not None:
            _add_block(mask_gradient, slope, block)
        slope = slope.to(content.dtype)
        torch.bmm(slope, seen, out=of_asked)
        torch.bmm(slope.transpose(1, 2), asked, out=of_seen)
    # The scale belongs to the scores; it is cheaper here.
    for cells in lower[:2]:
        cells.mul_(scaling)
    return lower, mask_gradient


def _grids(query, key, value, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sides = (grid.queries, grid.keys, grid.keys)
    return tuple(_gather(rows, side, grid.heads) for rows, side in zip((query, key, value), sides, strict=True))


def _block_mask(mask: torch.Tensor, block: Block) -> torch.Tensor:
    """The mask of a block, `(sequences * heads, query width or 1, key width)`."""
    mask = block.part(mask)
    shape = (block.sequences.stop - block.sequences.start, block.heads.stop - block.heads.start)
    return mask.expand(*shape, -1, -1).reshape(block.rows, *mask.shape[2:])


def _weights(asked: torch.Tensor, seen: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention weights of a block; in float32, unless they are many and the states are not."""
    mask = mask.to(asked.dtype).expand(-1, asked.shape[1], -1)
    scores = torch.baddbmm(mask, asked, seen.transpose(1, 2), alpha=scaling)
    is_half = asked.dtype == torch.bfloat16 and seen.shape[1] >= MIN_HALF_WIDTH
    return torch.softmax(scores, dim=-1, dtype=None if is_half else torch.float32)


def _add_block(total: torch.Tensor, slope: torch.Tensor, block: Block) -> None:
    """Adds the gradient of a block of scores to that of the mask that was spread over them."""
    total = block.part(total)
    slope = slope.float().view(-1, block.heads.stop - block.heads.start, *slope.shape[1:])
    total += slope.sum_to_size(total.shape)


def grid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    packing: Packing,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attends within each sequence of packed rows.

    Args:
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: Added to the scores in the grid, `(sequences or 1, heads or 1, query width or 1, key width)`.
        packing: Of the two rows.
        scaling: Factor of the scores.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    heads, head_dim = query.shape[1], query.shape[3]
    rows = [states.transpose(1, 2).reshape(-1, heads * head_dim) for states in (query, key, value)]
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        keeps_weights = len(packing.queries) * heads * packing.queries.width * packing.keys.width <= MAX_KEPT_ENTRIES
        grid = grid_of(packing, heads, in_blocks=True)
        output = _GridAttention.apply(*rows, mask, grid, keeps_weights, scaling, dropout)
    else:
        grid = grid_of(packing, heads, in_blocks=False)
        shape = (len(packing.queries), heads, -1, head_dim)
        output = nn.functional.scaled_dot_product_attention(
            *(cells.view(shape) for cells in _grids(*rows, grid)),
            attn_mask=mask.to(query.dtype),
            dropout_p=dropout,
            scale=scaling,
        )
        output = output.reshape(-1, head_dim).index_select(0, grid.queries.from_grid)
    return output.view(1, -1, heads, head_dim)
