"""Encoder: from ids of the source to the encoder output."""

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .acceleration import acceleration
from .attention import MetaphraseAttention
from .configuration_metaphrase import MetaphraseConfig
from .layers import MetaphraseEncoderLayer
from .packing import Segments
from .positions import positions_from_mask
from .stacks import Stack, bound_of, indices, is_padding_mask, packed_segments


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
        """Encode sources.

        Args:
            input_ids: `(batch, source)`.
            attention_mask: 1 for a token, 0 for padding, `(batch, source)`, or a kernel's mask `(batch, 1, source, source)`.
            inputs_embeds: Scaled embeddings `(batch, source, hidden)` instead of `input_ids`.
            position_ids: `(batch, source)`. By default tokens are counted from 0 without padding.
            lengths: Tokens of each source in a packed row, `(sources)`. Excludes `attention_mask` and `position_ids`.
            longest: The largest length, if known.

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
            bound = length if position_ids is None else bound_of(position_ids, length)
            if position_ids is None and is_padding_mask(attention_mask):
                position_ids = positions_from_mask(attention_mask)
            elif position_ids is None:
                position_ids = bias_positions
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
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, mask, None, rotation, packing=packing, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))
