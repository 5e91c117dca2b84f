"""Linear layers in training in bfloat16 on a CPU: a bias, and a ReLU, are added while the product is written.

torch writes the bias first and reads it again, and a ReLU reads and writes once more. Layers that read the same states are one
product, and so is the gradient of what they read.
"""

import functools
from collections.abc import Sequence

import torch
from torch import nn

# What a smaller layer gains does not pay for the call of a function written in Python.
_LEAST_SIZE = 2**18
# Rows that the processor has at hand from one pass to the next.
_STRIP_ROWS = 256


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: torch.Tensor, is_rectified: bool, count: int, *parameters: torch.Tensor):
        """Args:
        states: `(..., in_features)`.
        is_rectified: Whether a ReLU follows.
        count: Of the layers.
        parameters: Their weights, and after these their biases, if they have any.
        """
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
            rows, row_sum = _rectified_gradient(rows, output.flatten(0, -2), any(needed[count:]))
        elif any(needed[count:]):
            row_sum = rows.sum(dim=0)
        of_states = (rows @ matrix).view(states.shape) if needs_states else None
        parts = [None] * len(needed)
        if any(needed[:count]):
            parts[:count] = (rows.t() @ states.flatten(0, -2)).split(ctx.sizes)
        if row_sum is not None:
            parts[count:] = row_sum.split(ctx.sizes)
        of_parameters = [
            part.to(dtype) if is_needed else None
            for part, dtype, is_needed in zip(parts, ctx.dtypes, needed, strict=True)
        ]
        return of_states, None, None, *of_parameters


def _rectified_gradient(
    gradient: torch.Tensor, output: torch.Tensor, is_summed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What passes a ReLU on its way back, `(rows, out_features)`, and its sum over the rows, taken while they are at hand.

    The sum of each strip is rounded to bfloat16, as every entry was: as large an error, unless strips cancel each other.
    """
    passed = torch.empty_like(output)
    total = torch.zeros(output.shape[1]) if is_summed else None
    for strip, arriving, written in zip(*(rows.split(_STRIP_ROWS) for rows in (passed, gradient, output)), strict=True):
        torch.ops.aten.threshold_backward.grad_input(arriving, written, 0, grad_input=strip)
        if is_summed:
            total += strip.sum(dim=0)
    return passed, total


def _join(parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Weights, or biases, of several layers in one tensor, `(sum of out_features, ...)`."""
    first = parameters[0]
    if len(parameters) == 1:
        return first.to(dtype)
    sizes = [len(parameter) for parameter in parameters]
    joined = first.new_empty(sum(sizes), *first.shape[1:], dtype=dtype)
    for place, parameter in zip(joined.split(sizes), parameters, strict=True):
        place.copy_(parameter)
    return joined


@functools.cache
def _has_kernel() -> bool:
    """Whether this build of torch has oneDNN, and this processor products in bfloat16."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_wrapped(module: nn.Module) -> bool:
    """Whether somebody wants to be told when a module is called, or put something in the place of what it does."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or nn.modules.module._has_any_global_hook()


def can_fuse(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> bool:
    """Whether `linear` makes a single product of a layer and what follows it."""
    if states.dtype != torch.bfloat16 or states.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if type(layer) is not nn.Linear or type(activation) not in (nn.ReLU, type(None)):
        return False
    if any(is_wrapped(module) for module in (layer, activation) if module is not None):
        return False
    if type(layer.weight.data) is not torch.Tensor or layer.weight.numel() < _LEAST_SIZE:
        return False
    return torch.backends.mkldnn.enabled and _has_kernel() and not torch.compiler.is_compiling()


def cast_once(states: torch.Tensor) -> torch.Tensor:
    """States in the precision of autocast, where several layers would cast them one by one. It leaves doubles alone."""
    kind = states.device.type
    is_cast = torch.is_autocast_enabled(kind) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(kind)) if is_cast else states


def linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """What a linear layer, and an activation after it, make of states, `(..., in_features) -> (..., out_features)`.

    Args:
        layer: An `nn.Linear`, or what stands in its place.
        states: What it reads.
        activation: What follows, if anything does. A ReLU is part of the product where that can be.
    """
    if can_fuse(layer, states, activation):
        return _apply([layer], states, activation is not None)
    output = layer(states)
    return output if activation is None else activation(output)


def can_join(layers: Sequence[nn.Module], states: torch.Tensor) -> bool:
    """Whether `joined_linear` makes a single product of layers."""
    return all(can_fuse(layer, states) for layer in layers) and len({layer.bias is None for layer in layers}) == 1


def joined_linear(layers: Sequence[nn.Linear], states: torch.Tensor) -> torch.Tensor:
    """What several layers make of the same states, side by side, `(..., in_features) -> (..., sum of out_features)`.

    Args:
        layers: Those that `can_join` said yes to.
        states: What they read.
    """
    return _apply(layers, states, is_rectified=False)


def _apply(layers: Sequence[nn.Linear], states: torch.Tensor, is_rectified: bool) -> torch.Tensor:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _FusedLinear.apply(states, is_rectified, len(layers), *(layer.weight for layer in layers), *biases)
