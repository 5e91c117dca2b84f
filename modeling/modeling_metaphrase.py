"""Embedding sizes: how the embeddings of sources and targets, and the head, grow and shrink with their vocabularies.

The models: encoder and decoder joined, with a head for generation, and the encoder alone.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .chunked_loss import projected_loss
from .compat import CACHE_NAME, has_own_weight, is_hooked, is_offloaded, takes_cache
from .configuration_metaphrase import MetaphraseConfig
from .decoder import MetaphraseDecoder
from .encoder import MetaphraseEncoder
from .loss import divergence_of_halves, loss_per_item, num_items, sequence_loss, shift_right
from .normalization import clamp_float16
from .positions import positions_from_mask
from .stacks import MetaphrasePreTrainedModel

if TYPE_CHECKING:
    # transformers copies each file that is named here beside a saved model.
    from .pipelines import TranslationPipeline  # noqa: F401


class EncoderDecoderEmbeddings(MetaphrasePreTrainedModel):
    """Resizing and tying of one or two vocabularies. `resize_token_embeddings` is for the source, or for both if shared."""

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True):
        if self.config.share_embeddings:
            embeddings = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.config.vocab_size = self.config.decoder_vocab_size = embeddings.num_embeddings
            return embeddings
        old = self.get_input_embeddings()
        new = self._get_resized_embeddings(old, new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.set_input_embeddings(new.requires_grad_(old.weight.requires_grad))
        # A weight that DeepSpeed has shared out has no rows.
        self.config.vocab_size = new.num_embeddings
        return new

    def _get_resized_lm_head(self, *args, **kwargs):
        # The parent initializes new rows as those of any projection.
        self._is_resizing_head = True
        try:
            return super()._get_resized_lm_head(*args, **kwargs)
        finally:
            self._is_resizing_head = False

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resizes the target vocabulary, embedding and output projection, where it is not the source's.

        Args:
            new_num_tokens: Entries of the new vocabulary; more are initialized, fewer are cut off at the end.
            pad_to_multiple_of: Rounds the number up.
            mean_resizing: Draw new entries from the distribution of the old ones.

        Raises:
            ValueError: If source and target share their embedding.
        """
        if self.config.share_embeddings:
            raise ValueError(
                "`share_embeddings` must be false to resize the target alone: use `resize_token_embeddings`."
            )
        decoder = self.get_decoder()
        old = decoder.embed_tokens
        new = self._get_resized_embeddings(old, new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder.embed_tokens = new.requires_grad_(old.weight.requires_grad)
        size = new.num_embeddings
        head = self.get_output_embeddings()
        if head is not None:
            resized = self._get_resized_lm_head(head, size, mean_resizing=mean_resizing)
            self.set_output_embeddings(resized.requires_grad_(head.weight.requires_grad))
        self.config.decoder_vocab_size = size
        self.tie_weights()
        return new


class MetaphraseModel(EncoderDecoderEmbeddings):
    """Encoder and decoder, without a head."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.encoder = MetaphraseEncoder(config)
        self.decoder = MetaphraseDecoder(config)
        self.post_init()

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        return {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"} if self.config.share_embeddings else {}

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        self.encoder.embed_tokens = value
        if self.config.share_embeddings:
            self.decoder.embed_tokens = value

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        source_lengths: torch.LongTensor | None = None,
        target_lengths: torch.LongTensor | None = None,
        longest_source: int | None = None,
        longest_target: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encodes the source, unless it comes encoded, and decodes the target.

        Args:
            input_ids: Source ids `(batch, source)`.
            attention_mask: 1 for a source token, 0 for padding, `(batch, source)`.
            decoder_input_ids: Target ids, shifted to the right, `(batch, target)`.
            decoder_attention_mask: 1 for a target token, 0 for padding, `(batch, past + target)`.
            encoder_outputs: The memory, `(batch, source, hidden)` in a tuple or an output, if it is known already.
            past_key_values: Cache of earlier steps.
            inputs_embeds: `(batch, source, hidden)` in place of `input_ids`.
            decoder_inputs_embeds: `(batch, target, hidden)` in place of `decoder_input_ids`.
            position_ids: `(batch, source)`, by default counted from the mask.
            decoder_position_ids: `(batch, target)`, by default counted from the mask and the cache.
            use_cache: Whether to return keys and values for the next step.
            source_lengths: If the rows are packed, all pairs one after the other in one row without padding: the tokens of each
                source in it, `(pairs)`. Masks, positions and cache must be left out then.
            target_lengths: Likewise, the tokens of each target.
            longest_source: The largest of the lengths; given, an accelerator need not be asked for it.
            longest_target: Likewise.

        Returns:
            `last_hidden_state` `(batch, target, hidden)`, the memory, the cache, and what else was asked for.

        Raises:
            ValueError: If there is nothing to encode or nothing to decode, or the lengths do not fit the rows.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "`decoder_input_ids` or `decoder_inputs_embeds` (or `labels`, for a model with a head) must be given, "
                "got none. If a label smoother took the labels away, give the data collator the model (`model=`)."
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                position_ids=position_ids,
                lengths=source_lengths,
                longest=longest_source,
                return_dict=True,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            lengths=target_lengths,
            longest=longest_target,
            source_lengths=source_lengths,
            longest_source=longest_source,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{CACHE_NAME: getattr(decoder_outputs, CACHE_NAME)},
        )


class MetaphraseForConditionalGeneration(EncoderDecoderEmbeddings, GenerationMixin):
    """Encoder, decoder and output projection: training by teacher forcing, and `generate()`."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        # By the name of the class, earlier versions of transformers take the loss for one that shifts labels, and leave the first
        # of each row out of the count by which it is divided.
        self.loss_type = None
        self.model = MetaphraseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.decoder_vocab_size, bias=config.logits_bias)
        self.post_init()

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        if not self.config.tie_word_embeddings:
            return {}
        # All weights that are one must name the same one, so that a checkpoint with any of them is complete.
        stack = "encoder" if self.config.share_embeddings else "decoder"
        return {"lm_head.weight": f"model.{stack}.embed_tokens.weight"}

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module):
        self.lm_head = value

    def prepare_decoder_input_ids_from_labels(
        self, labels: torch.Tensor, target_lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the decoder reads for these labels, `(batch, target)`; for data collators."""
        config = self.config
        start = config.decoder_start_token_id
        return shift_right(labels, config.pad_token_id, start, target_lengths, config.decoder_start_from_labels)

    def project(
        self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Logits `(..., vocab)` of what the decoder puts out, `(..., hidden)`.

        Args:
            hidden_states: The decoder's output.
            head: Computes what `lm_head` does, in another way.
        """
        return clamp_float16((self.lm_head if head is None else head)(self.scale(hidden_states)))

    def scale(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Multiply the decoder's output by `logits_scale`."""
        return hidden_states if self.config.logits_scale == 1.0 else hidden_states * self.config.logits_scale

    def _loss_is_chunked(self, hidden_states: torch.Tensor) -> bool:
        # A head that is no plain projection any more (an adapter's, a quantized, pruned or offloaded one, one with hooks) knows
        # itself how it is applied; float16 needs its logits clamped; and a compiler splits and fuses the plain loss by itself.
        head = self.lm_head
        is_plain = type(head) is nn.Linear and has_own_weight(head) and not is_offloaded(head)
        # DeepSpeed hooks all modules, to fetch what it has shared out.
        is_plain = is_plain and (hasattr(head.weight, "ds_id") or not is_hooked(head))
        return is_plain and hidden_states.dtype != torch.float16 and not torch.compiler.is_compiling()

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args, **kwargs) -> dict:
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and mask.ndim == 2 and kwargs.get("decoder_position_ids") is None:
            # For a static cache the mask becomes a kernel's, in which padding can no longer be counted.
            kwargs["decoder_position_ids"] = positions_from_mask(mask)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        smoothing: float = 0.0,
        target_lengths: torch.LongTensor | None = None,
        return_logits: bool | None = None,
        r_drop_alpha: float = 0.0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Logits of the next target token at each position, and the loss if there are labels.

        Args:
            input_ids: See `MetaphraseModel.forward`, as for all that is not named here.
            labels: Target ids `(batch, target)`, -100 where there is none. Without `decoder_input_ids`, the decoder reads them
                shifted to the right.
            logits_to_keep: Only the last so many positions get logits; 0 means all. A tensor of indices chooses them.
            num_items_in_batch: Labels of one optimizer step, by which the summed loss is divided (see `sequence_loss`).
            smoothing: Probability that the loss spreads over the vocabulary.
            target_lengths: See `MetaphraseModel.forward`: packed rows.
            return_logits: Whether to make logits. By default they are not made in training with labels: the loss is computed in
                chunks then, and memory for all logits is never needed.
            r_drop_alpha: For a batch whose second half is the first again: how much the loss grows with the divergence of the two
                predictions of each label, (CE(p) + CE(q)) / 2 + alpha / 2 * (KL(p, q) + KL(q, p)) / 2. That is half of equation
                4 of Liang et al. 2021, arXiv 2106.14448, so that it compares with a plain loss.

        Returns:
            `loss` (a scalar, with labels), `logits` `(batch, target, vocab)` or `None`, and what the model returns.

        Raises:
            ValueError: If neither labels nor logits are wanted, or as `MetaphraseModel.forward`.
        """
        if return_logits is None:
            return_logits = labels is None or not self.training
        elif not return_logits and labels is None:
            raise ValueError("`return_logits` must not be false without `labels`: there would be nothing to compute.")
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, target_lengths)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            target_lengths=target_lengths,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept, :]
        logits = loss = None
        if return_logits or not self._loss_is_chunked(hidden_states):
            logits = self.project(hidden_states)
        if labels is not None and logits is not None:
            loss = sequence_loss(logits, labels, num_items_in_batch, smoothing)
            if r_drop_alpha:
                divergence = divergence_of_halves(logits.flatten(0, 1), labels.flatten())
                loss = loss + loss_per_item(r_drop_alpha * divergence, labels, num_items_in_batch)
        elif labels is not None:
            states, head = self.scale(hidden_states).flatten(0, 1), self.lm_head
            divisor = num_items(labels, num_items_in_batch, states.device)
            loss = projected_loss(states, head.weight, head.bias, labels.flatten(), smoothing, r_drop_alpha, divisor)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits if return_logits else None,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )


class MetaphraseEncoderModel(MetaphrasePreTrainedModel):
    """The encoder alone, for embeddings of text."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.encoder = MetaphraseEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Encodes; the arguments are those of `MetaphraseEncoder.forward`."""
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )


# `generate()` reads these nine times a call, a millisecond in all: they are found once.
for _function in (
    MetaphraseEncoder.forward,
    MetaphraseDecoder.forward,
    MetaphraseForConditionalGeneration.forward,
    MetaphraseForConditionalGeneration.prepare_inputs_for_generation,
):
    _function.__signature__ = inspect.signature(_function)

MetaphraseModel.register_for_auto_class("AutoModel")
MetaphraseForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
MetaphraseEncoderModel.register_for_auto_class("AutoModelForTextEncoding")
