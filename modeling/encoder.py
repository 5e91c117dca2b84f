"""The encoder: from ids of the source to the memory."""

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import MetaphraseAttention
from .configuration_metaphrase import MetaphraseConfig
from .layers import MetaphraseEncoderLayer
from .packed_stack import forget_packed, packed_weights
from .packing import Segments
from .positions import positions_from_mask
from .stacks import Stack, bound_of, indices, is_padding_mask, packed_segments

# With a smaller share of padding, or in a smaller model, to move the tokens costs as much as to compute the padding.
LEAST_PADDING, LEAST_HIDDEN_SIZE = 0.1, 256


class MetaphraseEncoder(Stack):
    """Reads the source in both directions."""

    _can_record_outputs = {"hidden_states": MetaphraseEncoderLayer, "attentions": MetaphraseAttention}

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, config.vocab_size, config.encoder_attention_heads, is_causal=False)
        self.layers = nn.ModuleList([MetaphraseEncoderLayer(config, index) for index in range(config.encoder_layers)])
        self.post_init()

    def train(self, mode: bool = True) -> "MetaphraseEncoder":
        if mode:
            # What is trained needs the memory, and has other weights soon.
            forget_packed(self)
        return super().train(mode)

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
        with packed_weights(self):
            return self._encode(embeddings, attention_mask, position_ids, lengths, longest, **kwargs)

    def _encode(
        self,
        embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        lengths: torch.LongTensor | None,
        longest: int | None,
        **kwargs,
    ) -> BaseModelOutput:
        if lengths is not None:
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            segments = packed_segments(lengths, longest, embeddings, "source_lengths", **given)
            return self._encode_packed(embeddings, segments, **kwargs)
        if position_ids is None and self._may_skip_padding(attention_mask, embeddings):
            return self._encode_without_padding(embeddings, attention_mask, **kwargs)
        length = embeddings.shape[1]
        # Distances are the same on a shifted row: only what depends on the place itself must skip padding.
        bias_positions = indices(length, embeddings) if position_ids is None else position_ids
        bound = length if position_ids is None else bound_of(position_ids, length)
        if position_ids is None and is_padding_mask(attention_mask):
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

    def _may_skip_padding(self, attention_mask: torch.Tensor | None, embeddings: torch.Tensor) -> bool:
        """Whether to compute the tokens alone: for inference on a CPU, if enough is padding and nobody looks inside."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        # Large float16 scores are kept finite by the kernels for rows with padding alone.
        is_known = embeddings.dtype in (torch.float32, torch.bfloat16) and self.config._attn_implementation == "sdpa"
        if embeddings.device.type != "cpu" or not is_known or embeddings.shape[2] < LEAST_HIDDEN_SIZE:
            return False
        if not is_padding_mask(attention_mask) or attention_mask.shape != embeddings.shape[:2]:
            return False
        is_token = attention_mask != 0
        if is_token.sum() > (1 - LEAST_PADDING) * is_token.numel():
            return False
        # Distances in a row with a hole in it are not those of its tokens alone, and no row must be empty.
        starts = nn.functional.pad(is_token, (1, 0)).int().diff() > 0
        return bool((starts.sum(dim=1) == 1).all()) and not any(
            module._forward_hooks or module._forward_pre_hooks for module in self.layers.modules()
        )

    def _encode_without_padding(
        self, embeddings: torch.Tensor, attention_mask: torch.Tensor, **kwargs
    ) -> BaseModelOutput:
        """Encodes the tokens as one packed row. What stands for padding in the output is zero."""
        rows, length, _ = embeddings.shape
        is_token = attention_mask != 0
        places = is_token.flatten().nonzero()[:, 0]
        segments = Segments(is_token.sum(dim=1), len(places))
        packed = self._encode_packed(embeddings.flatten(0, 1).index_select(0, places)[None], segments, **kwargs)
        tokens = packed.last_hidden_state[0]
        memory = tokens.new_zeros(rows * length, tokens.shape[-1]).index_copy_(0, places, tokens)
        return BaseModelOutput(last_hidden_state=memory.view(rows, length, -1))

    def _encode_packed(self, embeddings: torch.Tensor, segments: Segments, **kwargs) -> BaseModelOutput:
        hidden_states, rotation = self._enter(embeddings, segments.positions, segments.longest)
        packing, masks = self._pack(segments, segments, False, hidden_states)
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, mask, None, rotation, packing=packing, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))
