"""Dropout with random bits that are cheap on a CPU.

Linear layers in training in bfloat16 on a CPU: a bias, and a ReLU, are added while the product is written.

torch writes the bias first and reads it again, and a ReLU reads and writes once more. Layers that read the same states are one
product, and so is the gradient of what they read.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import nn

from metaphrase.modeling.acceleration import plain_dropout, plain_linear
from metaphrase.modeling.compat import is_hooked

# A decision takes 8 random bits, of which torch's generator gives eight at once.
_LEVELS = 2**8
# Decisions that are made by one threshold: many, so that thresholds cost nothing; few, so that their shares hardly differ.
_DECISIONS = 2**10
_MIN_PROBABILITY = 1e-2


def random_mask(shape: torch.Size | tuple[int, ...], p: float, device: torch.device) -> tuple[torch.Tensor, float]:
    """Draws what a dropout keeps.

    A probability lies between two that 8 bits can express. Each 1,024 neighbours are drawn with one of the two, so often with
    either that every entry is 0 with probability `p`. Two of such neighbours are then not quite independent: at 0.1, their
    correlation is 0.00004.

    Args:
        shape: Of the mask.
        p: Probability of 0.
        device: A CPU's generator, as `torch.manual_seed` seeds it, draws for a CPU.

    Returns:
        A mask of 0 and 1 in `int8`, with which a CPU computes several times faster than with booleans, and the expected share
        of 1 in it.
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
    """What a mask of `random_mask` keeps of states of its shape, divided by the share that it keeps."""
    return mask.to(states.dtype).mul_(states).mul_(1 / share)


class _MaskedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: torch.Tensor, p: float) -> torch.Tensor:
        mask, ctx.share = random_mask(states.shape, p, states.device)
        ctx.save_for_backward(mask)
        return apply_mask(states, mask, ctx.share)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        return apply_mask(gradient, mask, ctx.share), None


class _AddedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual: torch.Tensor, states: torch.Tensor, p: float) -> torch.Tensor:
        mask, ctx.share = random_mask(states.shape, p, states.device)
        ctx.save_for_backward(mask)
        ctx.dtypes = residual.dtype, states.dtype
        dtype = torch.promote_types(*ctx.dtypes)
        return torch.addcmul(residual.to(dtype), states.to(dtype), mask.to(dtype), value=1 / ctx.share)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        of_residual, of_states = ctx.dtypes
        return gradient.to(of_residual), apply_mask(gradient, mask, ctx.share).to(of_states), None


def _is_plain(states: torch.Tensor, p: float) -> bool:
    """Whether a dropout is torch's own."""
    return (
        states.device.type != "cpu"
        or torch.compiler.is_compiling()
        or not _MIN_PROBABILITY <= p <= 1 - _MIN_PROBABILITY
        or not states.is_floating_point()
    )


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Sets entries to 0 with a probability and scales the others so that the mean stays.

    On a CPU, `torch.nn.functional.dropout` takes as long as a linear layer of width 128: nearly all of it goes into its random
    numbers. There it is drawn from fewer bits; elsewhere, and in compiled code, it is torch's own.

    Source: Srivastava et al. 2014, section 4.

    Args:
        states: Any shape.
        p: Probability, in [0, 1).
        training: Nothing happens without it.

    Returns:
        A tensor like `states`.
    """
    if not training or p == 0:
        return states
    if _is_plain(states, p):
        return plain_dropout(states, p, training)
    return _MaskedDropout.apply(states, p)


def add_dropout(residual: torch.Tensor, states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """`residual + dropout(states)`, of one shape. On a CPU the sum takes half as long so, as all of it is in the wider type.

    Args:
        residual: Any shape.
        states: Likewise.
        p: Probability, in [0, 1).
        training: Nothing is dropped without it.
    """
    if not training or p == 0 or _is_plain(states, p):
        return residual + dropout(states, p, training)
    return _AddedDropout.apply(residual, states, p)


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


def can_fuse(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> bool:
    """Whether `linear` makes a single product of a layer and what follows it."""
    if states.dtype != torch.bfloat16 or states.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if type(layer) is not nn.Linear or type(activation) not in (nn.ReLU, type(None)):
        return False
    if any(is_hooked(module) for module in (layer, activation) if module is not None):
        return False
    if type(layer.weight.data) is not torch.Tensor or layer.weight.numel() < _LEAST_SIZE:
        return False
    return torch.backends.mkldnn.enabled and _has_kernel() and not torch.compiler.is_compiling()


def linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """What a linear layer, and an activation after it, make of states, `(..., in_features) -> (..., out_features)`.

    Args:
        layer: An `nn.Linear`, or what stands in its place.
        states: What it reads.
        activation: What follows, if anything does. A ReLU is part of the product where that can be.
    """
    if can_fuse(layer, states, activation):
        return _apply([layer], states, activation is not None)
    if activation is not None and can_fuse(layer, states):
        return activation(_apply([layer], states, is_rectified=False))
    return plain_linear(layer, states, activation)


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
