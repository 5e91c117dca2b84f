"""Products with weights in 8 bits, on a CPU: FBGEMM's kernel, and what it wants."""

import warnings

import torch

# Activations have 7 bits: two products of theirs with 8-bit weights add up in 16 bits without overflow.
ACTIVATION_LEVELS, _ACTIVATION_ZERO = 63, 64
WEIGHT_LEVELS = 127
_TINY = torch.finfo(torch.float32).tiny


def has_int8_kernels() -> bool:
    """Whether torch can multiply with weights in 8 bits on this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32"
    )


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers `(out_features, in_features)` of a weight, and the scale of each row, `(out_features)`."""
    # A row of zeros has no scale; any will do.
    scale = (weight.abs().amax(dim=1) / WEIGHT_LEVELS).clamp_min(_TINY)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def pack_int8(levels: torch.Tensor, scale: torch.Tensor) -> torch.ScriptObject:
    """What `round_weight` made, as the kernel reads it."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch will take these away some day: `has_int8_kernels` looks whether they are there.
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scale), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine


def scale_rows(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `(rows, in_features)` whose largest entry is 1, and the scale of each, `(rows, 1)`."""
    # `vector_norm` of infinity, in one call, takes many times as long where there are many rows.
    scale = states.abs().amax(dim=1, keepdim=True).clamp_min_(_TINY)
    return states / scale, scale


def multiply_int8(states: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """Rows of `scale_rows`, rounded, times a packed weight: `(rows, in_features)` -> `(rows, out_features)`."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        states, 1.0 / ACTIVATION_LEVELS, _ACTIVATION_ZERO, packed
    )


def rounded(states: torch.Tensor) -> torch.Tensor:
    """What `multiply_int8` makes of rows before it multiplies them."""
    return torch.fake_quantize_per_tensor_affine(states, 1.0 / ACTIVATION_LEVELS, _ACTIVATION_ZERO, 0, 127)
