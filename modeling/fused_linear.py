"""Linear layers in training in bfloat16 on a CPU: a bias, and a ReLU, are added while the product is written.

torch writes the bias first and reads it again, and a ReLU reads and writes once more.
"""

import functools

import torch
from torch import nn

# What a smaller layer gains does not pay for the call of a function written in Python.
_LEAST_SIZE = 2**18


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_rectified: bool):
        matrix, row = weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
        activation = "relu" if is_rectified else "none"
        output = torch.ops.mkldnn._linear_pointwise(states, matrix, row, activation, [], "")
        ctx.save_for_backward(states, matrix, output if is_rectified else None)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        states, matrix, output = ctx.saved_tensors
        if output is not None:
            gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
        rows, shape = gradient.flatten(0, -2), states.shape
        of_states = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_states = (rows @ matrix).view(shape)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ states.flatten(0, -2)).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(dim=0).to(ctx.dtypes[1])
        return of_states, of_weight, of_bias, None


@functools.cache
def _has_kernel() -> bool:
    """Whether this build of torch has oneDNN, and this processor products in bfloat16."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _is_wrapped(module: nn.Module) -> bool:
    """Whether somebody wants to be told when a module is called, or put something in the place of what it does."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def can_fuse(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> bool:
    """Whether `linear` makes a single product of a layer and what follows it."""
    if states.dtype != torch.bfloat16 or states.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if type(layer) is not nn.Linear or type(activation) not in (nn.ReLU, type(None)):
        return False
    if any(_is_wrapped(module) for module in (layer, activation) if module is not None):
        return False
    if nn.modules.module._has_any_global_hook():
        return False
    if type(layer.weight.data) is not torch.Tensor or layer.weight.numel() < _LEAST_SIZE:
        return False
    return torch.backends.mkldnn.enabled and _has_kernel() and not torch.compiler.is_compiling()


def cast_once(states: torch.Tensor) -> torch.Tensor:
    """States in the precision of autocast, where several layers would cast them one by one."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """What a linear layer, and an activation after it, make of states, `(..., in_features) -> (..., out_features)`.

    Args:
        layer: An `nn.Linear`, or what stands in its place.
        states: What it reads.
        activation: What follows, if anything does. A ReLU is part of the product where that can be.
    """
    if can_fuse(layer, states, activation):
        return _FusedLinear.apply(states, layer.weight, layer.bias, activation is not None)
    output = layer(states)
    return output if activation is None else activation(output)
