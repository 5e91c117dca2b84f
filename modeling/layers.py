"""Attention, recurrence, feed-forward network, encoder layer and decoder layer.

Attention: (batch, length, hidden) -> (batch, heads, length, head_dim) -> kernel -> (batch, length, hidden). The kernel comes
from transformers' attention interface, so that `attn_implementation=` works as for every model.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_metaphrase import SLIDING, SSRU, MetaphraseConfig, StackSizes
from .operators import MetaphraseRMSNorm, acceleration, cast_for_autocast, clamp_float16, make_norm, soft_cap
from .positions import RelativePositionBias, rotate

# Cosine and sine of the positions, each `(batch, 1, query, rotated)`.
PositionEmbeddings = tuple[torch.Tensor, torch.Tensor] | None


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention in plain operations, the reference for the fast kernels.

    Queries are `(batch, heads, query, head_dim)`, keys and values `(batch, key_value_heads, key, head_dim)`. The mask is added to
    the scores, or True where a key is visible, `(batch or 1, heads or 1, query, key)`. `softcap` is that of `soft_cap`.

    Source: Vaswani et al. 2017, section 3.2, arXiv 1706.03762.

    Returns:
        Output `(batch, query, heads, head_dim)` and weights `(batch, heads, query, key)`.
    """
    key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    # In float16, large products overflow, and so does the sum of a score and the lowest number.
    score_dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
    scores = soft_cap(torch.matmul(query.to(score_dtype), key.to(score_dtype).transpose(2, 3)) * scaling, softcap)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            # A float32 score can outweigh the lowest float16, so hidden keys are filled, not only added to.
            hidden = attention_mask <= torch.finfo(attention_mask.dtype).min
            scores = (scores + attention_mask.to(score_dtype)).masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = acceleration.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def combine_bias(position_bias: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Add a position bias `(1 or batch, heads, query, key)` and a mask. Rows without a visible key are finite.

    The mask is boolean or additive, `(batch, 1, query, key)`. None hides no key.
    """
    if attention_mask is None:
        return position_bias
    lowest = torch.finfo(position_bias.dtype).min
    if attention_mask.dtype == torch.bool:
        hidden, combined = ~attention_mask, position_bias
    else:
        hidden, combined = attention_mask <= torch.finfo(attention_mask.dtype).min, position_bias + attention_mask
    # A large score can outweigh the lowest float16, so hidden keys get minus infinity. A row of infinities alone gives NaN.
    fill = position_bias.new_full((), -torch.inf).where(~hidden.all(dim=-1, keepdim=True), lowest)
    return torch.where(hidden, fill.to(combined.dtype), combined)


class MetaphraseAttention(nn.Module):
    """Multi-head self-attention, or cross-attention to the encoder output."""

    def __init__(
        self,
        config: MetaphraseConfig,
        sizes: StackSizes,
        layer_idx: int,
        is_causal: bool = False,
        source_size: int | None = None,
        is_merged: bool = False,
    ):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, is_causal
        # `source_size` is the width of the encoder output that a cross-attention reads. A merged attention reads both.
        self.is_cross, self.is_merged = source_size is not None, is_merged
        self.head_dim = sizes.head_dim
        self.num_key_value_groups = sizes.attention_heads // sizes.key_value_heads
        self.scaling = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_dropout = config.attention_dropout
        # Kernels read these names. The window of flash attention has one width for both sides, with the token itself.
        self.options: dict[str, float | int] = {}
        if config.attn_logit_softcapping is not None:
            self.options["softcap"] = config.attn_logit_softcapping
        if not self.is_cross and sizes.layer_types[layer_idx] == SLIDING:
            self.options["sliding_window"] = max(sizes.window) + 1

        width, bias = sizes.hidden_size, config.attention_bias
        query_size, key_size = (heads * self.head_dim for heads in (sizes.attention_heads, sizes.key_value_heads))
        self.q_proj = nn.Linear(width, query_size, bias=bias)
        self.k_proj = nn.Linear(source_size or width, key_size, bias=bias)
        self.v_proj = nn.Linear(source_size or width, key_size, bias=bias)
        if config.attention_scale is not None:
            # Scores start with the same variance as under the usual scale.
            self.q_proj.initial_gain = self.head_dim**-0.5 / config.attention_scale
        self.o_proj = nn.Linear(query_size, width, bias=bias)
        if config.qk_norm:
            self.q_norm = MetaphraseRMSNorm(self.head_dim, config.norm_eps, config.norm_plus_one)
            self.k_norm = MetaphraseRMSNorm(self.head_dim, config.norm_eps, config.norm_plus_one)
        has_bias = config.position_embedding_type == "relative" and not config.relative_attention_shared
        if has_bias and not self.is_cross:
            self.relative_position_bias = RelativePositionBias(config, sizes.attention_heads, not is_causal)

    def project_queries(self, states: torch.Tensor, position_embeddings: PositionEmbeddings = None) -> torch.Tensor:
        """Return queries `(batch, heads, length, head_dim)`."""
        # (batch, length, heads * head_dim) -> (batch, heads, length, head_dim)
        query = acceleration.linear(self.q_proj, states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.config.qk_norm:
            query = self.q_norm(query)
        return query if position_embeddings is None else rotate(query, *position_embeddings)

    def project_keys_and_values(
        self, states: torch.Tensor, position_embeddings: PositionEmbeddings = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of states, each `(batch, key_value_heads, length, head_dim)`."""
        key = acceleration.linear(self.k_proj, states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        value = acceleration.linear(self.v_proj, states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.config.qk_norm:
            key = self.k_norm(key)
        return (key if position_embeddings is None else rotate(key, *position_embeddings)), value

    def _read_source(self, encoder_hidden_states: torch.Tensor, past_key_values: Cache | None):
        if past_key_values is None:
            return self.project_keys_and_values(encoder_hidden_states)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(self.layer_idx):
            layer = cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = cache.update(*self.project_keys_and_values(encoder_hidden_states), self.layer_idx)
        past_key_values.is_updated[self.layer_idx] = True
        return key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: PositionEmbeddings = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        packing: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the hidden states, or to the encoder output.

        Args:
            hidden_states: Input of the queries, `(batch, query, hidden)`.
            encoder_hidden_states: Input of keys and values of a cross-attention, `(batch / copies, source, hidden)`, or, beside
                the hidden states, of a merged attention. Each source serves `copies` consecutive rows of the batch.
            packing: The sequences of packed rows, which the installed package makes.

        Returns:
            Output `(batch, query, hidden)`, and the weights `(batch, heads, query, key)` or None, by the kernel.
        """
        hidden_states = cast_for_autocast(hidden_states)
        dropout = self.attention_dropout if self.training else 0.0
        if packing is not None:
            inputs = hidden_states, encoder_hidden_states, attention_mask, position_embeddings
            output, weights = acceleration.packed_attention(self, *inputs, packing, dropout)
            return acceleration.linear(self.o_proj, output.reshape(*hidden_states.shape[:-1], -1)), weights
        query = self.project_queries(hidden_states, position_embeddings)
        if self.is_cross:
            key, value = self._read_source(encoder_hidden_states, past_key_values)
        else:
            key, value = self.project_keys_and_values(hidden_states, position_embeddings)
            if past_key_values is not None:
                key, value = past_key_values.self_attention_cache.update(key, value, self.layer_idx)
        if self.is_merged:
            source_key, source_value = self._read_source(encoder_hidden_states, past_key_values)
            copies = key.shape[0] // source_key.shape[0]
            key = torch.cat((key, source_key.repeat_interleave(copies, dim=0)), dim=2)
            value = torch.cat((value, source_value.repeat_interleave(copies, dim=0)), dim=2)
        copies = query.shape[0] // key.shape[0]
        if copies > 1:
            # Join the queries of a source: (batch, heads, query, dim) -> (batch / copies, heads, copies * query, dim)
            query = query.unflatten(0, (-1, copies)).transpose(1, 2).flatten(2, 3)
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = kernel(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **self.options, **kwargs
        )
        if copies > 1 and weights is not None:
            weights = weights.unflatten(2, (copies, -1)).transpose(1, 2).flatten(0, 1)
        # (batch, query, heads, head_dim), or folded -> (batch, query, heads * head_dim) -> (batch, query, hidden)
        return acceleration.linear(self.o_proj, output.reshape(*hidden_states.shape[:-1], -1)), weights


class MetaphraseSSRU(nn.Module):
    """Simpler simple recurrent unit: each token forgets a part of the state, and adds its own input.

    With f = sigmoid(W_f x + b), the state is c_t = f c_{t-1} + (1 - f) W x, and the output relu(c). A decoding step costs the
    same at any length. Training computes all tokens at once.

    Source: Kim et al. 2019, section 3.1, https://aclanthology.org/D19-5632.
    """

    is_merged = False

    def __init__(self, config: MetaphraseConfig, sizes: StackSizes, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.input_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)
        self.forget_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: PositionEmbeddings = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        packing: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `(batch, length, hidden)`, and None in place of attention weights.

        Args:
            attention_mask: 1 for a token, 0 for padding, `(batch, past + length)`. Padding leaves the state as it is.
            past_key_values: Its cache for self-attention holds the states of all tokens in place of keys, so that searches can
                reorder and shorten them: `(batch, 1, past, hidden)`.
            packing: The sequences of packed rows. Each sequence begins with an empty state.
        """
        cache = None if past_key_values is None else past_key_values.self_attention_cache
        for layer in [] if cache is None else cache.layers:
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"The cache must be dynamic with `decoder_self_attention` ssru, got a {type(layer).__name__}. "
                    "Remove `cache_implementation`."
                )
        hidden_states = cast_for_autocast(hidden_states)
        forget = torch.sigmoid(acceleration.linear(self.forget_proj, hidden_states).float())
        inputs = (1 - forget) * acceleration.linear(self.input_proj, hidden_states)
        length = longest = hidden_states.shape[1]
        if packing is not None:
            longest = packing.queries.longest
            forget = forget.index_fill(1, packing.queries.starts, 0.0)
        if attention_mask is not None:
            is_padding = (attention_mask[:, -length:] == 0)[:, :, None]
            forget, inputs = forget.masked_fill(is_padding, 1.0), inputs.masked_fill(is_padding, 0.0)
        if cache is not None and cache.get_seq_length(self.layer_idx):
            inputs[:, 0] += forget[:, 0] * cache.layers[self.layer_idx].keys[:, 0, -1]
        states = inputs if longest == 1 else _Scan.apply(forget, inputs, longest)
        if cache is not None:
            cache.update(states[:, None], states[:, None, :, :0], self.layer_idx)
        return torch.relu(states).to(hidden_states.dtype), None


class _Scan(torch.autograd.Function):
    """The states c_t = a_t c_{t-1} + b_t of factors a and inputs b along the second axis, `(batch, length, hidden)`.

    A sequence has at most `longest` tokens: a factor of 0 begins each other one. The number of operations grows with the
    logarithm of `longest` (Hillis and Steele 1986, https://doi.org/10.1145/7902.7903).
    """

    @staticmethod
    def forward(ctx, factors: torch.Tensor, inputs: torch.Tensor, longest: int) -> torch.Tensor:
        states = _run_scan(factors, inputs, longest)
        ctx.save_for_backward(factors, states)
        ctx.longest = longest
        return states

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        factors, states = ctx.saved_tensors
        # A state is read by its output and by the next state: g_t = gradient_t + a_{t+1} g_{t+1}.
        next_factors = nn.functional.pad(factors[:, 1:], (0, 0, 0, 1))
        of_inputs = _run_scan(next_factors.flip(1), gradient.flip(1), ctx.longest).flip(1)
        return of_inputs * nn.functional.pad(states[:, :-1], (0, 0, 1, 0)), of_inputs, None


def _run_scan(factors: torch.Tensor, inputs: torch.Tensor, longest: int) -> torch.Tensor:
    factors, states, distance = factors.clone(), inputs.clone(), 1
    while distance < longest:
        # Each state holds the inputs of the last `distance` tokens, and its factor leads back to the state before them.
        states[:, distance:] += factors[:, distance:] * states[:, :-distance]
        factors[:, distance:] = factors[:, distance:] * factors[:, :-distance]
        distance *= 2
    return states


class MetaphraseMLP(nn.Module):
    """Feed-forward network: (batch, length, hidden) -> (batch, length, inner) -> (batch, length, hidden).

    Source: Vaswani et al. 2017, section 3.3, arXiv 1706.03762. The gate is from Shazeer 2020, arXiv 2002.05202.
    """

    def __init__(self, config: MetaphraseConfig, sizes: StackSizes):
        super().__init__()
        width, inner, bias = sizes.hidden_size, sizes.ffn_dim, config.mlp_bias
        if config.gated_mlp:
            self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        # The same function by one kernel, which takes a quarter of the time (1,900 x 1,024 entries, one core of Zen 4).
        self.activation = ACT2FN[config.activation_function.replace("gelu_new", "gelu_pytorch_tanh")]
        self.is_gated = config.gated_mlp
        self.activation_dropout = config.activation_dropout

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = cast_for_autocast(hidden_states)
        if self.is_gated:
            inner = acceleration.linear(self.up_proj, hidden_states)
            inner = clamp_float16(acceleration.linear(self.gate_proj, hidden_states, self.activation) * inner)
        else:
            inner = acceleration.linear(self.up_proj, hidden_states, self.activation)
        inner = acceleration.dropout(inner, p=self.activation_dropout, training=self.training)
        return acceleration.linear(self.down_proj, inner)


class MetaphraseHeadTransform(nn.Module):
    """Linear layer, activation and norm between decoder and output projection (BERT, Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(self, config: MetaphraseConfig, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width, bias=config.mlp_bias)
        self.activation = ACT2FN[config.activation_function]
        self.norm = make_norm(config, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = cast_for_autocast(hidden_states)
        return self.norm(acceleration.linear(self.dense, hidden_states, self.activation))


class _ResidualLayer(GradientCheckpointingLayer):
    """Sublayers with residual connections. Norms are before (`pre`) or after (`post`) the sum, or around a sublayer (`both`).

    Source: Xiong et al. 2020, figure 1, arXiv 2002.04745. `both` is from Gemma Team 2024, section 2, arXiv 2408.00118.
    """

    def __init__(self, config: MetaphraseConfig, sizes: StackSizes, sublayers: dict[str, nn.Module]):
        super().__init__()
        self.is_pre_norm, self.has_output_norms = config.norm_position != "post", config.norm_position == "both"
        self.dropout = config.dropout
        for name, sublayer in sublayers.items():
            self.add_module(name, sublayer)
            self.add_module(f"{name}_norm", make_norm(config, sizes.hidden_size))
            if self.has_output_norms:
                self.add_module(f"{name}_output_norm", make_norm(config, sizes.hidden_size))

    def apply_sublayer(self, name: str, residual: torch.Tensor, *inputs, **kwargs) -> torch.Tensor:
        """Apply a sublayer by its name to `(batch, length, hidden)`, with its norms, and add its output after dropout."""
        norm = getattr(self, f"{name}_norm")
        output = getattr(self, name)(norm(residual) if self.is_pre_norm else residual, *inputs, **kwargs)
        # An attention returns its weights, too.
        output = output[0] if isinstance(output, tuple) else output
        if self.has_output_norms:
            output = getattr(self, f"{name}_output_norm")(output)
        hidden_states = acceleration.add_dropout(residual, output, p=self.dropout, training=self.training)
        hidden_states = clamp_float16(hidden_states)
        return hidden_states if self.is_pre_norm else norm(hidden_states)


class MetaphraseEncoderLayer(_ResidualLayer):
    """Self-attention and feed-forward network."""

    def __init__(self, config: MetaphraseConfig, layer_idx: int):
        sizes = config.stack_sizes("encoder")
        attention = MetaphraseAttention(config, sizes, layer_idx)
        super().__init__(config, sizes, {"self_attn": attention, "mlp": MetaphraseMLP(config, sizes)})

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: PositionEmbeddings = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = self.apply_sublayer("self_attn", hidden_states, position_embeddings, attention_mask, **kwargs)
        return self.apply_sublayer("mlp", hidden_states)


class MetaphraseDecoderLayer(_ResidualLayer):
    """Causal self-attention or SSRU, cross-attention and feed-forward network. A merged attention is both attentions."""

    def __init__(self, config: MetaphraseConfig, layer_idx: int):
        sizes, source_size = config.stack_sizes("decoder"), config.stack_sizes("encoder").hidden_size
        if config.decoder_self_attention == SSRU:
            self_attn = MetaphraseSSRU(config, sizes, layer_idx)
        else:
            self_attn = MetaphraseAttention(config, sizes, layer_idx, is_causal=True, is_merged=config.merged_attention)
        sublayers: dict[str, nn.Module] = {"self_attn": self_attn}
        if not config.merged_attention:
            sublayers["cross_attn"] = MetaphraseAttention(config, sizes, layer_idx, source_size=source_size)
        super().__init__(config, sizes, sublayers | {"mlp": MetaphraseMLP(config, sizes)})

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: PositionEmbeddings = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        past_key_values = past_key_values if cache is None else cache
        source = encoder_hidden_states if self.self_attn.is_merged else None
        inputs = position_embeddings, attention_mask, past_key_values, source
        hidden_states = self.apply_sublayer("self_attn", hidden_states, *inputs, **kwargs)
        if not self.self_attn.is_merged:
            inputs = None, encoder_attention_mask, past_key_values, encoder_hidden_states
            hidden_states = self.apply_sublayer("cross_attn", hidden_states, *inputs, **kwargs)
        return self.apply_sublayer("mlp", hidden_states)
