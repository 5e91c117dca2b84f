"""Encoder and decoder: initialization, embeddings, positions, masks, and the way through the layers.

The encoder returns the encoder output. The decoder reads it, and returns hidden states of the target.
"""

from collections.abc import Callable

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
from .configuration_metaphrase import SLIDING, SSRU, MetaphraseConfig
from .layers import MetaphraseAttention, MetaphraseDecoderLayer, MetaphraseEncoderLayer, combine_bias
from .operators import MetaphraseRMSNorm, acceleration, cast_for_autocast, clamp_float16, make_norm
from .packing import MergedPacking, Packing, Segments, choose_kernel, packed_mask, rows_as_segments
from .positions import (
    AlibiPositionBias,
    LearnedPositionEmbedding,
    RelativePositionBias,
    RotaryPositionEmbedding,
    SinusoidalPositionEmbedding,
    alibi_slopes,
    positions_from_mask,
)

# Limits of the attention of a layer: the sequences of packed rows, or None, and the mask of the kernel, or None.
LayerMask = tuple[Packing | None, torch.Tensor | None]
# Cosine and sine of the positions, each `(batch, 1, query, rotated)`.
Rotation = tuple[torch.Tensor, torch.Tensor] | None


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
        elif isinstance(module, MetaphraseRMSNorm) and module.plus_one:
            init.zeros_(module.weight)
        elif isinstance(module, RotaryPositionEmbedding):
            frequencies, _ = module.make_frequencies()
            init.copy_(module.inv_freq, frequencies)
            init.copy_(module.original_inv_freq, frequencies)
        elif isinstance(module, AlibiPositionBias):
            init.copy_(module.slopes, alibi_slopes(module.heads))

    def _std_by_shape(self, module: nn.Linear | nn.Embedding) -> float:
        """Return the standard deviation for states, scores and logits with a variance of about 1, as in T5."""
        config = self.config
        if isinstance(module, nn.Linear):
            if self._is_resizing_head or module is getattr(self, "lm_head", None):
                return module.in_features**-0.5 / config.logits_scale
            return getattr(module, "initial_gain", 1.0) * (2 / (module.in_features + module.out_features)) ** 0.5
        if getattr(module, "is_of_positions", False):
            return config.hidden_size**-0.5
        unit = module.embedding_dim**-0.5
        if config.tie_word_embeddings:
            return unit / config.logits_scale
        return unit if config.scale_embedding else 1.0

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # With false `tie_word_embeddings`, the parent would also untie the embeddings of source and target.
        return super().get_expanded_tied_weights_keys(all_submodels=True) if all_submodels else self._tied_weights_keys


