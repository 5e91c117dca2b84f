"""Attention over packed rows: the choice of a kernel, its mask and its call.

- `reference`: the model's attention with a mask of the full row, quadratic in the length of the row. Tests compare the other
  kernels with `reference`.
- `varlen`: torch's flash attention, for half precision on an Ampere GPU or newer, without bias and dropout.
- `flash`: a flash attention package of transformers.
- `grid`: a padded grid with one row per sequence, for a CPU and for all other cases. Part of `metaphrase.ops`.
- `flex`: flex attention, for a position bias on an Ampere GPU or newer, without dropout. Part of `metaphrase.ops`.

Without `metaphrase.ops`, `reference` replaces `grid` and `flex`.
"""

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .acceleration import acceleration
from .compat import varlen_causal
from .packing import Packing

# Older GPUs have no flash attention, and too little shared memory for Triton's kernels of flex attention.
_LEAST_CAPABILITY = (8, 0)


def choose_kernel(implementation: str, states: torch.Tensor, head_dim: int, has_bias: bool, dropout: float) -> str:
    """Return the name of the kernel for a packed attention.

    Args:
        implementation: The model's `attn_implementation`.
        states: Input of the attention, of its device and dtype.
        head_dim: Width of a head.
        has_bias: True if a position bias is added to the scores.
        dropout: Dropout of the attention weights, 0 outside training.

    Raises:
        ValueError: If the implementation cannot attend over packed rows.
    """
    kernel = _preferred_kernel(implementation, states, head_dim, has_bias, dropout)
    is_installed = kernel in ("varlen", "flash") or kernel in acceleration.packed_kernels
    return kernel if is_installed else "reference"


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
        device_type = states.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_autocast else states.dtype
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
        packing: The sequences of the queries and keys, and the kernel.
        bias: Module of the position bias, or None.
        like: A tensor of the dtype of the mask.

    Returns:
        A mask in the kernel's format, or None if the kernel needs the packing only.
    """
    if packing.kernel in acceleration.packed_kernels:
        return acceleration.packed_kernels[packing.kernel].make_mask(packing, bias, like)
    if packing.kernel in ("varlen", "flash"):
        return None
    return additive_mask(packing.is_seen(), packing.queries.positions, bias, like)


def additive_mask(
    is_seen: torch.Tensor, positions: torch.Tensor, bias: nn.Module | None, like: torch.Tensor
) -> torch.Tensor:
    """Make a mask that is added to the scores.

    Args:
        is_seen: True if a query sees a key, `(sequences or 1, 1, query or 1, key)`.
        positions: Positions of queries and keys, `(1, query)`.
        bias: Module of the position bias, or None.
        like: A tensor of the dtype of a mask without a bias.

    Returns:
        The bias, or 0, if `is_seen`, and the lowest number elsewhere. With a bias in float32.
    """
    if bias is None:
        scores = torch.zeros(is_seen.shape, dtype=like.dtype, device=like.device)
    else:
        scores = bias(positions, positions).float()
    return scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)


def _varlen(query, key, value, packing: Packing, scaling: float) -> torch.Tensor:
    # Before torch 2.13, the kernel has a fixed scale.
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
    """Attend within each sequence of packed rows, by any kernel but `reference`.

    Args:
        module: The attention module.
        query: `(1, heads, query tokens, head_dim)`.
        key: `(1, heads, key tokens, head_dim)`.
        value: `(1, heads, key tokens, head_dim)`.
        mask: Mask from `packed_mask`.
        packing: The sequences of the queries and keys, and the kernel.
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
