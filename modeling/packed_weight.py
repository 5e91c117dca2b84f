"""A weight packed for products with several rows on a CPU: by MKL, ahead of time, rather than anew at each product."""

import functools

import torch
from torch import nn

# Smaller ones stay in the processor's cache however they lie, and narrower ones gain nothing.
_LEAST_SIZE, _LEAST_WIDTH = 2**18, 256
# MKL packs with a number of rows in mind. What it packs for many serves few as well; what it packs for few is slow with many.
_ROWS_IN_MIND = 512
# Of each kind of blocks that kernels work in, and what is left over from them.
_CHECKED_ROWS, _CHECKED_OUTPUTS = (2, 5, 16, 37, 130), 1024


class PackedWeight:
    """The product with a weight, and the sum with a bias, of a linear layer in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        """Args:
        weight: Of a shape for which `can_pack` holds, `(out_features, in_features)`, in float32 on a CPU.
        bias: `(out_features)`.
        """
        weight = weight.detach().contiguous()
        self._packed, self._bias = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS_IN_MIND), bias
        # The kernel wants to know its shape, and nothing else.
        self._like = weight.new_empty(1).expand(weight.shape)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        rows = states.numel() // states.shape[-1]
        return torch.ops.mkl._mkl_linear(states, self._packed, self._like, self._bias, rows)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a linear one of torch's own, with a weight in float32 on a CPU."""
    weight = getattr(layer, "weight", None)
    return (
        type(layer) is nn.Linear
        # A quantized one may be in the place of a plain weight.
        and type(weight.data) is torch.Tensor
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )


@functools.cache
def can_pack(out_features: int, in_features: int) -> bool:
    """Whether a weight of this shape gains by it, and this build of torch and this processor can.

    MKL does not promise that what was packed with one number of rows in mind multiplies others, so that it is tried once.
    """
    if out_features * in_features < _LEAST_SIZE or in_features < _LEAST_WIDTH:
        return False
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        return False
    # The blocks of a long weight are alike, but for what is left over.
    outputs = out_features % _CHECKED_OUTPUTS + (_CHECKED_OUTPUTS if out_features >= _CHECKED_OUTPUTS else 0)
    generator = torch.Generator().manual_seed(0)
    make = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    weight, states = make(outputs, in_features), make(max(_CHECKED_ROWS), in_features)
    try:
        packed = PackedWeight(weight, None)
        return all(
            torch.allclose(packed(states[:rows]), nn.functional.linear(states[:rows], weight), atol=1e-3, rtol=1e-4)
            for rows in _CHECKED_ROWS
        )
    except RuntimeError:
        # Built without what the operators call.
        return False
