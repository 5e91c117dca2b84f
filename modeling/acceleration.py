"""Places where the installed `metaphrase` package plugs in faster code.

A copy of the network on the Hub runs the plain functions of this file. `import metaphrase` replaces them by the functions of
`ops/` and `decoding/`, which compute the same.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .normalization import clamp_float16


@dataclass(frozen=True)
class PackedKernel:
    """An attention over packed rows.

    Attributes:
        make_mask: Returns the mask of the kernel, from the packing, the position bias module and a tensor that gives the dtype.
        attend: Returns `(1, query tokens, heads, head_dim)`, from query, key, value, mask, packing, scaling and dropout.
    """

    make_mask: Callable[..., Any]
    attend: Callable[..., torch.Tensor]


def plain_linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """Apply a linear layer, and an activation after it: `(..., in_features) -> (..., out_features)`.

    Large values of float16 stay finite.
    """
    states = clamp_float16(layer(states))
    if activation is None or states.dtype != torch.float16:
        return states if activation is None else activation(states)
    # The polynomial inside an approximated GELU overflows float16 long before its result does.
    return clamp_float16(activation(states.float()).to(states.dtype))


def plain_dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Apply dropout (Srivastava et al. 2014, section 4) to a tensor of any shape."""
    return nn.functional.dropout(states, p=p, training=training)


def plain_add_dropout(residual: torch.Tensor, states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Return `residual + dropout(states)`."""
    return residual + plain_dropout(states, p, training)


def _nothing(*arguments, **options) -> None:
    return None


@dataclass
class Acceleration:
    """Functions that the network calls.

    Attributes:
        linear: A linear layer and an activation, see `plain_linear`.
        dropout: See `plain_dropout`.
        add_dropout: See `plain_add_dropout`.
        packed_kernels: Attention kernels for packed rows by name. Without any, packed rows take the plain kernel.
        fused_attention: Returns the heads' output of a `MetaphraseAttention` over packed rows, projections included, or None.
        encoding: A context in which an encoder stack runs its layers.
        encode_without_padding: Returns the encoder's output for a padded batch by computing its tokens alone, or None.
        on_train: Called with each stack that starts to train.
    """

    linear: Callable[..., torch.Tensor] = plain_linear
    dropout: Callable[..., torch.Tensor] = plain_dropout
    add_dropout: Callable[..., torch.Tensor] = plain_add_dropout
    packed_kernels: dict[str, PackedKernel] = field(default_factory=dict)
    fused_attention: Callable[..., torch.Tensor | None] = _nothing
    encoding: Callable[[nn.Module], contextlib.AbstractContextManager] = contextlib.nullcontext
    encode_without_padding: Callable[..., Any] = _nothing
    on_train: Callable[[nn.Module], None] = _nothing


acceleration = Acceleration()
