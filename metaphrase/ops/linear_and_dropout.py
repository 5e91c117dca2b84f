"""Dropout with few random bits, and linear layers for training on a CPU in bfloat16.

A linear layer adds the bias and applies a ReLU while the product is written, where torch reads and writes the output again.
"""

import functools
import math
from collections.abc import Sequence

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
    def forward(ctx, states: torch.Tensor, is_rectified: bool, count: int, *parameters: torch.Tensor):
        # The parameters are `count` weights, then their biases, if they have any.
        matrix, *row = (_join(part, states.dtype) for part in (parameters[:count], parameters[count:]) if part)
        activation = "relu" if is_rectified else "none"
        output = torch.ops.mkldnn._linear_pointwise(states, matrix, row[0] if row else None, activation, [], "")
        ctx.save_for_backward(states, matrix, output if is_rectified else None)
        ctx.sizes = [len(weight) for weight in parameters[:count]]
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        states, matrix, output = ctx.saved_tensors
        rows, count = gradient.flatten(0, -2), len(ctx.sizes)
        needs_states, _, _, *needed = ctx.needs_input_grad
        row_sum = None
        if output is not None:
            # The gradient before a ReLU, and its sum over the rows. Strips are summed while they are in the cache.
            incoming, rows = rows, torch.empty_like(output.flatten(0, -2))
            row_sum = torch.zeros(rows.shape[1]) if any(needed[count:]) else None
            strips = (part.split(_STRIP_ROWS) for part in (rows, incoming, output.flatten(0, -2)))
            for strip, *parts in zip(*strips, strict=True):
                torch.ops.aten.threshold_backward.grad_input(*parts, 0, grad_input=strip)
                if row_sum is not None:
                    row_sum += strip.sum(dim=0)
        elif any(needed[count:]):
            row_sum = rows.sum(dim=0)
        states_gradient = (rows @ matrix).view(states.shape) if needs_states else None
        gradients = [None] * len(needed)
        if any(needed[:count]):
            gradients[:count] = (rows.t() @ states.flatten(0, -2)).split(ctx.sizes)
        if row_sum is not None:
            gradients[count:] = row_sum.split(ctx.sizes)
        gradients = [
            part.to(dtype) if is_needed else None
            for part, dtype, is_needed in zip(gradients, ctx.dtypes, needed, strict=True)
        ]
        return states_gradient, None, None, *gradients


def _join(parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    first = parameters[0]
    if len(parameters) == 1:
        return first.to(dtype)
    sizes = [len(parameter) for parameter in parameters]
    joined = first.new_empty(sum(sizes), *first.shape[1:], dtype=dtype)
    for rows, parameter in zip(joined.split(sizes), parameters, strict=True):
        rows.copy_(parameter)
    return joined


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
        return joined_linear([layer], states, activation is not None)
    if activation is not None and can_fuse(layer, states):
        return activation(joined_linear([layer], states))
    return plain_linear(layer, states, activation)


def joined_linear(layers: Sequence[nn.Linear], states: torch.Tensor, is_rectified: bool = False) -> torch.Tensor:
    """Apply layers, all with a bias or none, for which `can_fuse` is true: (..., in_features) -> (..., sum of out_features)."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _FusedLinear.apply(states, is_rectified, len(layers), *(layer.weight for layer in layers), *biases)


def is_hooked(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks or a replaced `forward`, as of accelerate to load weights."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or _has_any_global_hook()
