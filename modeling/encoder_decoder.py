"""Encoder and decoder: from ids of the source to the encoder output, and on to hidden states of the target."""

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .acceleration import acceleration
from .compat import CACHE_NAME, takes_cache
from .configuration_metaphrase import MetaphraseConfig
from .layers import MetaphraseAttention, MetaphraseDecoderLayer, MetaphraseEncoderLayer
from .normalization import cast_for_autocast
from .packing import Segments
from .stacks import Stack, indices, locate, packed_segments


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

        Returns:
            `last_hidden_state`, the encoder output `(batch, source, hidden)`.

        Raises:
            ValueError: If not exactly one of ids and embeddings is given, or the lengths do not fit the row.
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
            for layer, (mask, bias) in zip(self.layers, masks, strict=True):
                hidden_states = layer(hidden_states, mask, bias, rotation, **kwargs)
            return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def encode_packed(self, embeddings: torch.Tensor, segments: Segments, **kwargs) -> BaseModelOutput:
        """Encode the sources of a packed row: `(1, tokens, hidden) -> (1, tokens, hidden)`."""
        hidden_states, rotation = self.enter(embeddings, segments.positions, segments.longest)
        packing, masks = self._pack(segments, segments, False, hidden_states)
        for layer, (mask, bias) in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, mask, bias, rotation, packing=packing, **kwargs)
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

        Returns:
            `last_hidden_state` `(batch, query, hidden)`, and the cache.

        Raises:
            ValueError: If the encoder output is missing, the number of targets is not a multiple of the sources, or the lengths
                do not fit the rows.
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
        encoder_masks = [(encoder_mask, None)] * len(self.layers)
        # Gradient checkpointing drops the cache by this name.
        kwargs[CACHE_NAME] = past_key_values
        return self._decode(hidden_states, encoder_hidden_states, masks, encoder_masks, rotation, **kwargs)

    def _decode(self, hidden_states, encoder_output, masks: list, encoder_masks: list, rotation, **kwargs):
        for layer, (mask, bias), (encoder_mask, _) in zip(self.layers, masks, encoder_masks, strict=True):
            hidden_states = layer(hidden_states, encoder_output, mask, encoder_mask, bias, rotation, **kwargs)
        cache = {CACHE_NAME: kwargs.get(CACHE_NAME)}
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm(hidden_states), **cache)
