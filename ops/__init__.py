"""Faster operators for training: `install` plugs them into the network.

The room is not called kernels: from a clone, such a folder hides the package `kernels`, which transformers imports.
"""

from metaphrase.modeling.acceleration import PackedKernel, acceleration
from metaphrase.ops import flex_attention, grid_attention, linear_and_dropout


def install() -> None:
    """Replace the network's plain functions by the operators of this room."""
    acceleration.linear = linear_and_dropout.linear
    acceleration.dropout = linear_and_dropout.dropout
    acceleration.add_dropout = linear_and_dropout.add_dropout
    acceleration.fused_attention = grid_attention.fused_grid_attention
    acceleration.packed_kernels |= {
        "grid": PackedKernel(grid_attention.make_grid_mask, grid_attention.grid_attention),
        "flex": PackedKernel(flex_attention.make_flex_mask, flex_attention.packed_flex_attention),
    }
