"""Functions that the installed `metaphrase` package replaces by faster code.

A copy of the network on the Hub runs the plain functions of this file. `import metaphrase` plugs in `ops/` and `decoding/`, which
compute the same.
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
        make_mask: Takes a packing, a position bias module and a tensor of the mask's dtype. Returns the mask of the kernel.
        attend: Takes query, key, value, mask, packing, scaling and dropout. Returns `(1, query tokens, heads, head_dim)`.
    """

    make_mask: Callable[..., Any]
    attend: Callable[..., torch.Tensor]


def plain_linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """Apply a linear layer and an activation, clamping float16: `(..., in_features) -> (..., out_features)`."""
    states = clamp_float16(layer(states))
    if activation is None or states.dtype != torch.float16:
        return states if activation is None else activation(states)
    # In float16, the polynomial inside an approximated GELU overflows long before the result does.
    return clamp_float16(activation(states.float()).to(states.dtype))


def plain_add_dropout(residual: torch.Tensor, states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Return `residual + dropout(states)`."""
    return residual + nn.functional.dropout(states, p, training)


def _do_nothing(*args, **kwargs) -> None:
    pass


@dataclass
class Acceleration:
    """Functions that the network calls.

    Attributes:
        linear: Like `plain_linear`.
        dropout: Like `torch.nn.functional.dropout` (Srivastava et al. 2014, section 4).
        add_dropout: Like `plain_add_dropout`.
        packed_kernels: Attention kernels for packed rows by name. A missing kernel is replaced by `reference`.
        fused_attention: Returns the output of all heads of a `MetaphraseAttention` over packed rows, or None. Projects, too.
        encoding: A context in which an encoder runs its layers.
        encode_without_padding: Returns the encoder output of a padded batch, computed for its tokens only, or None.
        on_train: Called with each stack that starts to train.
    """

    linear: Callable[..., torch.Tensor] = plain_linear
    dropout: Callable[..., torch.Tensor] = nn.functional.dropout
    add_dropout: Callable[..., torch.Tensor] = plain_add_dropout
    packed_kernels: dict[str, PackedKernel] = field(default_factory=dict)
    fused_attention: Callable[..., torch.Tensor | None] = _do_nothing
    encoding: Callable[[nn.Module], contextlib.AbstractContextManager] = contextlib.nullcontext
    encode_without_padding: Callable[..., Any] = _do_nothing
    on_train: Callable[[nn.Module], None] = _do_nothing


acceleration = Acceleration()