class Stack(MetaphrasePreTrainedModel):
    """Base class of encoder and decoder: embeddings, layers and final norm."""

    layers: nn.ModuleList

    def __init__(self, config: MetaphraseConfig, vocab_size: int, is_causal: bool):
        super().__init__(config)
        self.sizes = config.stack_sizes("decoder" if is_causal else "encoder")
        width, heads = self.sizes.hidden_size, self.sizes.attention_heads
        self.norms_first = is_causal and config.embedding_norm_before_positions
        scale = width**0.5 if config.scale_embedding and not self.norms_first else 1.0
        padding_idx = None if config.train_padding_embedding else config.pad_token_id
        self.embed_tokens = ScaledEmbedding(vocab_size, width, scale, padding_idx)
        self.embed_positions = self.rotary_emb = self.sliding_rotary_emb = self.position_bias = None
        kind = config.position_embedding_type
        if kind == "sinusoidal":
            self.embed_positions = SinusoidalPositionEmbedding(config, width)
        elif kind == "learned":
            self.embed_positions = LearnedPositionEmbedding(config, self.sizes)
        elif kind == "rotary":
            self.rotary_emb = RotaryPositionEmbedding(config, self.sizes.head_dim, config.rope_parameters)
            if config.sliding_rope_theta is not None and SLIDING in self.sizes.layer_types:
                parameters = {"rope_type": "default", "rope_theta": config.sliding_rope_theta}
                self.sliding_rotary_emb = RotaryPositionEmbedding(config, self.sizes.head_dim, parameters)
        elif kind == "alibi":
            self.position_bias = AlibiPositionBias(heads)
        elif kind == "relative" and config.relative_attention_shared:
            self.position_bias = RelativePositionBias(config, heads, is_bidirectional=not is_causal)
        self.embedding_norm = make_norm(config, width) if config.embedding_norm else nn.Identity()
        self.norm = make_norm(config, width) if config.final_norm else nn.Identity()
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
    ) -> tuple[torch.Tensor, list[Rotation]]:
        """Return the input of the first layer, `(batch, query, hidden)`, and the rotation of each layer.

        The positions `(1 or batch, query)` are below `length`, which is None if unknown.
        """
        if self.norms_first:
            embeddings = self.embedding_norm(embeddings)
        if self.embed_positions is not None:
            positions = self.embed_positions(position_ids, length)
            embeddings = clamp_float16(embeddings + positions.to(embeddings.dtype))
        hidden_states = embeddings if self.norms_first else self.embedding_norm(embeddings)
        hidden_states = acceleration.dropout(hidden_states, p=self.config.dropout, training=self.training)
        if self.rotary_emb is None:
            return hidden_states, [None] * len(self.layers)
        # (batch, query, rotated) -> (batch, 1, query, rotated): one rotation for all heads
        rotation, sliding = (
            None if module is None else tuple(angles[:, None] for angles in module(hidden_states, position_ids))
            for module in (self.rotary_emb, self.sliding_rotary_emb)
        )
        kinds = self.sizes.layer_types
        return hidden_states, [sliding if sliding and kind == SLIDING else rotation for kind in kinds]

    def _layer_masks(
        self,
        make_mask: Callable[..., torch.Tensor | None],
        query_positions: torch.Tensor,
        key_positions: torch.Tensor,
        query_offset: int | torch.Tensor,
        like: torch.Tensor,
        segments: Segments | None = None,
        **arguments,
    ) -> list[LayerMask]:
        """Return what each layer's self-attention sees, by transformers' function for masks and its arguments.

        With `segments`, the rows of a padded batch, windows are computed in blocks.
        """
        implementation = self.config._attn_implementation
        has_bias = self.config.position_embedding_type in ("relative", "alibi")
        if has_bias and implementation not in ("eager", "sdpa"):
            raise ValueError(
                "`attn_implementation` must be eager or sdpa for `position_embedding_type` relative or alibi, "
                f"got {implementation!r}."
            )
        has_windows, is_flash = SLIDING in self.sizes.layer_types, "flash" in implementation
        is_even = self.is_causal or len({*(self.sizes.window or ())}) == 1
        if has_windows and ("flex" in implementation or (is_flash and not is_even)):
            raise ValueError(
                "`attn_implementation` must be eager or sdpa for windows, or flash attention for windows of one width on both "
                f"sides, got {implementation!r}."
            )
        if self.is_causal and self.config.merged_attention and implementation not in ("eager", "sdpa"):
            raise ValueError(
                f"`attn_implementation` must be eager or sdpa for `merged_attention`, got {implementation!r}."
            )
        windows = self._windows(key_positions.shape[1])
        full = None
        if segments is None or None in windows:
            full = make_mask(config=self.config, inputs_embeds=like, **arguments)

        def layer_mask_of(bias: nn.Module | None, window: tuple[int, int] | None) -> LayerMask:
            if window is not None and segments is not None:
                packing = Packing(segments, segments, False, "window", window)
                return packing, packed_mask(packing, bias, like)
            mask = full
            if window is not None and not is_flash:
                mask = narrow(full, key_positions[:, None, :] - query_positions[:, :, None], *window)
            if bias is None:
                return None, mask
            scores = bias(query_positions, key_positions).to(like.dtype)
            return None, combine_bias(scores, mask, self.is_causal, query_offset)

        return self._for_each_layer(layer_mask_of, windows)

    def _windows(self, longest: int) -> list[tuple[int, int] | None]:
        """Return the window of each layer. A window that all of the `longest` tokens fit into is None."""
        windows = [self.sizes.window_of(index) for index in range(len(self.layers))]
        # A graph that is traced is for all lengths.
        is_traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
        if self.sizes.window and not is_traced:
            left, right = self.sizes.window
            if longest <= 1 + (left if self.is_causal else min(left, right)):
                return [None] * len(windows)
        return windows

    def _for_each_layer(
        self,
        make: Callable[[nn.Module | None, tuple[int, int] | None], LayerMask],
        windows: list[tuple[int, int] | None],
    ) -> list[LayerMask]:
        """Call a function with the position bias and the window of each layer, once for equal ones."""
        keys = list(zip(self.position_biases(), windows, strict=True))
        made = {key: make(*key) for key in dict.fromkeys(keys)}
        return [made[key] for key in keys]

    def position_biases(self) -> list[nn.Module | None]:
        """Return the module of each layer's position bias, or None."""
        if self.position_bias is not None:
            return [self.position_bias] * len(self.layers)
        return [getattr(layer.self_attn, "relative_position_bias", None) for layer in self.layers]

    def _choose_kernel(self, like: torch.Tensor, is_plain: bool) -> str:
        config = self.config
        has_dropout, has_cap = self.training and config.attention_dropout > 0, config.attn_logit_softcapping is not None
        is_plain = is_plain and not has_dropout and not has_cap
        return choose_kernel(config._attn_implementation, like, self.sizes.head_dim, is_plain)

    def _packed_layer_masks(
        self, segments: Segments, like: torch.Tensor, sources: Segments | None = None
    ) -> list[LayerMask]:
        """Return what each layer's self-attention sees in packed rows, with the sources that a merged attention sees, too."""
        packings: dict = {}

        def layer_mask_of(bias: nn.Module | None, window: tuple[int, int] | None) -> LayerMask:
            if window not in packings:
                kernel = self._choose_kernel(like, is_plain=bias is None and sources is None)
                if sources is not None:
                    packings[window] = MergedPacking(segments, sources, kernel, window)
                    return packings[window], packed_mask(packings[window], None, like)
                if window is not None and self.config._attn_implementation != "eager":
                    kernel = "window"
                packings[window] = Packing(segments, segments, self.is_causal, kernel, window)
            return packings[window], packed_mask(packings[window], bias, like)

        return self._for_each_layer(layer_mask_of, self._windows(segments.longest))


