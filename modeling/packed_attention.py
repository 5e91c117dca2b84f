"""Attention over packed rows: choice of a kernel, its mask, its call.

- `reference`: the model's attention with the mask of the full row, quadratic in its length. The others are tested against it.
- `varlen`: flash attention by offsets, for half precision on a GPU (Ampere or newer), without bias and dropout.
- `flash`: one of transformers' flash attention packages.
- `grid`: one row of a grid for each sequence; on a CPU, and wherever the others do not apply. Part of `metaphrase.ops`.
- `flex`: flex attention, for a position bias on such a GPU, without dropout. Part of `metaphrase.ops`.

Where a kernel of `metaphrase.ops` is chosen and not plugged in, the reference takes its place.
"""

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .acceleration import acceleration
from .compat import varlen_causal
from .packing import Packing

# The GPUs, by compute capability, for which flash attention is built; Triton's kernels of flex attention need shared memory that
# older ones lack.
_LEAST_CAPABILITY = (8, 0)


def choose_kernel(implementation: str, states: torch.Tensor, head_dim: int, has_bias: bool, dropout: float) -> str:
    """Choose the kernel for a packed attention.

    Args:
        implementation: The model's `attn_implementation`.
        states: Input of the attention; gives device and dtype.
        head_dim: Width of a head.
        has_bias: True if a position bias is added to the scores.
        dropout: Dropout of the attention weights, 0 outside training.

    Raises:
        ValueError: If the implementation cannot attend over packed rows.
    """
    kernel = _preferred_kernel(implementation, states, head_dim, has_bias, dropout)
    is_there = kernel in acceleration.packed_kernels or kernel in ("varlen", "flash")
    return kernel if is_there else "reference"


def _preferred_kernel(implementation: str, states: torch.Tensor, head_dim: int, has_bias: bool, dropout: float) -> str:
    if implementation == "eager":
        return "reference"
    if implementation == "flex_attention":
        if dropout:
            raise ValueError(f"`attention_dropout` must be 0 to train with flex_attention, got {dropout}.")
        return "flex"
    if implementation == "sdpa":
        if dropout or not _is_recent_gpu(states.device):
            return "grid"
        if has_bias:
            return "flex" if 16 <= head_dim <= 128 else "grid"
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        is_flash = dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
        return "varlen" if is_flash else "grid"
    if has_bias or "flash" not in implementation:
        raise ValueError(
            "`attn_implementation` must be sdpa, eager or flex_attention (or, without a position bias, a flash attention) "
            f"for packed rows, got {implementation!r}."
        )
    return "flash"


def _is_recent_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def packed_mask(packing: Packing, bias: nn.Module | None, like: torch.Tensor):
    """Make the mask for the kernel of a packing, once for all layers that share a position bias.

    Args:
        packing: The two rows.
        bias: Module that gives a position bias, if there is one.
        like: Gives the dtype.

    Returns:
        A mask of the kernel's own kind; None where the packing alone says what is visible.
    """
    if packing.kernel in acceleration.packed_kernels:
        return acceleration.packed_kernels[packing.kernel].make_mask(packing, bias, like)
    if packing.kernel in ("varlen", "flash"):
        return None
    return additive_mask(packing.is_seen(), packing.queries.positions, bias, like)


def additive_mask(
    seen: torch.Tensor, positions: torch.Tensor, bias: nn.Module | None, like: torch.Tensor
) -> torch.Tensor:
    """Make a mask that is added to the scores.

    Args:
        seen: True where a query sees a key, `(sequences or 1, 1, query or 1, key)`.
        positions: Positions of queries and keys, `(1, query)`.
        bias: Module that gives a position bias, if there is one.
        like: Gives the dtype of a mask without a bias.

    Returns:
        The bias (or 0) where `seen`, the lowest number elsewhere.
    """
    dtype = like.dtype if bias is None else torch.float32
    mask = torch.zeros(seen.shape, dtype=dtype, device=like.device).masked_fill(~seen, torch.finfo(dtype).min)
    if bias is None:
        return mask
    return bias(positions, positions).to(dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _varlen(query, key, value, packing: Packing, scaling: float) -> torch.Tensor:
    # Before torch 2.13, the kernel knows its own scale alone.
    query = query * (scaling * query.shape[-1] ** 0.5)
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, head_dim)
    output = varlen_attn(
        *rows,
        packing.queries.offsets,
        packing.keys.offsets,
        packing.queries.longest,
        packing.keys.longest,
        **(varlen_causal() if packing.is_causal else {}),
    )
    return output[None]


def _flash(module, query, key, value, packing: Packing, scaling: float, dropout: float) -> torch.Tensor:
    kernel = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    output, _ = kernel(
        module,
        query,
        key,
        value,
        None,
        scaling=scaling,
        dropout=dropout,
        is_causal=packing.is_causal,
        cu_seq_lens_q=packing.queries.offsets,
        cu_seq_lens_k=packing.keys.offsets,
        max_length_q=packing.queries.longest,
        max_length_k=packing.keys.longest,
    )
    return output


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask,
    packing: Packing,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attend within each sequence of packed rows, by any kernel but the reference.

    Args:
        module: The attention module.
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: Mask from `packed_mask`.
        packing: The two rows, and the kernel.
        scaling: Factor of the scores.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    if packing.kernel in acceleration.packed_kernels:
        attend = acceleration.packed_kernels[packing.kernel].attend
        return attend(query, key, value, mask, packing, scaling, dropout)
    if packing.kernel == "varlen":
        return _varlen(query, key, value, packing, scaling)
    return _flash(module, query, key, value, packing, scaling, dropout)
