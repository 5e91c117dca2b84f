"""Encoder and decoder: initialization, embeddings, positions, masks, and the way through the layers.

The encoder returns the encoder output. The decoder reads it, and returns hidden states of the target.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .compat import CACHE_NAME, CACHE_NAMES, is_loaded, takes_cache
from .configuration_metaphrase import MetaphraseConfig
from .layers import MetaphraseAttention, MetaphraseDecoderLayer, MetaphraseEncoderLayer, combine_bias
from .operators import acceleration, cast_for_autocast, clamp_float16, make_norm
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
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, length: int | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the input of the first layer, `(batch, query, hidden)`, and the rotation of all layers.

        The positions `(1 or batch, query)` are below `length`, which is None if unknown.
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
    ) -> list[torch.Tensor | None]:
        """Return each layer's mask, with the position bias added."""
        masks: list[torch.Tensor | None] = []
        for module in self.position_biases():
            if module is None:
                masks.append(attention_mask)
                continue
            if self.config._attn_implementation not in ("eager", "sdpa"):
                raise ValueError(
                    "`attn_implementation` must be eager or sdpa for `position_embedding_type` relative or alibi, "
                    f"got {self.config._attn_implementation!r}."
                )
            bias = module(query_positions, key_positions).to(like.dtype)
            masks.append(combine_bias(bias, attention_mask, self.is_causal, query_offset))
        return masks * (len(self.layers) // len(masks))

    def position_biases(self) -> list[nn.Module | None]:
        """Return the module of the position bias: one for all layers, or one, or None, for each layer."""
        if self.position_bias is not None:
            return [self.position_bias]
        return [getattr(layer.self_attn, "relative_position_bias", None) for layer in self.layers]

    def _pack(self, queries: Segments, keys: Segments, is_cross: bool, like: torch.Tensor) -> tuple[Packing, list]:
        """Return the packing of an attention of this stack, and the mask of each layer."""
        biases = [None] if is_cross else self.position_biases()
        attention_dropout = self.config.attention_dropout if self.training else 0.0
        has_bias, head_dim = biases[0] is not None, self.layers[0].self_attn.head_dim
        kernel = choose_kernel(self.config._attn_implementation, like, head_dim, has_bias, attention_dropout)
        packing = Packing(queries, keys, self.is_causal and not is_cross, kernel)
        masks = [packed_mask(packing, bias, like) for bias in dict.fromkeys(biases)]
        return packing, masks * (len(self.layers) // len(masks))


class MetaphraseEncoder(Stack):
    """Stack of layers with bidirectional self-attention."""

    _can_record_outputs = {"hidden_states": MetaphraseEncoderLayer, "attentions": MetaphraseAttention}

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, config.vocab_size, config.encoder_attention_heads, is_causal=False)
        self.layers = nn.ModuleList([MetaphraseEncoderLayer(config, index) for index in range(config.encoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        lengths: torch.LongTensor | None = None,
        longest: int | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Encode sources, with the arguments of `MetaphraseModel.forward`.

        Args:
            attention_mask: Also a kernel's mask `(batch, 1, source, source)`.
            lengths, longest: `source_lengths` and `longest_source`. They exclude a mask and positions.
        """
        embeddings = self._embed(input_ids, inputs_embeds)
        with acceleration.encoding(self):
            if lengths is not None:
                excluded = {"attention_mask": attention_mask, "position_ids": position_ids}
                segments = packed_segments(lengths, longest, embeddings, "source_lengths", **excluded)
                return self.encode_packed(embeddings, segments, **kwargs)
            if position_ids is None:
                output = acceleration.encode_without_padding(self, embeddings, attention_mask, **kwargs)
                if output is not None:
                    return output
            length = embeddings.shape[1]
            # Position biases depend on distances, which padding on the left does not change.
            bias_positions = indices(length, embeddings) if position_ids is None else position_ids
            position_ids, bound = locate(position_ids, attention_mask, bias_positions, length)
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask
            )
            hidden_states, rotation = self.enter(embeddings, position_ids, bound)
            masks = self._layer_masks(attention_mask, bias_positions, bias_positions, 0, hidden_states)
            for layer, mask in zip(self.layers, masks, strict=True):
                hidden_states = layer(hidden_states, mask, rotation, **kwargs)
            return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def encode_packed(self, embeddings: torch.Tensor, segments: Segments, **kwargs) -> BaseModelOutput:
        """Encode the sources of a packed row: `(1, tokens, hidden) -> (1, tokens, hidden)`."""
        hidden_states, rotation = self.enter(embeddings, segments.positions, segments.longest)
        packing, masks = self._pack(segments, segments, False, hidden_states)
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, mask, rotation, packing=packing, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class MetaphraseDecoder(Stack):
    """Stack of layers with causal self-attention and cross-attention."""

    _can_record_outputs = {
        "hidden_states": MetaphraseDecoderLayer,
        "attentions": OutputRecorder(MetaphraseAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MetaphraseAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, config.decoder_vocab_size, config.decoder_attention_heads, is_causal=True)
        self.layers = nn.ModuleList([MetaphraseDecoderLayer(config, index) for index in range(config.decoder_layers)])
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        lengths: torch.LongTensor | None = None,
        longest: int | None = None,
        source_lengths: torch.LongTensor | None = None,
        longest_source: int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode all positions of the targets, or the positions after those in the cache.

        `MetaphraseModel.forward` describes the other arguments.

        Args:
            attention_mask: 1 for a token, 0 for padding, `(batch, past + query)`, or a kernel's mask `(batch, 1, query, key)`.
            encoder_hidden_states: The encoder output `(batch / copies, source, hidden)`. Each source serves `copies` consecutive
                targets, as in beam search.
            encoder_attention_mask: 1 for a token, 0 for padding, `(batch / copies, source)`.
            past_key_values: Keys and values of earlier positions. If the cache is only for self-attention, one for
                cross-attention is added.
            use_cache: True to make a cache if `past_key_values` is None.
            lengths, longest: `target_lengths` and `longest_target`. They exclude masks, positions and a cache.
        """
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` must be given to the decoder, got None.")
        if self.training:
            # Once for all layers.
            encoder_hidden_states = cast_for_autocast(encoder_hidden_states)
        embeddings = self._embed(input_ids, inputs_embeds)
        rows, sources = embeddings.shape[0], encoder_hidden_states.shape[0]
        if rows % sources:
            raise ValueError(f"Targets must be as many as sources, or a multiple of them, got {rows} and {sources}.")
        if (lengths is None) != (source_lengths is None):
            raise ValueError("`source_lengths` and `target_lengths` must be given together, got one of them.")
        if lengths is not None:
            excluded = {"decoder_attention_mask": attention_mask, "decoder_position_ids": position_ids}
            excluded |= {"attention_mask": encoder_attention_mask, "past_key_values": past_key_values}
            segments = packed_segments(lengths, longest, embeddings, "target_lengths", **excluded)
            source_segments = packed_segments(source_lengths, longest_source, encoder_hidden_states, "source_lengths")
            hidden_states, rotation = self.enter(embeddings, segments.positions, segments.longest)
            packing, masks = self._pack(segments, segments, False, hidden_states)
            cross_packing, encoder_masks = self._pack(segments, source_segments, True, hidden_states)
            kwargs |= {"packing": packing, "cross_packing": cross_packing}
            return self._decode(hidden_states, encoder_hidden_states, masks, encoder_masks, rotation, **kwargs)
        length = key_length = embeddings.shape[1]
        offset, cache = 0, None
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if past_key_values is not None:
            if not isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
            cache = past_key_values.self_attention_cache
            offset = cache.get_seq_length()
            # A static cache changes this tensor in place, in its first layer.
            offset = offset.clone() if isinstance(offset, torch.Tensor) else offset
            key_length, _ = cache.get_mask_sizes(length, 0)

        query_positions = indices(length, embeddings, offset)
        key_positions = indices(key_length, embeddings)
        if position_ids is not None and key_length == length:
            query_positions = key_positions = position_ids
        position_ids, bound = locate(position_ids, attention_mask, query_positions, key_length)
        attention_mask = create_causal_mask(
            config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask, **{CACHE_NAME: cache}
        )
        encoder_mask = create_bidirectional_mask(
            config=self.config,
            # Only the shape counts: the queries of a source, as `fold_copies` joins them.
            inputs_embeds=embeddings.reshape(sources, -1, embeddings.shape[-1]),
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        hidden_states, rotation = self.enter(embeddings, position_ids, bound)
        masks = self._layer_masks(attention_mask, query_positions, key_positions, offset, hidden_states)
        encoder_masks = [encoder_mask] * len(self.layers)
        # Gradient checkpointing drops the cache by this name.
        kwargs[CACHE_NAME] = past_key_values
        return self._decode(hidden_states, encoder_hidden_states, masks, encoder_masks, rotation, **kwargs)

    def _decode(self, hidden_states, encoder_output, masks: list, encoder_masks: list, rotation, **kwargs):
        for layer, mask, encoder_mask in zip(self.layers, masks, encoder_masks, strict=True):
            hidden_states = layer(hidden_states, encoder_output, mask, encoder_mask, rotation, **kwargs)
        cache = {CACHE_NAME: kwargs.get(CACHE_NAME)}
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm(hidden_states), **cache)


def locate(
    position_ids: torch.Tensor | None, attention_mask: object, query_positions: torch.Tensor, length: int
) -> tuple[torch.Tensor, int | None]:
    """Return the position of each query, `(1 or batch, query)`, and a number above every position, or None if unknown.

    Queries have the indices `query_positions` `(1, query)` among `length` keys. A mask of padding counts tokens only.
    """
    if position_ids is not None:
        return position_ids, None
    if is_padding_mask(attention_mask):
        return positions_from_mask(attention_mask)[:, -query_positions.shape[1] :], length
    return query_positions, length


def packed_segments(
    lengths: torch.Tensor, longest: int | None, embeddings: torch.Tensor, name: str, **excluded
) -> Segments:
    """Return the sequences of a packed row, and refuse arguments in `excluded` that are not None."""
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
