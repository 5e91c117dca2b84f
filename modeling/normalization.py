"""Normalization layers, and limits of float16."""

import torch
from torch import nn

from .configuration_metaphrase import MetaphraseConfig


class MetaphraseRMSNorm(nn.Module):
    """Root mean square normalization with a learned scale, in float32.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype == torch.float32:
            return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        # The square of a large float16 is infinite.
        normed = nn.functional.rms_norm(hidden_states.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed.to(hidden_states.dtype)


def make_norm(config: MetaphraseConfig) -> nn.Module:
    """Make the normalization over the hidden size that the configuration names."""
    if config.norm_type == "rmsnorm":
        return MetaphraseRMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def clamp_float16(states: torch.Tensor) -> torch.Tensor:
    """Clamp float16 states to finite numbers, and return states of other types unchanged.

    Two infinities in a residual stream cancel to NaN. T5's checkpoints overflow float16 in the feed-forward network, since they
    were trained in bfloat16.
    """
    if states.dtype != torch.float16:
        return states
    largest = torch.finfo(torch.float16).max
    return states.clamp(min=-largest, max=largest)


def cast_for_autocast(states: torch.Tensor) -> torch.Tensor:
    """Cast states to the dtype of autocast, once for all layers that read the states. float64 stays float64."""
    device_type = states.device.type
    is_cast = torch.is_autocast_enabled(device_type) and states.dtype != torch.float64
    return states.to(torch.get_autocast_dtype(device_type)) if is_cast else states
