"""Normalization, limits of float16, and the operators that the installed `metaphrase` package replaces by faster code.

A copy on the Hub runs these plain functions. `import metaphrase` plugs in `ops/` and `decoding/`, which compute the same.
"""

from types import SimpleNamespace

import torch
from torch import nn

from .configuration_metaphrase import MetaphraseConfig


class MetaphraseRMSNorm(nn.Module):
    """Root mean square normalization with a learned scale, in float32. The scale is the weight, or 1 plus the weight.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, size: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float() if self.plus_one else self.weight
        if hidden_states.dtype == torch.float32:
            return nn.functional.rms_norm(hidden_states, scale.shape, scale, self.eps)
        # The square of a large float16 is infinite.
        normed = nn.functional.rms_norm(hidden_states.float(), scale.shape, scale.float(), self.eps)
        return normed.to(hidden_states.dtype)


def make_norm(config: MetaphraseConfig, size: int) -> nn.Module:
    """Make the normalization that the configuration names, over so many values."""
    if config.norm_type == "rmsnorm":
        return MetaphraseRMSNorm(size, config.norm_eps, config.norm_plus_one)
    return nn.LayerNorm(size, eps=config.norm_eps)


def soft_cap(values: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return `softcap * tanh(values / softcap)` (Gemma Team 2024, arXiv 2408.00118), or the values themselves for None."""
    return values if softcap is None else torch.tanh(values / softcap) * softcap


def clamp_float16(states: torch.Tensor) -> torch.Tensor:
    """Clamp float16 states to finite numbers: two infinities in a residual stream cancel to NaN.

    T5's checkpoints overflow float16 in the feed-forward network, since they were trained in bfloat16.
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


def plain_linear(layer: nn.Module, states: torch.Tensor, activation: nn.Module | None = None) -> torch.Tensor:
    """Apply a linear layer and an activation, clamping float16: `(..., in_features) -> (..., out_features)`."""
    states = clamp_float16(layer(states))
    if activation is None or states.dtype != torch.float16:
        return states if activation is None else activation(states)
    # In float16, the polynomial inside an approximated GELU overflows long before the result does.
    return clamp_float16(activation(states.float()).to(states.dtype))


def plain_add_dropout(residual: torch.Tensor, states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Return `residual + dropout(states)`."""
    return residual + nn.functional.dropout(states, p, training)


# Functions that the network calls. Only the package has an attention over packed rows, which projects, too.
acceleration = SimpleNamespace(
    linear=plain_linear, dropout=nn.functional.dropout, add_dropout=plain_add_dropout, packed_attention=None
)
