"""Faster operators for training. Importing this package plugs them into the network.

The room is not called kernels: from a clone, such a folder hides the package `kernels`, which transformers imports.
"""

from metaphrase.modeling.operators import acceleration
from metaphrase.ops import grid_attention, linear_and_dropout, projected_loss

acceleration.linear = linear_and_dropout.linear
acceleration.dropout = linear_and_dropout.dropout
acceleration.add_dropout = linear_and_dropout.add_dropout
acceleration.fused_attention = grid_attention.fused_grid_attention
acceleration.projected_loss = projected_loss.loss_of_head
acceleration.grid = grid_attention.grid_attention
