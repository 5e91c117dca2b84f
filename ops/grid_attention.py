"""Attention over packed rows on a CPU: each sequence in a row of a grid, in blocks that stay in the cache.

The token-wise parts of the network never see the grid, and sequences of like length leave few of its cells empty.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from metaphrase.modeling.attention import MetaphraseAttention
from metaphrase.modeling.packed_attention import additive_mask
from metaphrase.modeling.packing import Packing
from metaphrase.ops.grid import Block, Grid, GridSide, grid_of
from metaphrase.ops.linear_and_dropout import apply_mask, can_join, joined_linear, random_mask

# Attention weights that one layer may keep for the backward pass; more are computed again.
MAX_KEPT_BYTES = 2**26
# In rows of fewer entries, the gradient of a softmax takes a CPU many times as long in bfloat16 as in float32.
MIN_HALF_WIDTH = 32
# A CPU has a power of 2 in a quarter of the time of an exponential; scores are multiplied by this first.
_LOG2_E = math.log2(math.e)
# Sums of exponentials in these bounds are far from overflow, and from 0.
_LEAST_SUM, _LARGEST_SUM = 2.0**-40, 2.0**100


class _GridAttention(torch.autograd.Function):
    """Softmax attention with its gradient written out (Vaswani et al. 2017, section 3.2, arXiv 1706.03762)."""

    @staticmethod
    def forward(ctx, mask, grid: Grid, keeps_weights: bool, scaling: float, p: float, *rows: torch.Tensor):
        """Args:
        mask: Added to the scores, `(sequences or 1, heads or 1, query width or 1, key width)`. None shows all tokens of a
            sequence to each other.
        grid: Of the two rows, in blocks.
        keeps_weights: Whether the weights are kept for the backward pass, rather than computed again.
        scaling: Factor of the scores.
        p: Dropout of the weights.
        rows: Query, key and value, `(tokens, heads * head_dim)` each; some may be side by side in one, in this order.
        """
        ctx.grid, ctx.scaling, ctx.keeps_weights, ctx.kept_share = grid, scaling, keeps_weights, 1.0
        each = sum(states.shape[1] for states in rows) // 3
        ctx.counts = [states.shape[1] // each for states in rows]
        asked, seen, content = (
            cells
            for states, count, side in zip(rows, ctx.counts, _sides(grid, rows), strict=True)
            for cells in side.enter(states, count)
        )
        output = torch.empty_like(asked)
        all_weights, all_kept = [], []
        for block, (queries, outputs, keys, values) in grid.parts((asked, output), (seen, content)):
            weights = _weights(queries, keys, mask, block, scaling)
            if keeps_weights:
                all_weights.append(weights)
            used = weights.to(content.dtype)
            if p:
                kept, ctx.kept_share = random_mask(used.shape, p, asked.device)
                all_kept.append(kept)
                used = apply_mask(used, kept, ctx.kept_share)
            torch.bmm(used, values, out=outputs)
        # The cells, rather than the rows that they come from: as many, and at hand.
        ctx.save_for_backward(asked, seen, content, mask, *all_kept, *all_weights)
        return grid.queries.leave(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        saved = ctx.saved_tensors  # may be asked for once
        # What else is in the grid is let go before its gradients leave it, one by one.
        mask, (cells, mask_gradient) = saved[3], _grid_gradients(ctx, gradient, *saved)
        of_rows = []
        for count, side in zip(ctx.counts, _sides(ctx.grid, ctx.counts), strict=True):
            of_rows.append(side.leave(cells.pop(0), count))
        if mask_gradient is not None:
            mask_gradient = mask_gradient.to(mask.dtype)
        return mask_gradient, None, None, None, None, *of_rows


def _sides(grid: Grid, rows: Sequence) -> list[GridSide]:
    """Where each of the rows of an attention enters the grid: those that ask are in the first, with the others or alone."""
    return [grid.queries, *[grid.keys] * (len(rows) - 1)]


def _grid_gradients(
    ctx, gradient: torch.Tensor, asked, seen, content, mask, *saved: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Gradients of the rows, in the grid, and of the mask."""
    grid, scaling = ctx.grid, ctx.scaling
    all_weights = saved[-len(grid.blocks) :] if ctx.keeps_weights else []
    all_kept = saved[: len(saved) - len(all_weights)]
    gradients = [
        asked.new_empty(count * len(side.to_grid), asked.shape[1])
        for count, side in zip(ctx.counts, _sides(grid, ctx.counts), strict=True)
    ]
    of_asked, of_seen, of_content = (
        part for cells, count in zip(gradients, ctx.counts, strict=True) for part in cells.chunk(count)
    )
    (incoming,) = grid.queries.enter(gradient, repeats=False)
    mask_gradient = torch.zeros(mask.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
    all_parts = grid.parts((asked, of_asked, incoming), (seen, content, of_seen, of_content))
    for number, (block, parts) in enumerate(all_parts):
        queries, of_queries, of_outputs, keys, values, of_keys, of_values = parts
        weights = all_weights[number] if all_weights else _weights(queries, keys, mask, block, scaling)
        used, slope = weights.to(values.dtype), torch.bmm(of_outputs, values.transpose(1, 2))
        if all_kept:
            used, slope = (apply_mask(entries, all_kept[number], ctx.kept_share) for entries in (used, slope))
        torch.bmm(used.transpose(1, 2), of_outputs, out=of_values)
        # The softmax's gradient: weights * (slope - sum(weights * slope)), in the precision of the weights.
        slope = torch._softmax_backward_data(slope.to(weights.dtype), weights, -1, weights.dtype)
        if mask_gradient is not None:
            _add_block(mask_gradient, slope, block)
        slope = slope.to(values.dtype)
        torch.bmm(slope, keys, out=of_queries)
        torch.bmm(slope.transpose(1, 2), queries, out=of_keys)
    # The scale belongs to the scores; it is cheaper here.
    of_asked.mul_(scaling)
    of_seen.mul_(scaling)
    return gradients, mask_gradient


def _weight_dtype(dtype: torch.dtype, width: int) -> torch.dtype:
    """Of the weights in rows of so many entries, by that of what they are made of."""
    return dtype if dtype == torch.bfloat16 and width >= MIN_HALF_WIDTH else torch.float32


def _block_mask(mask: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a block, `(sequences * heads, query width, key width)`."""
    shape = (block.sequences.stop - block.sequences.start, block.heads.stop - block.heads.start, block.query_width, -1)
    return block.part(mask).to(dtype).expand(shape).flatten(0, 1)


def _weights(
    asked: torch.Tensor, seen: torch.Tensor, mask: torch.Tensor | None, block: Block, scaling: float
) -> torch.Tensor:
    """Attention weights of a block; in float32, unless they are many and the states are not."""
    if mask is None:
        # In place, since what is not added would be copied there first.
        scores = asked.new_empty(len(asked), asked.shape[1], seen.shape[1])
        scores.baddbmm_(asked, seen.transpose(1, 2), beta=0, alpha=scaling * _LOG2_E)
        # Few cells are empty: to write them costs less than to add a mask to all.
        for rows, end in block.ends:
            scores[rows, :, end:] = torch.finfo(scores.dtype).min
    else:
        added = _block_mask(mask, block, asked.dtype)
        scores = torch.baddbmm(added, asked, seen.transpose(1, 2), beta=_LOG2_E, alpha=scaling * _LOG2_E)
    return _softmax(scores).to(_weight_dtype(asked.dtype, seen.shape[1]))


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax in float32 over the last dimension, of scores that were multiplied by `_LOG2_E`, `(rows, queries, keys)`.

    As a rule no score is large, so that to look for the largest of each row, which torch does first, can be spared.
    """
    weights = scores.exp2() if scores.dtype == torch.float32 else scores.float().exp2_()
    sums = weights.sum(dim=-1, keepdim=True)
    least, largest = torch.aminmax(sums)
    if least >= _LEAST_SUM and largest <= _LARGEST_SUM:
        return weights.mul_(sums.reciprocal_())
    return torch.softmax(scores.float().div_(_LOG2_E), dim=-1)


def _add_block(total: torch.Tensor, slope: torch.Tensor, block: Block) -> None:
    """Adds the gradient of a block of scores to that of the mask that was spread over them."""
    total = block.part(total)
    slope = slope.float().view(-1, block.heads.stop - block.heads.start, *slope.shape[1:])
    total += slope.sum_to_size(total.shape)


def grid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    packing: Packing,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attends within each sequence of packed rows.

    Args:
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: Added to the scores in the grid, `(sequences or 1, heads or 1, query width or 1, key width)`. None shows all tokens
            of a sequence to each other.
        packing: Of the two rows.
        scaling: Factor of the scores.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    heads, head_dim = query.shape[1], query.shape[3]
    rows = [states.transpose(1, 2).reshape(-1, heads * head_dim) for states in (query, key, value)]
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        return joined_grid_attention(rows, heads, mask, packing, scaling, dropout)
    grid = grid_of(packing, heads, in_blocks=False)
    sides = grid.queries, grid.keys, grid.keys
    cells = [side.enter(states)[0] for side, states in zip(sides, rows, strict=True)]
    output = nn.functional.scaled_dot_product_attention(
        *(states.view(len(packing.queries), heads, -1, head_dim) for states in cells),
        attn_mask=packing.is_seen_in_grid() if mask is None else mask.to(query.dtype),
        dropout_p=dropout,
        scale=scaling,
    )
    return grid.queries.leave(output.reshape(-1, head_dim)).view(1, -1, heads, head_dim)


def joined_grid_attention(
    rows: Sequence[torch.Tensor],
    heads: int,
    mask: torch.Tensor | None,
    packing: Packing,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """The same on a CPU, of states that may lie side by side: as a product of several projections leaves them.

    Args:
        rows: Query, key and value, `(tokens, heads * head_dim)` each; several in one, in this order, are
            `(tokens, several * heads * head_dim)`.
        heads: Number of heads.
        mask: See `grid_attention`, as of the others.
        packing: Of the two rows.
        scaling: Factor of the scores.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    grid = grid_of(packing, heads, in_blocks=True)
    kept_bytes = grid.num_scores * _weight_dtype(rows[0].dtype, packing.keys.width).itemsize
    output = _GridAttention.apply(mask, grid, kept_bytes <= MAX_KEPT_BYTES, scaling, dropout, *rows)
    return output.view(1, output.shape[0], heads, -1)


def make_grid_mask(packing: Packing, bias: nn.Module | None, like: torch.Tensor) -> torch.Tensor | None:
    """Make the mask of `grid_attention`; None if all tokens of a sequence see each other.

    Args:
        packing: The two rows.
        bias: Module that gives a position bias, if there is one.
        like: Gives dtype and device.
    """
    if bias is None and not packing.is_causal:
        return None
    # A token has the same position in its grid row as in its sequence.
    positions = torch.arange(packing.queries.width, device=like.device)[None, :]
    return additive_mask(packing.is_seen_in_grid(), positions, bias, like)


def fused_grid_attention(
    attention: MetaphraseAttention,
    hidden_states: torch.Tensor,
    encoder_output: torch.Tensor | None,
    mask: torch.Tensor | None,
    packing: Packing,
    dropout: float,
) -> torch.Tensor | None:
    """Project and attend within packed rows, with one product for all projections of the same states.

    Args:
        attention: The attention module.
        hidden_states: `(1, query tokens, hidden)`.
        encoder_output: `(1, source tokens, hidden)` for a cross-attention.
        mask: See `grid_attention`.
        packing: The two rows.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`, or None where something comes between projection and attention, or where the
        projections cannot be joined.
    """
    if packing.kernel != "grid" or attention.config.qk_norm or attention.num_key_value_groups > 1:
        return None
    layers, states = [[attention.q_proj, attention.k_proj, attention.v_proj]], [hidden_states]
    if attention.is_cross:
        layers = [[attention.q_proj], [attention.k_proj, attention.v_proj]]
        states = [hidden_states, encoder_output]
    if not all(can_join(group, inputs) for group, inputs in zip(layers, states, strict=True)):
        return None
    rows = [joined_linear(group, inputs).flatten(0, 1) for group, inputs in zip(layers, states, strict=True)]
    heads = attention.q_proj.out_features // attention.head_dim
    return joined_grid_attention(rows, heads, mask, packing, attention.scaling, dropout)
