"""Feed-forward network, encoder layer and decoder layer."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .acceleration import acceleration
from .attention import MetaphraseAttention
from .compat import takes_cache
from .configuration_metaphrase import MetaphraseConfig
from .normalization import cast_for_autocast, clamp_float16, make_norm
from .packing import Packing


class MetaphraseMLP(nn.Module):
    """Feed-forward network: (batch, length, hidden) -> (batch, length, inner) -> (batch, length, hidden).

    Source: Vaswani et al. 2017, section 3.3, arXiv 1706.03762. The gate is from Shazeer 2020, arXiv 2002.05202.
    """

    def __init__(self, config: MetaphraseConfig, ffn_dim: int):
        super().__init__()
        if config.gated_mlp:
            self.gate_proj = nn.Linear(config.hidden_size, ffn_dim, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, ffn_dim, bias=config.mlp_bias)
        self.down_proj = nn.Linear(ffn_dim, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.activation_function]
        self.is_gated = config.gated_mlp
        self.activation_dropout = config.activation_dropout

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.training:
            hidden_states = cast_for_autocast(hidden_states)
        if self.is_gated:
            inner = acceleration.linear(self.up_proj, hidden_states)
            inner = clamp_float16(acceleration.linear(self.gate_proj, hidden_states, self.activation) * inner)
        else:
            inner = acceleration.linear(self.up_proj, hidden_states, self.activation)
        inner = acceleration.dropout(inner, p=self.activation_dropout, training=self.training)
        return acceleration.linear(self.down_proj, inner)


class _ResidualLayer(GradientCheckpointingLayer):
    """Sublayers with residual connections, normalized before (`pre`) or after (`post`) each sublayer.

    Source: Xiong et al. 2020, figure 1, arXiv 2002.04745.
    """

    def __init__(self, config: MetaphraseConfig):
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.dropout = config.dropout

    def _enter(self, hidden_states: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return norm(hidden_states) if self.is_pre_norm else hidden_states

    def _leave(self, residual: torch.Tensor, output: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        hidden_states = acceleration.add_dropout(residual, output, p=self.dropout, training=self.training)
        hidden_states = clamp_float16(hidden_states)
        return hidden_states if self.is_pre_norm else norm(hidden_states)


class MetaphraseEncoderLayer(_ResidualLayer):
    """Self-attention and feed-forward network."""

    def __init__(self, config: MetaphraseConfig, layer_idx: int):
        super().__init__(config)
        self.self_attn = MetaphraseAttention(config, config.encoder_attention_heads, layer_idx)
        self.self_attn_norm = make_norm(config)
        self.mlp = MetaphraseMLP(config, config.encoder_ffn_dim)
        self.mlp_norm = make_norm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Apply the layer: `(batch, source, hidden) -> (batch, source, hidden)`."""
        output, _ = self.self_attn(
            self._enter(hidden_states, self.self_attn_norm),
            attention_mask=attention_mask,
            position_bias=position_bias,
            rotation=rotation,
            **kwargs,
        )
        hidden_states = self._leave(hidden_states, output, self.self_attn_norm)
        output = self.mlp(self._enter(hidden_states, self.mlp_norm))
        return self._leave(hidden_states, output, self.mlp_norm)


class MetaphraseDecoderLayer(_ResidualLayer):
    """Causal self-attention, cross-attention and feed-forward network."""

    def __init__(self, config: MetaphraseConfig, layer_idx: int):
        super().__init__(config)
        heads = config.decoder_attention_heads
        self.self_attn = MetaphraseAttention(config, heads, layer_idx, is_causal=True)
        self.self_attn_norm = make_norm(config)
        self.cross_attn = MetaphraseAttention(config, heads, layer_idx, is_cross=True)
        self.cross_attn_norm = make_norm(config)
        self.mlp = MetaphraseMLP(config, config.decoder_ffn_dim)
        self.mlp_norm = make_norm(config)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_output: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        cross_packing: Packing | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Apply the layer: `(batch, target, hidden), (batch, source, hidden) -> (batch, target, hidden)`."""
        output, _ = self.self_attn(
            self._enter(hidden_states, self.self_attn_norm),
            attention_mask=attention_mask,
            position_bias=position_bias,
            rotation=rotation,
            past_key_values=past_key_values,
            packing=packing,
            **kwargs,
        )
        hidden_states = self._leave(hidden_states, output, self.self_attn_norm)
        output, _ = self.cross_attn(
            self._enter(hidden_states, self.cross_attn_norm),
            encoder_output,
            attention_mask=encoder_mask,
            past_key_values=past_key_values,
            packing=cross_packing,
            **kwargs,
        )
        hidden_states = self._leave(hidden_states, output, self.cross_attn_norm)
        output = self.mlp(self._enter(hidden_states, self.mlp_norm))
        return self._leave(hidden_states, output, self.mlp_norm)
