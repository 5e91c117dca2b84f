"""Products with weights in 8 bits, on a CPU: FBGEMM's kernel, and what it wants."""

import functools
import warnings
from collections.abc import Callable

import torch

WEIGHT_LEVELS = 127
# Of activations, on either side of zero: those of 8 bits, and those of 7, of which two products fit into a sum of 16 bits.
_MOST_LEVELS, _FEW_LEVELS = 127, 63
# What is smaller is zero: one by the scale of a row must be a number.
_LEAST = 1e-30
_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"


def has_int8_kernels() -> bool:
    """Whether torch can multiply with weights in 8 bits on this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch.ops.quantized, _PRODUCT)


@functools.cache
def activation_levels() -> int:
    """How many levels an activation has on either side of zero: as many as the kernel adds up on this processor.

    Kernels for VNNI, which multiply and add up in 32 bits at once, take all 8 bits; older ones add up two products in 16 bits.
    """
    size = 64
    packed = pack_int8(torch.full((size, size), WEIGHT_LEVELS, dtype=torch.int8), torch.ones(size))
    largest = torch.full((2, size), float(_MOST_LEVELS))
    sums = operator_of(_PRODUCT)(largest, 1.0, _MOST_LEVELS + 1, packed)
    return _MOST_LEVELS if bool((sums == size * WEIGHT_LEVELS * _MOST_LEVELS).all()) else _FEW_LEVELS


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers `(out_features, in_features)` of a weight, and the scale of each row, `(out_features)`."""
    # A row of zeros has no scale; any will do.
    scale = (weight.abs().amax(dim=1) / WEIGHT_LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def pack_int8(levels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.ScriptObject:
    """What `round_weight` made, and a bias `(out_features)`, as the kernel reads it."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch will take these away some day: `has_int8_kernels` looks whether they are there.
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scale), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(weight, bias)
    finally:
        torch.backends.quantized.engine = engine


def unpack_int8(packed: torch.ScriptObject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `pack_int8` packed."""
    weight, bias = torch.ops.quantized.linear_unpack(packed)
    return weight.int_repr(), weight.q_per_channel_scales().float(), bias


def scale_rows(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `(rows, in_features)` as multiples of the step between two levels, and that step of each row, `(rows, 1)`."""
    # `vector_norm` of infinity, in one call, takes many times as long where there are many rows.
    step = states.abs().amax(dim=1, keepdim=True).clamp_min_(_LEAST).div_(activation_levels())
    return states * step.reciprocal(), step


@functools.cache
def operator_of(name: str) -> Callable[..., torch.Tensor]:
    """An operator of `torch.ops.quantized` as it is; called from there, it first looks at each argument for others to ask."""
    packet = getattr(torch.ops.quantized, name)
    return getattr(packet, "_op", packet)


def multiply_levels(states: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """Rows of `scale_rows`, rounded to whole numbers, times a packed weight, and its bias: `(rows, out_features)`."""
    return operator_of(_PRODUCT)(states, 1.0, activation_levels() + 1, packed)


def multiply_int8(states: torch.Tensor, packed: torch.ScriptObject, bias: torch.Tensor | None) -> torch.Tensor:
    """What a linear layer computes of rows that are rounded, each with a scale of its own.

    Args:
        states: `(rows, in_features)`.
        packed: The weight, and the bias.
        bias: The same once more, `(out_features)`.

    Returns:
        `(rows, out_features)`. Each row is rounded as it is by itself, whatever the others are; only the last digit of the
        float32 numbers that whole ones are multiplied by may differ.
    """
    if states.shape[0] == 1:
        # One scale for all: the kernel itself rounds and scales back.
        low, high = torch.aminmax(states)
        levels = activation_levels()
        step = max(-low.item(), high.item(), _LEAST) / levels
        return operator_of(_PRODUCT)(states, step, levels + 1, packed)
    scaled, step = scale_rows(states)
    output = multiply_levels(scaled, packed)
    # The kernel added the bias to what is to be scaled.
    return output.mul_(step) if bias is None else torch.lerp(bias, output, step)
