"""Flex attention over packed rows: which blocks of tokens see each other, a bias by distance, few kernels for all lengths.

All that changes from batch to batch reaches the kernel in tensors: a number would be compiled into it.
"""

import functools

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from metaphrase.modeling.packing import Packing, Segments

# Tokens of a block: flex attention's own.
BLOCK_SIZE = 128
# torch compiles for the first row, then for rows of any length, and this for each of: with or without a bias, training or not, a
# single block on either side or several. Beyond its limit of 8 it would go on with what computes all scores of the row.
_RECOMPILE_LIMIT = 64


class PackedFlexMask:
    """What flex attention is told of packed rows: made once for all layers that share a position bias.

    Attributes:
        blocks: Which blocks of queries and keys are computed, and what is seen in them.
        add_bias: Adds the bias to a score; None without a bias.
    """

    def __init__(self, packing: Packing, bias: nn.Module | None):
        """Args:
        packing: Of the two rows.
        bias: Module that gives a position bias, if there is one.
        """
        self.blocks = _make_block_mask(packing)
        self.add_bias = None if bias is None else _make_bias(packing.queries, bias)


def make_flex_mask(packing: Packing, bias: nn.Module | None, like: torch.Tensor) -> PackedFlexMask:
    """Make the mask of a packing. The kernel has a dtype of its own, so `like` is not needed."""
    return PackedFlexMask(packing, bias)


def packed_flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PackedFlexMask,
    packing: Packing,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attends within each sequence of packed rows.

    Args:
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: Mask of the packing.
        packing: The two rows. The mask says all of them that is needed here.
        scaling: Factor of the scores.
        dropout: 0; `choose_kernel` takes another kernel otherwise.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    options = {"score_mod": mask.add_bias, "block_mask": mask.blocks, "scale": scaling}
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, **options).transpose(1, 2)
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        return _compiled()(query, key, value, **options).transpose(1, 2)


@functools.cache
def _compiled():
    return torch.compile(flex_attention)


def _make_bias(segments: Segments, bias: nn.Module):
    """Adds the bias of a distance, taken from a table `(heads, 2 * longest - 1)` that begins with `-(longest - 1)`.

    No distance is out of the table, not even that of tokens of different sequences, which do not see each other.
    """
    distances = torch.arange(1 - segments.longest, segments.longest, device=segments.lengths.device)[None, :]
    # A copy: the gradient of a view would be lost, since compiled flex attention has none for what it reads besides its inputs
    # if that is a view. In float32, in which the many gradients of an entry are added up.
    table = bias(torch.zeros_like(distances[:, :1]), distances)[0, :, 0, :].float().clone()
    key_places = segments.positions[0]
    query_places = segments.longest - 1 - key_places

    def add_bias(score, batch, head, query, key):
        return score + table[head, key_places[key] + query_places[query]]

    return add_bias


def _make_block_mask(packing: Packing) -> BlockMask:
    """The same as torch's `create_block_mask`, from where the sequences begin, without looking at each pair of tokens.

    Sequences lie in order, so that two blocks see each other if neither ends before the first sequence of the other begins.
    """
    queries, keys = packing.queries, packing.keys
    # Without order among the tokens of a sequence, each sees the others.
    query_ranks, key_ranks = (
        side.positions[0] if packing.is_causal else torch.zeros_like(side.ids) for side in (queries, keys)
    )
    query_ids, key_ids = queries.ids, keys.ids

    def is_seen(batch, head, query, key):
        return (query_ids[query] == key_ids[key]) & (query_ranks[query] >= key_ranks[key])

    first_query, last_query, is_whole_query = (side[:, None] for side in _ends_of_blocks(queries))
    first_key, last_key, is_whole_key = (side[None, :] for side in _ends_of_blocks(keys))
    is_met = (first_query <= last_key) & (first_key <= last_query)
    is_full = is_met & (first_query == last_query) & (first_key == last_key) & is_whole_query & is_whole_key
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
    """Of each block the sequence of its first token, that of its last, and whether tokens fill it, `(blocks)` each."""
    starts = torch.arange(0, segments.num_tokens, BLOCK_SIZE, device=segments.lengths.device)
    ends = starts + BLOCK_SIZE
    last = segments.ids[ends.clamp(max=segments.num_tokens) - 1]
    return segments.ids[starts], last, ends <= segments.num_tokens


def _in_order(is_computed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, `(1, 1, blocks)`, and which: these first, `(1, 1, blocks, blocks)`."""
    indices = is_computed.int().argsort(dim=-1, descending=True, stable=True)
    return is_computed.sum(dim=-1).int()[None, None], indices.int()[None, None]