class MetaphraseEncoder(Stack):
    """Stack of layers with bidirectional self-attention."""

    _can_record_outputs = {"hidden_states": MetaphraseEncoderLayer, "attentions": MetaphraseAttention}

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, config.vocab_size, is_causal=False)
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
            length, segments = embeddings.shape[1], None
            is_plain = position_ids is None and (attention_mask is None or is_padding_mask(attention_mask))
            # A graph is for all lengths.
            is_plain = is_plain and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
            if is_plain and SLIDING in self.sizes.layer_types and self.config._attn_implementation == "sdpa":
                segments = rows_as_segments(embeddings, attention_mask)
            # Position biases depend on distances, which padding on the left does not change.
            bias_positions = indices(length, embeddings) if position_ids is None else position_ids
            position_ids, bound = locate(position_ids, attention_mask, bias_positions, length)
            hidden_states, rotations = self.enter(embeddings, position_ids, bound)
            layer_masks = self._layer_masks(
                create_bidirectional_mask,
                bias_positions,
                bias_positions,
                0,
                hidden_states,
                segments=segments,
                attention_mask=attention_mask,
            )
            return self._encode(hidden_states, layer_masks, rotations, **kwargs)

    def encode_packed(self, embeddings: torch.Tensor, segments: Segments, **kwargs) -> BaseModelOutput:
        """Encode the sources of a packed row: `(1, tokens, hidden) -> (1, tokens, hidden)`."""
        hidden_states, rotations = self.enter(embeddings, segments.positions, segments.longest)
        return self._encode(hidden_states, self._packed_layer_masks(segments, hidden_states), rotations, **kwargs)

    def _encode(
        self, hidden_states: torch.Tensor, layer_masks: list[LayerMask], rotations: list[Rotation], **kwargs
    ) -> BaseModelOutput:
        for layer, (packing, mask), rotation in zip(self.layers, layer_masks, rotations, strict=True):
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
        super().__init__(config, config.decoder_vocab_size, is_causal=True)
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
        embeddings, is_recurrent = self._embed(input_ids, inputs_embeds), self.config.decoder_self_attention == SSRU
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
            hidden_states, rotations = self.enter(embeddings, segments.positions, segments.longest)
            sources = source_segments if self.config.merged_attention else None
            if is_recurrent:
                layer_masks = [(Packing(segments, segments, True, "recurrence"), None)] * len(self.layers)
            else:
                layer_masks = self._packed_layer_masks(segments, hidden_states, sources)
            source_mask: LayerMask = (None, None)
            if sources is None:
                cross = Packing(segments, source_segments, False, self._choose_kernel(hidden_states, is_plain=True))
                source_mask = cross, packed_mask(cross, None, hidden_states)
            return self._decode(hidden_states, encoder_hidden_states, layer_masks, source_mask, rotations, **kwargs)
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
        is_merged = self.config.merged_attention
        encoder_mask = create_bidirectional_mask(
            config=self.config,
            # Only the shape counts: the queries of a source, as `fold_copies` joins them.
            inputs_embeds=embeddings.reshape(sources, -1, embeddings.shape[-1]),
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            allow_is_bidirectional_skip=not is_merged,
        )
        hidden_states, rotations = self.enter(embeddings, position_ids, bound)
        arguments = {"attention_mask": attention_mask, CACHE_NAME: cache}
        # Torch's kernel can do without a mask. The reference cannot, and a merged attention has one mask for both parts.
        arguments["allow_is_causal_skip"] = self.config.attn_logit_softcapping is None and not is_merged
        positions = query_positions, key_positions, offset
        if is_recurrent:
            layer_masks = [(None, attention_mask)] * len(self.layers)
        else:
            layer_masks = self._layer_masks(create_causal_mask, *positions, hidden_states, **arguments)
        if is_merged:
            # (sources, 1, copies * query, source) -> (batch, 1, query, source)
            of_source = encoder_mask.unflatten(2, (rows // sources, length)).flatten(0, 2)[:, None]
            merged = {
                mask: torch.cat((mask.expand(rows, -1, -1, -1), of_source), dim=-1)
                for _, mask in dict.fromkeys(layer_masks)
            }
            layer_masks = [(None, merged[mask]) for _, mask in layer_masks]
        # Gradient checkpointing drops the cache by this name.
        kwargs[CACHE_NAME] = past_key_values
        return self._decode(
            hidden_states, encoder_hidden_states, layer_masks, (None, encoder_mask), rotations, **kwargs
        )

    def _decode(
        self,
        hidden_states: torch.Tensor,
        encoder_output: torch.Tensor,
        layer_masks: list[LayerMask],
        source_mask: LayerMask,
        rotations: list[Rotation],
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        cross_packing, encoder_mask = source_mask
        for layer, (packing, mask), rotation in zip(self.layers, layer_masks, rotations, strict=True):
            packings = {"packing": packing, "cross_packing": cross_packing}
            hidden_states = layer(hidden_states, encoder_output, mask, encoder_mask, rotation, **packings, **kwargs)
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


def narrow(mask: torch.Tensor | None, distances: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Hide the keys outside of a window from a mask of the kernels `eager` and `sdpa`, `(batch, 1, query, key)`, or None for all.

    The distances from queries to keys are `(1 or batch, query, key)`.
    """
    is_near = ((distances >= -left) & (distances <= right))[:, None]
    if mask is None:
        return is_near
    if mask.dtype != torch.bool:
        return torch.where(is_near, mask, torch.finfo(mask.dtype).min)
    return mask & is_near


def indices(length: int, like: torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """Return offset, offset + 1, ... as `(1, length)`."""
    return torch.arange(length, device=like.device)[None, :] + offset


def is_padding_mask(attention_mask: object) -> bool:
    """Return True for a mask of padding `(batch, length)`, False for a kernel's mask."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
