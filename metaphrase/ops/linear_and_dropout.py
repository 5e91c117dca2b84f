"""Dropout with few random bits, and linear layers for training on a CPU in bfloat16.

A linear layer adds the bias and applies a ReLU while the product is written, where torch reads and writes the output again.
"""

import functools
import math

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from metaphrase.modeling.operators import plain_linear

# An entry takes 8 random bits. torch's generator returns the bits of eight entries at once.
_LEVELS = 2**8
# Entries with one threshold: many, so that thresholds take no time; few, so that the shares hardly differ.
_DECISIONS = 2**10
_MIN_PROBABILITY = 1e-2


def random_mask(shape: torch.Size | tuple[int, ...], p: float, device: torch.device) -> tuple[torch.Tensor, float]:
    """Draw a dropout mask, 0 with probability `p` and else 1, and return the mask and the expected share of 1.

    `p` lies between two probabilities that 8 bits can express. Blocks of 1,024 entries are drawn with one of the two, at such
    shares that each entry is 0 with probability `p`. Entries of a block are not quite independent: at 0.1 their correlation is
    0.00004. A CPU multiplies `int8` several times faster than booleans.
    """
    if not _MIN_PROBABILITY <= p <= 1 - _MIN_PROBABILITY:
        return (torch.rand(shape, device=device) >= p).to(torch.int8), 1 - p
    count = math.prod(shape)
    rows, lower = -(-count // _DECISIONS), math.floor(p * _LEVELS)
    bits = torch.empty(rows, _DECISIONS // 8, dtype=torch.int64, device=device).random_(-(2**63), None)
    is_upper = torch.rand(rows, 1, device=device) < p * _LEVELS - lower
    mask = torch.empty(rows, _DECISIONS, dtype=torch.int8, device=device)
    torch.ge(bits.view(torch.int8), is_upper.to(torch.int8) + (lower - _LEVELS // 2), out=mask)
    return mask.flatten()[:count].view(shape), 1 - p


def apply_mask(states: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    return mask.to(states.dtype).mul_(states).mul_(1 / share)


class _MaskedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: torch.Tensor, residual: torch.Tensor | None, p: float) -> torch.Tensor:
        mask, ctx.share = random_mask(states.shape, p, states.device)
        ctx.save_for_backward(mask)
        ctx.states_dtype, ctx.residual_dtype = states.dtype, None if residual is None else residual.dtype
        if residual is None:
            return apply_mask(states, mask, ctx.share)
        dtype = torch.promote_types(residual.dtype, states.dtype)
        return torch.addcmul(residual.to(dtype), states.to(dtype), mask.to(dtype), value=1 / ctx.share)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        states_gradient = apply_mask(gradient, *ctx.saved_tensors, ctx.share).to(ctx.states_dtype)
        return states_gradient, gradient.to(ctx.residual_dtype) if ctx.needs_input_grad[1] else None, None


def add_dropout(residual: torch.Tensor | None, states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Return `residual + dropout(states)`, of one shape, or dropout alone (Srivastava et al. 2014, section 4).

    On a CPU, `torch.nn.functional.dropout` takes as long as a linear layer of width 128, most of it for random numbers. One
    kernel with the sum takes half the time of two. Elsewhere, and in compiled code, torch's own dropout runs.
    """
    is_elsewhere = states.device.type != "cpu" or torch.compiler.is_compiling()
    if not training or is_elsewhere or not _MIN_PROBABILITY <= p <= 1 - _MIN_PROBABILITY:
        states = nn.functional.dropout(states, p, training)
        return states if residual is None else residual + states
    return _MaskedDropout.apply(states, residual, p)


# A smaller layer gains less than the call of a Python function costs.
_LEAST_SIZE = 2**18
# Number of rows that stay in the processor's cache.
_STRIP_ROWS = 256


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, states: torch.Tensor, is_rectified: bool, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        matrix, row = weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
        activation = "relu" if is_rectified else "none"
        output = torch.ops.mkldnn._linear_pointwise(states, matrix, row, activation, [], "")
        ctx.save_for_backward(states, matrix, output if is_rectified else None)
        ctx.dtype = weight.dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        states, matrix, output = ctx.saved_tensors
        needs_states, _, needs_weight, needs_bias = ctx.needs_input_grad
        rows, row_sum = gradient.flatten(0, -2), None
        if output is not None:
            # The gradient before a ReLU, and its sum over the rows. Strips are summed while they are in the cache.
            incoming, rows = rows, torch.empty_like(output.flatten(0, -2))
            row_sum = torch.zeros(rows.shape[1]) if needs_bias else None
            strips = (part.split(_STRIP_ROWS) for part in (rows, incoming, output.flatten(0, -2)))
            for strip, *parts in zip(*strips, strict=True):
                torch.ops.aten.threshold_backward.grad_input(*parts, 0, grad_input=strip)
                if row_sum is not None:
                    row_sum += strip.sum(dim=0)
        elif needs_bias:
            row_sum = rows.sum(dim=0)
        states_gradient = (rows @ matrix).view(states.shape) if needs_states else None
        weight_gradient = (rows.t() @ states.flatten(0, -2)).to(ctx.dtype) if needs_weight else None
        return states_gradient, None, weight_gradient, None if row_sum is None else row_sum.to(ctx.dtype)


@functools.cache
def _has_kernel() -> bool:
    is_built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_built and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_fuse(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> bool:
    """Return True if `linear` computes a layer and its activation in one product."""
    if states.dtype != torch.bfloat16 or states.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if type(layer) is not nn.Linear or type(activation) not in (nn.ReLU, type(None)) or is_hooked(layer):
        return False
    if activation is not None and is_hooked(activation):
        return False
    if type(layer.weight.data) is not torch.Tensor or layer.weight.numel() < _LEAST_SIZE:
        return False
    return torch.backends.mkldnn.enabled and _has_kernel() and not torch.compiler.is_compiling()


def linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """Apply a linear layer, and an activation after it: (..., in_features) -> (..., out_features)."""
    if can_fuse(layer, states, activation):
        return _FusedLinear.apply(states, activation is not None, layer.weight, layer.bias)
    if activation is not None and can_fuse(layer, states):
        return activation(linear(layer, states))
    return plain_linear(layer, states, activation)


def is_hooked(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks or a replaced `forward`, as of accelerate to load weights."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or _has_any_global_hook()
