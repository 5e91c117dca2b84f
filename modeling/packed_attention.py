"""Attention over packed rows: which kernel computes it, what it is told of the mask, and how it is called.

- `reference`: the whole mask, quadratic in the length of the row; what the others are tested against (eager attention).
- `grid`: a row of a grid for each sequence; on a CPU, and wherever the next two do not apply.
- `varlen`: flash attention by offsets, for half precision on a GPU (Ampere or newer), without bias and dropout.
- `flex`: flex attention, which adds a position bias score by score, on such a GPU, without dropout.
- `flash`: one of transformers' flash attention packages, by their name.
"""

import inspect

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .grid_attention import grid_attention
from .packed_flex import PackedFlexMask, packed_flex_attention
from .packing import Packing

# The GPUs, by compute capability, for which flash attention is built; Triton's kernels of flex attention need shared memory that
# older ones lack.
_LEAST_CAPABILITY = (8, 0)


def choose_kernel(implementation: str, states: torch.Tensor, head_dim: int, has_bias: bool, dropout: float) -> str:
    """The kernel for a packed attention.

    Args:
        implementation: The model's `attn_implementation`.
        states: What enters the attention; gives device and dtype.
        head_dim: Width of a head.
        has_bias: Whether a position bias is added to the scores.
        dropout: Of the attention weights, 0 outside training.

    Raises:
        ValueError: If the implementation cannot do it.
    """
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
    """What the kernel of a packing wants as a mask: made once for all layers that share a position bias.

    Args:
        packing: Of the two rows.
        bias: Module that gives a position bias, if there is one.
        like: Gives the dtype.

    Returns:
        For `flex` what it is told; for `grid` and `reference` what is added to the scores. None where the kernel knows all
        from the packing.
    """
    if packing.kernel == "flex":
        return PackedFlexMask(packing, bias)
    if packing.kernel in ("varlen", "flash") or (packing.kernel == "grid" and bias is None and not packing.is_causal):
        return None
    if packing.kernel == "grid":
        seen = packing.is_seen_in_grid()
        # In its sequence, a token stands where it stands in the grid.
        positions = torch.arange(packing.queries.width, device=like.device)[None, :]
    else:
        seen, positions = packing.is_seen(), packing.queries.positions
    dtype = like.dtype if bias is None else torch.float32
    mask = torch.zeros(seen.shape, dtype=dtype, device=like.device).masked_fill(~seen, torch.finfo(dtype).min)
    if bias is None:
        return mask
    return bias(positions, positions).to(dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _varlen(query, key, value, packing: Packing, scaling: float) -> torch.Tensor:
    # Before torch 2.13, the kernel knows its own scale alone and takes the causal mask by another name.
    query = query * (scaling * query.shape[-1] ** 0.5)
    names = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, head_dim)
    output = varlen_attn(
        *rows,
        packing.queries.offsets,
        packing.keys.offsets,
        packing.queries.longest,
        packing.keys.longest,
        **(causal if packing.is_causal else {}),
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
    """Attends within each sequence of packed rows, by any kernel but the reference.

    Args:
        module: The attention.
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: What `packed_mask` made.
        packing: Of the two rows, with the kernel.
        scaling: Factor of the scores.
        dropout: Probability to drop an attention weight.

    Returns:
        `(1, query tokens, heads, head_dim)`.
    """
    if packing.kernel == "grid":
        return grid_attention(query, key, value, mask, packing, scaling, dropout)
    if packing.kernel == "varlen":
        return _varlen(query, key, value, packing, scaling)
    if packing.kernel == "flex":
        return packed_flex_attention(query, key, value, mask, scaling)
    return _flash(module, query, key, value, packing, scaling, dropout)
