"""The two stacks: encoder and decoder, from ids to hidden states."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import MetaphraseAttention, combine_bias, kernel_takes_bias
from .configuration_metaphrase import MetaphraseConfig
from .dropout import dropout
from .layers import MetaphraseDecoderLayer, MetaphraseEncoderLayer
from .normalization import clamp_float16, make_norm
from .packed_attention import choose_kernel, packed_mask
from .packing import Packing, Segments
from .positions import (
    AlibiPositionBias,
    LearnedPositionEmbedding,
    RelativePositionBias,
    RotaryPositionEmbedding,
    SinusoidalPositionEmbedding,
    alibi_slopes,
    positions_from_mask,
)
from .step_layer import forget


class ScaledEmbedding(nn.Embedding):
    """Token embeddings `(batch, length) -> (batch, length, hidden)`, times a constant. That of `padding_idx` does not learn."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, padding_idx: int | None = None):
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings = super().forward(input_ids)
        return embeddings if self.scale == 1.0 else embeddings * self.scale


class MetaphrasePreTrainedModel(PreTrainedModel):
    """What all Metaphrase models share: configuration, abilities, initialization."""

    config_class = MetaphraseConfig
    config: MetaphraseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MetaphraseEncoderLayer", "MetaphraseDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Rows of several sequences, told by `source_lengths` and `target_lengths`.
    supports_packing = True
    _is_resizing_head = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Fills a module's parameters and buffers, from the meta device too. Norms are the parent's."""
        super()._init_weights(module)
        config = self.config
        std = config.initializer_range
        embedding_std = config.hidden_size**-0.5 if std is None else std
        if isinstance(module, nn.Linear):
            fan_in, fan_out = module.in_features, module.out_features
            is_head = self._is_resizing_head or module is getattr(self, "lm_head", None)
            gain = getattr(module, "initial_gain", 1.0)
            scaled = gain * (2 / (fan_in + fan_out)) ** 0.5 if std is None else std
            init.normal_(module.weight, std=embedding_std if is_head else scaled)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=embedding_std)
            # A part of a weight does not know that the whole was loaded.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, SinusoidalPositionEmbedding):
            init.copy_(module.table, module.make_table(module.table.shape[0]))
        elif isinstance(module, RotaryPositionEmbedding):
            frequencies, _ = module.make_frequencies()
            init.copy_(module.inv_freq, frequencies)
            init.copy_(module.original_inv_freq, frequencies)
        elif isinstance(module, AlibiPositionBias):
            init.copy_(module.slopes, alibi_slopes(module.heads))

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """Weights of this module that are others of this module: {name: name of the one that is kept}."""
        return {}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # The parent drops every tie when `tie_word_embeddings` is false, that of source and target embedding too.
        return super().get_expanded_tied_weights_keys(all_submodels=True) if all_submodels else self._tied_weights_keys


class _Stack(MetaphrasePreTrainedModel):
    """Embeddings, positions, layers, norm: what encoder and decoder have in common."""

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

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            given = "both" if input_ids is not None else "neither"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, got {given}.")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def _enter(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """What the first layer reads, and the rotation of all layers.

        Args:
            embeddings: `(batch, query, hidden)`.
            position_ids: `(1 or batch, query)`.
            length: A bound of the positions.
        """
        if self.embed_positions is not None:
            positions = self.embed_positions(position_ids, length)
            embeddings = clamp_float16(embeddings + positions.to(embeddings.dtype))
        hidden_states = self.embedding_norm(embeddings)
        hidden_states = dropout(hidden_states, p=self.config.dropout, training=self.training)
        rotation = None if self.rotary_emb is None else self.rotary_emb(hidden_states, position_ids)
        return hidden_states, rotation

    def _layer_masks(
        self,
        attention_mask: torch.Tensor | None,
        query_positions: torch.Tensor,
        key_positions: torch.Tensor,
        query_offset: int | torch.Tensor,
        like: torch.Tensor,
    ) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """For each layer its mask and, where the kernel adds the position bias itself, that bias.

        Args:
            attention_mask: What `masking_utils` made, the same for all layers.
            query_positions: `(1 or batch, query)`.
            key_positions: `(1 or batch, key)`.
            query_offset: Index of the first query among the keys.
            like: `(batch, query, hidden)`: gives batch size and dtype.
        """
        pairs = []
        for module in self._biases():
            if module is None:
                pairs.append((attention_mask, None))
                continue
            bias = module(query_positions, key_positions).to(like.dtype)
            if kernel_takes_bias(self.config._attn_implementation):
                pairs.append((attention_mask, bias.expand(like.shape[0], -1, -1, -1)))
            else:
                pairs.append((combine_bias(bias, attention_mask, self.is_causal, query_offset), None))
        return pairs * (len(self.layers) // len(pairs))

    def _biases(self) -> list[nn.Module | None]:
        """The module of the position bias of all layers, or of each."""
        if self.position_bias is not None:
            return [self.position_bias]
        return [getattr(layer.self_attn, "relative_position_bias", None) for layer in self.layers]

    def _pack(self, queries: Segments, keys: Segments, is_cross: bool, like: torch.Tensor) -> tuple[Packing, list]:
        """A packed attention of this stack, and for each layer its mask.

        Args:
            queries: Of this stack's row.
            keys: Of the row that is seen.
            is_cross: Whether that is the memory.
            like: `(1, query tokens, hidden)`: gives device and dtype.
        """
        biases = [None] if is_cross else self._biases()
        attention_dropout = self.config.attention_dropout if self.training else 0.0
        kernel = choose_kernel(self.config._attn_implementation, like, biases[0] is not None, attention_dropout)
        packing = Packing(queries, keys, self.is_causal and not is_cross, kernel)
        masks = [packed_mask(packing, bias, like) for bias in dict.fromkeys(biases)]
        return packing, masks * (len(self.layers) // len(masks))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        self.embed_tokens = value


def _bound(position_ids: torch.Tensor, length: int) -> int:
    """A bound of the positions that a caller gave, which need not follow the indices. Compiled code trusts the length."""
    return length if torch.compiler.is_compiling() else max(length, int(position_ids.max()) + 1)


def _packed_segments(
    lengths: torch.Tensor, longest: int | None, embeddings: torch.Tensor, name: str, **others
) -> Segments:
    """Where the sequences of a packed row lie.

    Raises:
        ValueError: If there is more than one row, or something is given that a packed row has no place for.
    """
    if embeddings.shape[0] != 1:
        raise ValueError(f"Packed rows must be one, `(1, tokens)`, with `{name}`, got {embeddings.shape[0]} rows.")
    for other, value in others.items():
        if value is not None:
            raise ValueError(f"`{other}` must be left out with `{name}`: packed rows have neither padding nor cache.")
    return Segments(lengths, embeddings.shape[1], longest)


def _indices(length: int, like: torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """offset, offset + 1, ... as `(1, length)`."""
    return torch.arange(length, device=like.device)[None, :] + offset


class MetaphraseEncoder(_Stack):
    """Reads the source in both directions."""

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
        """Encodes.

        Args:
            input_ids: `(batch, source)`.
            attention_mask: 1 for a token, 0 for padding, `(batch, source)`, or ready for the kernel `(batch, 1, source, source)`.
            inputs_embeds: `(batch, source, hidden)` in place of the ids, scaled already.
            position_ids: `(batch, source)`; by default each row counts from 0, skipping padding.
            lengths: For packed rows, the tokens of each source in the one row, `(sources)`. No mask and no positions then.
            longest: The largest of the lengths, if the caller knows it.

        Returns:
            The memory, `last_hidden_state` `(batch, source, hidden)`.

        Raises:
            ValueError: If the lengths do not fit the row.
        """
        embeddings = self._embed(input_ids, inputs_embeds)
        if lengths is not None:
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            segments = _packed_segments(lengths, longest, embeddings, "source_lengths", **given)
            return self._encode_packed(embeddings, segments, **kwargs)
        length = embeddings.shape[1]
        # Distances are the same on a shifted row: only what depends on the place itself must skip padding.
        bias_positions = _indices(length, embeddings) if position_ids is None else position_ids
        bound = length if position_ids is None else _bound(position_ids, length)
        if position_ids is None and _is_padding_mask(attention_mask):
            position_ids = positions_from_mask(attention_mask)
        elif position_ids is None:
            position_ids = bias_positions
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask
        )
        hidden_states, rotation = self._enter(embeddings, position_ids, bound)
        masks = self._layer_masks(attention_mask, bias_positions, bias_positions, 0, hidden_states)
        for layer, (mask, bias) in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, mask, bias, rotation, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _encode_packed(self, embeddings: torch.Tensor, segments: Segments, **kwargs) -> BaseModelOutput:
        hidden_states, rotation = self._enter(embeddings, segments.positions, segments.longest)
        packing, masks = self._pack(segments, segments, False, hidden_states)
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, mask, None, rotation, packing=packing, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class MetaphraseDecoder(_Stack):
    """Reads the target so far, and the memory."""

    _can_record_outputs = {
        "hidden_states": MetaphraseDecoderLayer,
        "attentions": OutputRecorder(MetaphraseAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MetaphraseAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, config.decoder_vocab_size, config.decoder_attention_heads, is_causal=True)
        self.layers = nn.ModuleList([MetaphraseDecoderLayer(config, index) for index in range(config.decoder_layers)])
        self.post_init()

    def train(self, mode: bool = True) -> "MetaphraseDecoder":
        if mode:
            # What is trained needs the memory, and has other weights soon.
            forget(self)
        return super().train(mode)

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
        memory_lengths: torch.LongTensor | None = None,
        longest_memory: int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes, all positions at once or one more after what the cache holds.

        Args:
            input_ids: `(batch, query)`.
            attention_mask: 1 for a token, 0 for padding, `(batch, past + query)`, or ready for the kernel
                `(batch, 1, query, key)`.
            encoder_hidden_states: The memory `(batch, source, hidden)`. Its rows may be fewer, by a whole factor, as in beam
                search: consecutive targets share a source then.
            encoder_attention_mask: 1 for a token, 0 for padding, with as many rows as the memory, `(batch, source)`.
            past_key_values: Keys and values so far. A cache for self-attention alone gets a second one for the source.
            inputs_embeds: `(batch, query, hidden)` in place of the ids, scaled already.
            position_ids: `(batch, query)`; by default each row counts on, skipping padding.
            use_cache: Whether to make a cache if none is given.
            lengths: For packed rows, the tokens of each target in the one row, `(targets)`. No masks, positions and cache then.
            longest: The largest of the lengths, if the caller knows it.
            memory_lengths: Likewise, the tokens of each source in the memory.
            longest_memory: The largest of them.

        Returns:
            `last_hidden_state` `(batch, query, hidden)`, and the cache.

        Raises:
            ValueError: If there is no memory, its rows do not divide the targets, or the lengths do not fit the rows.
        """
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` must be given to the decoder, got None.")
        embeddings = self._embed(input_ids, inputs_embeds)
        rows, sources = embeddings.shape[0], encoder_hidden_states.shape[0]
        if rows % sources:
            raise ValueError(f"Targets must be as many as sources, or a multiple of them, got {rows} and {sources}.")
        if (lengths is None) != (memory_lengths is None):
            raise ValueError("`source_lengths` and `target_lengths` must be given together, got one of them.")
        if lengths is not None:
            given = {"decoder_attention_mask": attention_mask, "decoder_position_ids": position_ids}
            given |= {"attention_mask": encoder_attention_mask, "past_key_values": past_key_values}
            segments = _packed_segments(lengths, longest, embeddings, "target_lengths", **given)
            memory_segments = _packed_segments(memory_lengths, longest_memory, encoder_hidden_states, "source_lengths")
            return self._decode_packed(embeddings, segments, encoder_hidden_states, memory_segments, **kwargs)
        length = key_length = embeddings.shape[1]
        offset, cache = 0, None
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if past_key_values is not None:
            if not isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
            cache = past_key_values.self_attention_cache
            offset = cache.get_seq_length()
            # A static cache counts in a tensor, in place: the first layer would move the positions of the others.
            offset = offset.clone() if isinstance(offset, torch.Tensor) else offset
            key_length, _ = cache.get_mask_sizes(length, 0)

        query_positions = _indices(length, embeddings, offset)
        key_positions = _indices(key_length, embeddings)
        if position_ids is not None and key_length == length:
            query_positions = key_positions = position_ids
        bound = key_length if position_ids is None else _bound(position_ids, key_length)
        if position_ids is None and _is_padding_mask(attention_mask):
            position_ids = positions_from_mask(attention_mask)[:, -length:]
        elif position_ids is None:
            position_ids = query_positions
        attention_mask = create_causal_mask(
            config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask, past_key_values=cache
        )
        memory_mask = create_bidirectional_mask(
            config=self.config,
            # The queries of each source, as `fold_copies` puts them.
            inputs_embeds=embeddings.reshape(sources, -1, embeddings.shape[-1]),
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        hidden_states, rotation = self._enter(embeddings, position_ids, bound)
        masks = self._layer_masks(attention_mask, query_positions, key_positions, offset, hidden_states)
        for layer, (mask, bias) in zip(self.layers, masks, strict=True):
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                mask,
                memory_mask,
                bias,
                rotation,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )

    def _decode_packed(
        self, embeddings: torch.Tensor, segments: Segments, memory: torch.Tensor, memory_segments: Segments, **kwargs
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        hidden_states, rotation = self._enter(embeddings, segments.positions, segments.longest)
        packing, masks = self._pack(segments, segments, False, hidden_states)
        memory_packing, memory_masks = self._pack(segments, memory_segments, True, hidden_states)
        for layer, mask, memory_mask in zip(self.layers, masks, memory_masks, strict=True):
            hidden_states = layer(
                hidden_states,
                memory,
                mask,
                memory_mask,
                None,
                rotation,
                packing=packing,
                memory_packing=memory_packing,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm(hidden_states))


def _is_padding_mask(attention_mask: object) -> bool:
    """Whether a mask says what is padding, `(batch, length)`, rather than being ready for a kernel."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
