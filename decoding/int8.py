"""Products with weights in 8 bits on a CPU, by the kernels of FBGEMM."""

import functools
import warnings
from collections.abc import Callable

import torch

WEIGHT_LEVELS = 127
# Levels of an activation on either side of zero: of 8 bits, and of 7 bits, of which two products fit into a sum of 16 bits.
_MOST_LEVELS, _FEW_LEVELS = 127, 63
# Smaller activations become zero, so that the reciprocal of a row's scale is finite.
_LEAST = 1e-30
_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"


def has_int8_kernels() -> bool:
    """Return True if torch can multiply with weights in 8 bits on this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch.ops.quantized, _PRODUCT)


@functools.cache
def activation_levels() -> int:
    """Return the number of levels on either side of zero that the kernel can sum up on this processor.

    Kernels for VNNI sum up in 32 bits and allow activations of 8 bits. Older kernels sum up two products in 16 bits.
    """
    size = 64
    packed = pack_int8(torch.full((size, size), WEIGHT_LEVELS, dtype=torch.int8), torch.ones(size))
    largest = torch.full((2, size), float(_MOST_LEVELS))
    sums = operator_of(_PRODUCT)(largest, 1.0, _MOST_LEVELS + 1, packed)
    return _MOST_LEVELS if bool((sums == size * WEIGHT_LEVELS * _MOST_LEVELS).all()) else _FEW_LEVELS


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to int8 levels (out_features, in_features), and return the scale of each row, (out_features,)."""
    # A row of zeros may have any scale but 0.
    scale = (weight.abs().amax(dim=1) / WEIGHT_LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def pack_int8(levels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.ScriptObject:
    """Pack the output of `round_weight`, and a bias (out_features,), for the kernel."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch announces that it will remove the functions; `has_int8_kernels` checks for them.
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scale), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(weight, bias)
    finally:
        torch.backends.quantized.engine = engine


def unpack_int8(packed: torch.ScriptObject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the arguments of `pack_int8`."""
    weight, bias = torch.ops.quantized.linear_unpack(packed)
    return weight.int_repr(), weight.q_per_channel_scales().float(), bias


def scale_rows(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (rows, in_features) in units of their levels, and the unit of each row, (rows, 1)."""
    # One call of `vector_norm` for infinity takes many times as long with many rows.
    step = states.abs().amax(dim=1, keepdim=True).clamp_min_(_LEAST).div_(activation_levels())
    return states * step.reciprocal(), step


@functools.cache
def operator_of(name: str) -> Callable[..., torch.Tensor]:
    """Return an operator of `torch.ops.quantized` without the Python dispatch of its packet."""
    packet = getattr(torch.ops.quantized, name)
    return getattr(packet, "_op", packet)


def multiply_levels(states: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """Round rows of `scale_rows`, multiply them with a packed weight and add its bias: (rows, out_features)."""
    return operator_of(_PRODUCT)(states, 1.0, activation_levels() + 1, packed)


def multiply_int8(states: torch.Tensor, packed: torch.ScriptObject, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a linear layer in 8 bits to rows, each rounded with its own scale.

    torch's dynamic kernel is faster, but has one scale for all rows. Here a sentence's result does not depend on the other
    sentences of its batch; only the last digit of the float32 scaling may differ.

    Args:
        states: Rows (rows, in_features).
        packed: Weight and bias.
        bias: The same bias, (out_features,).

    Returns:
        Shape (rows, out_features).
    """
    if states.shape[0] == 1:
        # With one row, the kernel can also round and scale back.
        low, high = torch.aminmax(states)
        levels = activation_levels()
        step = max(-low.item(), high.item(), _LEAST) / levels
        return operator_of(_PRODUCT)(states, step, levels + 1, packed)
    scaled, step = scale_rows(states)
    output = multiply_levels(scaled, packed)
    # The kernel has added the bias to unscaled sums.
    return output.mul_(step) if bias is None else torch.lerp(bias, output, step)
