"""Attention over packed rows on a CPU: each sequence is a row of a grid, computed in blocks that stay in the cache.

Only attention uses the grid. Blocks of rows are as wide as their longest row, so few cells are empty.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from metaphrase.ops.linear_and_dropout import apply_mask, random_mask
from metaphrase.ops.packed_rows import PackedSequences, Packing, attend_in_blocks, grid_width

# Most scores of a block, so that they stay in the processor's cache.
BLOCK_ENTRIES = 2**19
# Most bytes of attention weights that a layer stores for the backward pass. More weights are computed again.
MAX_KEPT_BYTES = 2**26
# A CPU computes a power of 2 in a quarter of the time of an exponential. The scores are multiplied by this factor.
_LOG2_E = math.log2(math.e)
# Sums of exponentials within these bounds are far from overflow and from 0.
_LEAST_SUM, _LARGEST_SUM = 2.0**-40, 2.0**100


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences, or some heads of one sequence, that are computed together.

    `rows` counts sequences times heads. `ends` has the rows, and the end of their keys, of each sequence below `key_width`.
    """

    sequences: slice
    heads: slice
    query_width: int
    key_width: int
    num_heads: int
    rows: int
    ends: list[tuple[slice, int]]

    def part(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the part of a mask (sequences or 1, H or 1, queries or 1, keys) for the block."""
        if mask.shape[0] != 1:
            mask = mask[self.sequences]
        if mask.shape[1] != 1:
            mask = mask[:, self.heads]
        return mask[:, :, : self.query_width, : self.key_width]


class Grid:
    """The places of packed tokens in the grid, and its blocks in order."""

    def __init__(self, packing: Packing, heads: int):
        self.blocks = list(_make_blocks(packing, heads))
        self.num_scores = sum(block.rows * block.query_width * block.key_width for block in self.blocks)
        # The blocks of all heads of the same sequences have the same width.
        first = [block for block in self.blocks if block.heads.start == 0]
        sequences = [block.sequences for block in first]
        self.queries = self.keys = _lay_out(packing.queries, heads, sequences, [block.query_width for block in first])
        if packing.keys is not packing.queries:
            self.keys = _lay_out(packing.keys, heads, sequences, [block.key_width for block in first])

    def parts(
        self, query_cells: Sequence[torch.Tensor], key_cells: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Block, list[torch.Tensor]]]:
        """Yield each block, and its part (rows, width, head_dim) of all cells, (cells, head_dim) each."""
        sizes = [[block.rows * block.query_width for block in self.blocks]] * len(query_cells)
        sizes += [[block.rows * block.key_width for block in self.blocks]] * len(key_cells)
        parts = (cells.split(size) for cells, size in zip((*query_cells, *key_cells), sizes, strict=True))
        for block, *block_parts in zip(self.blocks, *parts, strict=True):
            yield block, [part.view(block.rows, -1, part.shape[-1]) for part in block_parts]


class GridSide(NamedTuple):
    """The cells of the queries or of the keys, block by block, each (sequences, H, width)."""

    # Index of each cell among the flattened (tokens, H). Empty cells repeat the last token of their sequence.
    to_grid: torch.Tensor
    # The cell of each of these.
    from_grid: torch.Tensor


def _lay_out(row: PackedSequences, heads: int, sequences: list[slice], widths: list[int]) -> GridSide:
    """Lay out a row in groups of sequences, each of one width."""
    cells, are_full = [], []
    head = torch.arange(heads, device=row.lengths.device)[:, None]
    for group, width in zip(sequences, widths, strict=True):
        lengths, columns = row.lengths[group, None], torch.arange(width, device=head.device)
        tokens = row.starts[group, None] + torch.minimum(columns, lengths - 1)
        # (sequences, 1, width) * heads + (heads, 1) -> (sequences * heads * width)
        cells.append((tokens[:, None] * heads + head).flatten())
        are_full.append((columns < lengths)[:, None].expand(-1, heads, -1).flatten())
    to_grid, full = torch.cat(cells), torch.cat(are_full).nonzero()[:, 0]
    return GridSide(to_grid, torch.empty_like(full).index_copy_(0, to_grid[full], full))


def _make_blocks(packing: Packing, heads: int) -> Iterator[Block]:
    """Split the sequences, in order, into blocks of at most `BLOCK_ENTRIES` scores. A long sequence is split by heads."""
    sides = packing.queries.lengths.tolist(), packing.keys.lengths.tolist()
    start = 0
    while start < len(packing.queries.lengths):
        stop, widths = start, (0, 0)
        while stop < len(packing.queries.lengths):
            wider = tuple(max(width, grid_width(side[stop])) for width, side in zip(widths, sides, strict=True))
            if stop > start and (stop + 1 - start) * heads * wider[0] * wider[1] > BLOCK_ENTRIES:
                break
            stop, widths = stop + 1, wider
        query_width, key_width = widths
        most = BLOCK_ENTRIES // ((stop - start) * query_width * key_width)
        step = max(part for part in range(1, heads + 1) if heads % part == 0 and part <= max(most, 1))
        for head in range(0, heads, step):
            ends = [
                (slice(number * step, (number + 1) * step), length)
                for number, length in enumerate(sides[1][start:stop])
                if length < key_width
            ]
            bounds, rows = (slice(start, stop), slice(head, head + step)), (stop - start) * step
            yield Block(*bounds, query_width, key_width, step, rows, ends)
        start = stop


class _GridAttention(torch.autograd.Function):
    """Softmax attention with its gradient written out (Vaswani et al. 2017, section 3.2, arXiv 1706.03762)."""

    @staticmethod
    def forward(ctx, mask, grid: Grid, keeps_weights: bool, scaling: float, p: float, *rows: torch.Tensor):
        # `keeps_weights` stores the attention weights for the backward pass, which else computes them again.
        ctx.grid, ctx.scaling, ctx.keeps_weights, ctx.kept_share = grid, scaling, keeps_weights, 1.0
        ctx.sides = grid.queries, grid.keys, grid.keys
        query, key, value = (part.index_select(0, side.to_grid) for part, side in zip(rows, ctx.sides, strict=True))
        output = torch.empty_like(query)
        all_weights, all_masks = [], []
        for block, (queries, outputs, keys, values) in grid.parts((query, output), (key, value)):
            weights = _weights(queries, keys, mask, block, scaling)
            if keeps_weights:
                all_weights.append(weights)
            if p:
                dropout_mask, ctx.kept_share = random_mask(weights.shape, p, query.device)
                all_masks.append(dropout_mask)
                weights = apply_mask(weights, dropout_mask, ctx.kept_share)
            torch.bmm(weights, values, out=outputs)
        # The cells take hardly more memory than the rows, and need not be gathered again.
        ctx.save_for_backward(query, key, value, mask, *all_masks, *all_weights)
        return output.index_select(0, grid.queries.from_grid)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        # Checkpointing allows one read of `saved_tensors`.
        query, key, value, mask, *saved = ctx.saved_tensors
        grid, scaling = ctx.grid, ctx.scaling
        all_weights = saved[-len(grid.blocks) :] if ctx.keeps_weights else []
        all_masks = saved[: len(saved) - len(all_weights)]
        query_gradient, key_gradient, value_gradient = gradients = [*map(torch.empty_like, (query, key, value))]
        # Empty cells have no gradient.
        incoming = torch.zeros_like(query).index_copy_(0, grid.queries.from_grid, gradient)
        mask_gradient = torch.zeros(mask.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        all_parts = grid.parts((query, query_gradient, incoming), (key, value, key_gradient, value_gradient))
        for number, (block, parts) in enumerate(all_parts):
            queries, queries_gradient, outputs_gradient, keys, values, keys_gradient, values_gradient = parts
            weights = all_weights[number] if all_weights else _weights(queries, keys, mask, block, scaling)
            dropped, slope = weights, torch.bmm(outputs_gradient, values.transpose(1, 2))
            if all_masks:
                dropped, slope = (apply_mask(part, all_masks[number], ctx.kept_share) for part in (dropped, slope))
            torch.bmm(dropped.transpose(1, 2), outputs_gradient, out=values_gradient)
            # weights * (slope - sum(weights * slope))
            slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype)
            if mask_gradient is not None:
                part = block.part(mask_gradient)
                part += slope.float().view(-1, block.num_heads, *slope.shape[1:]).sum_to_size(part.shape)
            torch.bmm(slope, keys, out=queries_gradient)
            torch.bmm(slope.transpose(1, 2), queries, out=keys_gradient)
        # There are fewer entries to scale here than in the scores.
        query_gradient.mul_(scaling)
        key_gradient.mul_(scaling)
        if mask_gradient is not None:
            mask_gradient = mask_gradient.to(mask.dtype)
        gradients = (part.index_select(0, side.from_grid) for part, side in zip(gradients, ctx.sides, strict=True))
        return mask_gradient, None, None, None, None, *gradients


def _weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, block: Block, scaling: float
) -> torch.Tensor:
    if mask is None:
        # In place, because `baddbmm` would copy its first operand.
        scores = query.new_empty(len(query), query.shape[1], key.shape[1])
        scores.baddbmm_(query, key.transpose(1, 2), beta=0, alpha=scaling * _LOG2_E)
        # Few cells are empty. Writing them takes less time than adding a mask to all cells.
        for rows, end in block.ends:
            scores[rows, :, end:] = torch.finfo(scores.dtype).min
    else:
        # (sequences * H, query width, key width)
        shape = (block.rows // block.num_heads, block.num_heads, block.query_width, -1)
        block_mask = block.part(mask).to(query.dtype).expand(shape).flatten(0, 1)
        scores = torch.baddbmm(block_mask, query, key.transpose(1, 2), beta=_LOG2_E, alpha=scaling * _LOG2_E)
    return _softmax(scores).to(query.dtype)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    # The scores were multiplied by `_LOG2_E`, and are rarely large: first without the maximum, which torch's softmax subtracts.
    weights = scores.exp2() if scores.dtype == torch.float32 else scores.float().exp2_()
    sums = weights.sum(dim=-1, keepdim=True)
    least, largest = torch.aminmax(sums)
    if least >= _LEAST_SUM and largest <= _LARGEST_SUM:
        return weights.mul_(sums.reciprocal_())
    return torch.softmax(scores.float().div_(_LOG2_E), dim=-1)


def grid_attention(
    states: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    packing: Packing,
    scaling: float,
    dropout: float,
    cap: float | None = None,
) -> torch.Tensor:
    """Attend within each sequence of packed rows, `(1, heads, tokens, head_dim) -> (1, query tokens, heads, head_dim)`.

    `states` are queries, keys and values. The mask is added to the scores in the grid, (sequences or 1, H or 1, query width or 1,
    key width). None lets all tokens of a sequence see each other. `cap` is the softcap.
    """
    _, heads, _, head_dim = states[0].shape
    rows = [part.transpose(1, 2).reshape(-1, head_dim) for part in states]
    if rows[0].device.type == "cpu" and cap is None and not torch.compiler.is_compiling():
        if heads not in packing.grids:
            # Once for all layers.
            packing.grids[heads] = Grid(packing, heads)
        grid = packing.grids[heads]
        keeps_weights = grid.num_scores * rows[0].itemsize <= MAX_KEPT_BYTES
        output = _GridAttention.apply(mask, grid, keeps_weights, scaling, dropout, *rows)
        return output.view(1, -1, heads, head_dim)
    # One block, for which no length is read from the device: (tokens, H * head_dim) -> (sequences, H, width, head_dim)
    count, sides = len(packing.queries.lengths), (packing.queries, packing.keys, packing.keys)
    cells = [
        part.new_zeros(count * side.width, heads * head_dim).index_copy(0, side.cells, part.view(-1, heads * head_dim))
        for side, part in zip(sides, rows, strict=True)
    ]
    cells = [part.view(count, -1, heads, head_dim).transpose(1, 2) for part in cells]
    mask = packing.is_seen_in_grid() if mask is None else mask
    output = attend_in_blocks(cells, mask, scaling, dropout, cap)
    return output.transpose(1, 2).reshape(-1, heads, head_dim).index_select(0, packing.queries.cells)[None]
