"""Normalization: LayerNorm, RMSNorm, and what keeps float16 finite."""

import torch
from torch import nn

from .configuration_metaphrase import MetaphraseConfig


class MetaphraseRMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32, and scales.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype == torch.float32:
            return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        # The square of a large float16 is infinite: the whole is done in float32.
        normed = nn.functional.rms_norm(hidden_states.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class HeadRMSNorm(MetaphraseRMSNorm):
    """The RMSNorm of queries and keys, over the width of one head."""


def make_norm(config: MetaphraseConfig) -> nn.Module:
    """The norm over the hidden size that the configuration names."""
    if config.norm_type == "rmsnorm":
        return MetaphraseRMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def clamp_float16(states: torch.Tensor) -> torch.Tensor:
    """Brings what overflowed float16 back to its largest finite number; other types pass unchanged.

    Infinity itself is harmless, but its difference with itself, two layers on, is not a number. T5's checkpoints, trained in
    bfloat16, overflow float16 in the feed-forward.
    """
    if states.dtype != torch.float16:
        return states
    largest = torch.finfo(torch.float16).max
    return states.clamp(min=-largest, max=largest)


def cast_for_autocast(states: torch.Tensor) -> torch.Tensor:
    """Cast states to the precision of autocast, once for several layers that read them. Doubles stay as they are."""
    kind = states.device.type
    is_cast = torch.is_autocast_enabled(kind) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(kind)) if is_cast else states
