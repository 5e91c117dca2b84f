"""Base classes of the models and of the two stacks: initialization, embeddings, positions and masks."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .acceleration import acceleration
from .compat import CACHE_NAMES, is_loaded
from .configuration_metaphrase import MetaphraseConfig
from .layers import combine_bias, kernel_takes_bias
from .normalization import clamp_float16, make_norm
from .packing import Packing, Segments, choose_kernel, packed_mask
from .positions import (
    AlibiPositionBias,
    LearnedPositionEmbedding,
    RelativePositionBias,
    RotaryPositionEmbedding,
    SinusoidalPositionEmbedding,
    alibi_slopes,
    positions_from_mask,
)


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a constant: `(batch, length) -> (batch, length, hidden)`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, padding_idx: int | None = None):
        super().__init__(vocab_size, hidden_size, padding_idx)
        # peft's adapters read this name.
        self.embed_scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings = super().forward(input_ids)
        return embeddings if self.embed_scale == 1.0 else embeddings * self.embed_scale


class MetaphrasePreTrainedModel(PreTrainedModel):
    """Base class of all Metaphrase models."""

    config_class = MetaphraseConfig
    config: MetaphraseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MetaphraseEncoderLayer", "MetaphraseDecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Packed rows, by `source_lengths` and `target_lengths`.
    supports_packing = True
    _is_resizing_head = False
    # Names of tied weights, each with the name of the weight that stays.
    _tied_weights_keys = {}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initialize the parameters and buffers of a module, also after it was on the meta device."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self._std_by_shape(module) if std is None else std)
        if isinstance(module, nn.Embedding):
            # `init` cannot see that a checkpoint filled the weight, since a row has no mark.
            if module.padding_idx is not None and not is_loaded(module.weight):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, SinusoidalPositionEmbedding):
            init.copy_(module.table, module.make_table(module.table.shape[0]))
        elif isinstance(module, RotaryPositionEmbedding):
            frequencies, _ = module.make_frequencies()
            init.copy_(module.inv_freq, frequencies)
            init.copy_(module.original_inv_freq, frequencies)
        elif isinstance(module, AlibiPositionBias):
            init.copy_(module.slopes, alibi_slopes(module.heads))

    def _std_by_shape(self, module: nn.Linear | nn.Embedding) -> float:
        """Return the standard deviation for states, scores and logits with a variance of about 1, as in T5."""
        config, unit = self.config, self.config.hidden_size**-0.5
        if isinstance(module, nn.Linear):
            if self._is_resizing_head or module is getattr(self, "lm_head", None):
                return unit / config.logits_scale
            return getattr(module, "initial_gain", 1.0) * (2 / (module.in_features + module.out_features)) ** 0.5
        if getattr(module, "is_of_positions", False):
            return unit
        if config.tie_word_embeddings:
            return unit / config.logits_scale
        return unit if config.scale_embedding else 1.0

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # With false `tie_word_embeddings`, the parent would also untie the embeddings of source and target.
        return super().get_expanded_tied_weights_keys(all_submodels=True) if all_submodels else self._tied_weights_keys


class Stack(MetaphrasePreTrainedModel):
    """Base class of encoder and decoder: embeddings, layers and final norm."""

    def __init__(self, config: MetaphraseConfig, vocab_size: int, heads: int, is_causal: bool):
        super().__init__(config)
        scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        padding_idx = None if config.train_padding_embedding else config.pad_token_id
        self.embed_tokens = ScaledEmbedding(vocab_size, config.hidden_size, scale, padding_idx)
        self.embed_positions = self.rotary_emb = self.position_bias = None
        kind = config.position_embedding_type
        if kind == "sinusoidal":
            self.embed_positions = SinusoidalPositionEmbedding(config)
        elif kind == "learned":
            self.embed_positions = LearnedPositionEmbedding(config)
        elif kind == "rotary":
            self.rotary_emb = RotaryPositionEmbedding(config, heads)
        elif kind == "alibi":
            self.position_bias = AlibiPositionBias(heads)
        elif kind == "relative" and config.relative_attention_shared:
            self.position_bias = RelativePositionBias(config, heads, is_bidirectional=not is_causal)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.norm = make_norm(config) if config.final_norm else nn.Identity()
        self.is_causal = is_causal
        self.gradient_checkpointing = False

    def train(self, mode: bool = True) -> "Stack":
        if mode:
            acceleration.on_train(self)
        return super().train(mode)

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            number = "both" if input_ids is not None else "neither"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, got {number}.")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def enter(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the input of the first layer, `(batch, query, hidden)`, and the rotation of all layers.

        Args:
            embeddings: `(batch, query, hidden)`.
            position_ids: `(1 or batch, query)`.
            length: A number above every position.
        """
        if self.embed_positions is not None:
            positions = self.embed_positions(position_ids, length)
            embeddings = clamp_float16(embeddings + positions.to(embeddings.dtype))
        hidden_states = self.embedding_norm(embeddings)
        hidden_states = acceleration.dropout(hidden_states, p=self.config.dropout, training=self.training)
        rotation = None
        if self.rotary_emb is not None:
            # (batch, query, rotated) -> (batch, 1, query, rotated): one rotation for all heads
            rotation = tuple(angles[:, None] for angles in self.rotary_emb(hidden_states, position_ids))
        return hidden_states, rotation

    def _layer_masks(
        self,
        attention_mask: torch.Tensor | None,
        query_positions: torch.Tensor,
        key_positions: torch.Tensor,
        query_offset: int | torch.Tensor,
        like: torch.Tensor,
    ) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return each layer's mask, and its position bias if the kernel does not take the bias in the mask."""
        pairs = []
        for module in self.position_biases():
            if module is None:
                pairs.append((attention_mask, None))
                continue
            bias = module(query_positions, key_positions).to(like.dtype)
            if kernel_takes_bias(self.config._attn_implementation):
                bias = bias.expand(like.shape[0], -1, -1, -1)
                # Compiled flex attention has no gradient for a view.
                pairs.append((attention_mask, bias.clone() if bias.requires_grad else bias))
            else:
                pairs.append((combine_bias(bias, attention_mask, self.is_causal, query_offset), None))
        return pairs * (len(self.layers) // len(pairs))

    def position_biases(self) -> list[nn.Module | None]:
        """Return the module of the position bias: one for all layers, or one, or None, for each layer."""
        if self.position_bias is not None:
            return [self.position_bias]
        return [getattr(layer.self_attn, "relative_position_bias", None) for layer in self.layers]

    def _pack(self, queries: Segments, keys: Segments, is_cross: bool, like: torch.Tensor) -> tuple[Packing, list]:
        """Return the packing of an attention of this stack, and a pair for each layer as `_layer_masks` does."""
        biases = [None] if is_cross else self.position_biases()
        attention_dropout = self.config.attention_dropout if self.training else 0.0
        has_bias, head_dim = biases[0] is not None, self.layers[0].self_attn.head_dim
        kernel = choose_kernel(self.config._attn_implementation, like, head_dim, has_bias, attention_dropout)
        packing = Packing(queries, keys, self.is_causal and not is_cross, kernel)
        masks = [(packed_mask(packing, bias, like), None) for bias in dict.fromkeys(biases)]
        return packing, masks * (len(self.layers) // len(masks))


def locate(
    position_ids: torch.Tensor | None, attention_mask: object, query_positions: torch.Tensor, length: int
) -> tuple[torch.Tensor, int]:
    """Return the position of each query, `(1 or batch, query)`, and a number above every position.

    Args:
        position_ids: Positions that the caller set, or None.
        attention_mask: A mask of padding counts tokens only.
        query_positions: Indices of the queries, `(1, query)`.
        length: Number of keys.
    """
    if position_ids is None:
        if is_padding_mask(attention_mask):
            return positions_from_mask(attention_mask)[:, -query_positions.shape[1] :], length
        return query_positions, length
    # Compiled code cannot read positions.
    return position_ids, length if torch.compiler.is_compiling() else max(length, int(position_ids.max()) + 1)


def packed_segments(
    lengths: torch.Tensor, longest: int | None, embeddings: torch.Tensor, name: str, **excluded
) -> Segments:
    """Return the sequences of a packed row.

    Raises:
        ValueError: If there is more than one row, or an argument in `excluded` is not None.
    """
    if embeddings.shape[0] != 1:
        raise ValueError(f"Packed rows must be one, `(1, tokens)`, with `{name}`, got {embeddings.shape[0]} rows.")
    for argument, value in excluded.items():
        if value is not None:
            raise ValueError(
                f"`{argument}` must be None with `{name}`, got a value: packed rows have neither padding nor cache."
            )
    return Segments(lengths, embeddings.shape[1], longest)


def indices(length: int, like: torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """Return offset, offset + 1, ... as `(1, length)`."""
    return torch.arange(length, device=like.device)[None, :] + offset


def is_padding_mask(attention_mask: object) -> bool:
    """Return True for a mask of padding `(batch, length)`, False for a kernel's mask."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
