"""Flex attention over packed rows: a block mask, a position bias by distance, and few compiled kernels for all lengths.

Values that change from batch to batch reach the kernel as tensors. A number would be compiled into the kernel.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from metaphrase.modeling.packing import Packing, Segments

# Tokens of a block; flex attention's default.
BLOCK_SIZE = 128
# torch compiles for the first row and for rows of any length, with and without a bias, in training and not, with one block on
# either side and with several. Beyond its limit of 8 it would compute all scores of the row, uncompiled.
_RECOMPILE_LIMIT = 64


def make_flex_mask(packing: Packing, bias: nn.Module | None, like: torch.Tensor) -> dict[str, Any]:
    """Return the block mask and the bias of a packing, as arguments of `flex_attention`.

    They serve all layers that share a position bias. The kernel has a dtype of its own, so `like` is not needed.
    """
    return {
        "block_mask": _make_block_mask(packing),
        "score_mod": None if bias is None else _make_bias(packing.queries, bias),
    }


def packed_flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: dict[str, Any],
    packing: Packing,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend within each sequence of packed rows, with the arguments and the result of `packing.packed_attention`.

    The mask is the result of `make_flex_mask`. Dropout is 0, or `choose_kernel` selects another kernel.
    """
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, scale=scaling, **mask).transpose(1, 2)
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        return _compiled()(query, key, value, scale=scaling, **mask).transpose(1, 2)


@functools.cache
def _compiled():
    return torch.compile(flex_attention)


def _make_bias(segments: Segments, bias: nn.Module):
    """Return a function that adds the bias from a table (H, 2 * longest - 1) over the distances from `-(longest - 1)`.

    The table has all distances of positions, also of tokens in different sequences, which the mask hides.
    """
    distances = torch.arange(1 - segments.longest, segments.longest, device=segments.lengths.device)[None, :]
    # A copy, because compiled flex attention loses the gradient of a captured view. In float32, because the many gradients of an
    # entry are summed up in the dtype of the table.
    table = bias(torch.zeros_like(distances[:, :1]), distances)[0, :, 0, :].float().clone()
    key_positions = segments.positions[0]
    query_positions = segments.longest - 1 - key_positions

    def add_bias(score, batch, head, query, key):
        return score + table[head, key_positions[key] + query_positions[query]]

    return add_bias


def _make_block_mask(packing: Packing) -> BlockMask:
    """Return the result of torch's `create_block_mask` without a test of each pair of tokens.

    Sequences lie in order: two blocks see each other if neither ends before the first sequence of the other begins.
    """
    queries, keys = packing.queries, packing.keys
    # With equal ranks, all tokens of a sequence see each other.
    query_ranks, key_ranks = (
        side.positions[0] if packing.is_causal else torch.zeros_like(side.ids) for side in (queries, keys)
    )
    query_ids, key_ids = queries.ids, keys.ids

    def is_seen(batch, head, query, key):
        return (query_ids[query] == key_ids[key]) & (query_ranks[query] >= key_ranks[key])

    first_query, last_query, is_full_query = (side[:, None] for side in _ends_of_blocks(queries))
    first_key, last_key, is_full_key = (side[None, :] for side in _ends_of_blocks(keys))
    is_met = (first_query <= last_key) & (first_key <= last_query)
    is_full = is_met & (first_query == last_query) & (first_key == last_key) & is_full_query & is_full_key
    if packing.is_causal:
        row, column = (torch.arange(size, device=is_met.device) for size in is_met.shape)
        is_met = is_met & (column[None, :] <= row[:, None])
        is_full = is_full & (column[None, :] < row[:, None])
    return BlockMask.from_kv_blocks(
        *_in_order(is_met & ~is_full),
        *_in_order(is_full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=is_seen,
        seq_lengths=(queries.num_tokens, keys.num_tokens),
    )


def _ends_of_blocks(segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each block the sequences of its first and last token, and True if tokens fill it; (blocks,) each."""
    starts = torch.arange(0, segments.num_tokens, BLOCK_SIZE, device=segments.lengths.device)
    ends = starts + BLOCK_SIZE
    last = segments.ids[ends.clamp(max=segments.num_tokens) - 1]
    return segments.ids[starts], last, ends <= segments.num_tokens


def _in_order(is_computed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of key blocks of each query block, (1, 1, blocks), and their indices first, (1, 1, blocks, blocks)."""
    indices = is_computed.int().argsort(dim=-1, descending=True, stable=True)
    return is_computed.sum(dim=-1).int()[None, None], indices.int()[None, None]
