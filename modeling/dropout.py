"""Dropout with random bits that are cheap on a CPU."""

import math

import torch
from torch import nn

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
        return nn.functional.dropout(states, p=p, training=True)
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
