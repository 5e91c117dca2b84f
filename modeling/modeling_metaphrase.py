"""Metaphrase models: encoder and decoder with or without a head, the encoder alone, and heads that classify."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .configuration_metaphrase import MetaphraseConfig
from .layers import MetaphraseHeadTransform
from .loss import sequence_loss, shift_right
from .operators import clamp_float16, soft_cap
from .positions import positions_from_mask
from .stacks import CACHE_NAME, MetaphraseDecoder, MetaphraseEncoder, MetaphrasePreTrainedModel

if TYPE_CHECKING:
    # transformers copies this file beside a saved model.
    from .pipelines import TranslationPipeline  # noqa: F401


class EncoderDecoderEmbeddings(MetaphrasePreTrainedModel):
    """Embeddings of the source vocabulary, of the target vocabulary, or of a shared vocabulary, and their resizing."""

    def get_input_embeddings(self) -> nn.Module:
        return self.get_encoder().embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        for module in self.modules():
            is_shared = self.config.share_embeddings and isinstance(module, MetaphraseDecoder)
            if is_shared or isinstance(module, MetaphraseEncoder):
                module.embed_tokens = value

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True):
        if self.config.share_embeddings:
            embeddings = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.config.decoder_vocab_size = embeddings.num_embeddings
        else:
            embeddings = self._resize_stack(self.get_encoder(), new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.vocab_size = embeddings.num_embeddings
        return embeddings

    def _resize_stack(self, stack: nn.Module, *arguments) -> nn.Module:
        old = stack.embed_tokens
        stack.embed_tokens = self._get_resized_embeddings(old, *arguments).requires_grad_(old.weight.requires_grad)
        return stack.embed_tokens

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize a separate target vocabulary, its embeddings and the output projection, and return the new embeddings."""
        if self.config.share_embeddings:
            raise ValueError(
                "`share_embeddings` must be false to resize the target alone, got true. Use `resize_token_embeddings`."
            )
        new = self._resize_stack(self.get_decoder(), new_num_tokens, pad_to_multiple_of, mean_resizing)
        # The weight itself has no rows under DeepSpeed ZeRO.
        self.config.decoder_vocab_size = new.num_embeddings
        head = self.get_output_embeddings()
        if head is not None:
            resized = self._get_resized_lm_head(head, new.num_embeddings, mean_resizing=mean_resizing)
            self.set_output_embeddings(resized.requires_grad_(head.weight.requires_grad))
        self.tie_weights()
        return new


class MetaphraseModel(EncoderDecoderEmbeddings):
    """Encoder and decoder, without a head."""

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.encoder = MetaphraseEncoder(config)
        self.decoder = MetaphraseDecoder(config)
        if not config.share_embeddings:
            self._tied_weights_keys = {}
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the sources, unless `encoder_outputs` is given, and decode the targets.

        Without an input of the decoder, `last_hidden_state` is the output of the encoder, which libraries for embeddings pool.

        Args:
            input_ids: Source ids `(batch, source)`.
            attention_mask: 1 for a source token, 0 for padding, `(batch, source)`.
            decoder_input_ids: Target ids, shifted to the right, `(batch, target)`.
            decoder_attention_mask: 1 for a target token, 0 for padding, `(batch, past + target)`.
            encoder_outputs: The encoder output `(batch, source, hidden)`, in a tuple or a model output.
            inputs_embeds, decoder_inputs_embeds: Scaled embeddings `(batch, length, hidden)` instead of ids.
            position_ids, decoder_position_ids: `(batch, length)`. By default tokens are counted from 0 without padding.
            use_cache: True to return keys and values for the next decoding step.
            **kwargs: Also `source_lengths` and `target_lengths` of packed rows, if `supports_packing` is true.
        """
        if encoder_outputs is None:
            inputs = input_ids, attention_mask, inputs_embeds, position_ids
            encoder_outputs = self.encoder(*inputs, return_dict=True, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        of_encoder = {f"encoder_{name}": value for name, value in encoder_outputs.items()}
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            return Seq2SeqModelOutput(last_hidden_state=encoder_outputs.last_hidden_state, **of_encoder)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values if cache is None else cache,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            **of_encoder,
            **{CACHE_NAME: getattr(decoder_outputs, CACHE_NAME)},
        )


class MetaphraseForConditionalGeneration(EncoderDecoderEmbeddings, GenerationMixin):
    """Encoder, decoder and output projection, for training and `generate()`."""

    # All tied weights name the same weight, so that a checkpoint with one of them is complete.
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        # By the class name, transformers would expect a loss that shifts labels, and not count the first label of each row.
        self.loss_type = None
        self.model = MetaphraseModel(config)
        width = config.stack_sizes("decoder").hidden_size
        self.head_transform = MetaphraseHeadTransform(config, width) if config.head_transform else nn.Identity()
        self.lm_head = nn.Linear(width, config.decoder_vocab_size, bias=config.logits_bias)
        if not config.tie_word_embeddings:
            self._tied_weights_keys = {}
        elif not config.share_embeddings:
            self._tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
        self.post_init()

    def prepare_decoder_input_ids_from_labels(
        self, labels: torch.Tensor, target_lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the decoder's input for labels, `(batch, target)`. Data collators call this method."""
        config, start = self.config, self.config.decoder_start_token_id
        return shift_right(labels, config.pad_token_id, start, target_lengths, config.decoder_start_from_labels)

    def project(
        self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return logits of the decoder's output: `(..., hidden) -> (..., vocab)`. `head` replaces `lm_head`."""
        logits = (self.lm_head if head is None else head)(self.transform(hidden_states))
        return soft_cap(clamp_float16(logits), self.config.final_logit_softcapping)

    def transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the input of `lm_head`: the decoder's output after `head_transform`, times `logits_scale`."""
        hidden_states = self.head_transform(hidden_states)
        return hidden_states if self.config.logits_scale == 1.0 else hidden_states * self.config.logits_scale

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args, **kwargs) -> dict:
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and mask.ndim == 2 and kwargs.get("decoder_position_ids") is None:
            # A static cache turns the mask into a kernel's mask, in which padding cannot be counted.
            kwargs["decoder_position_ids"] = positions_from_mask(mask)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_of_states: Callable[..., torch.Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Return the logits of the next token at each position, and the loss if there are labels.

        See `MetaphraseModel.forward` for all other arguments.

        Args:
            labels: Target ids `(batch, target)`, -100 at positions without a label. Without `decoder_input_ids`, the decoder
                reads the labels shifted to the right.
            logits_to_keep: Number of positions at the end with logits, 0 for all positions, or a tensor of their indices.
            num_items_in_batch: Number of labels in an optimizer step, see `sequence_loss`.
            loss_of_states: Computes the loss of training from this model, the input of `project`, the labels and
                `num_items_in_batch`. There are no logits then, which may need much memory.

        Returns:
            `loss` (a scalar or None), `logits` `(batch, target, vocab)` or None, and the outputs of `MetaphraseModel`.
        """
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, kwargs.get("target_lengths"))
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "`decoder_input_ids`, `decoder_inputs_embeds` or `labels` must be given, got none. If a label smoother took "
                "the labels away, give the data collator the model (`model=`)."
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, positions, :]
        logits = loss = None
        if labels is not None and loss_of_states is not None:
            loss = loss_of_states(self, hidden_states, labels, num_items_in_batch)
        else:
            logits = self.project(hidden_states)
            loss = None if labels is None else sequence_loss(logits, labels, num_items_in_batch)
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **rest)


class MetaphraseEncoderModel(EncoderDecoderEmbeddings):
    """The encoder alone, for embeddings of text."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"head_transform\.", r"lm_head\."]

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.encoder = MetaphraseEncoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        return self.encoder(input_ids, attention_mask, inputs_embeds, position_ids, return_dict=True, **kwargs)


class MetaphraseClassificationHead(nn.Module):
    """The head of BART and T5, or without `classifier_hidden_layer` that of T5Gemma: `(..., hidden) -> (..., labels)`."""

    def __init__(self, config: MetaphraseConfig, width: int):
        super().__init__()
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(width, width) if config.classifier_hidden_layer else None
        self.out_proj = nn.Linear(width, config.num_labels)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.dropout(hidden_states)
        if self.dense is not None:
            hidden_states = self.dropout(torch.tanh(self.dense(hidden_states)))
        return self.out_proj(hidden_states)


class TwiceReadText(EncoderDecoderEmbeddings):
    """Base class of models whose encoder and decoder read the same text, the decoder shifted to the right.

    Source: Lewis et al. 2020, section 3.1, arXiv 1910.13461.
    """

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        if config.decoder_vocab_size != config.vocab_size:
            rule = f"must equal `vocab_size`, {config.vocab_size}, because the decoder reads the source"
            raise ValueError(f"`decoder_vocab_size` {rule}, got {config.decoder_vocab_size}.")
        self.model = MetaphraseModel(config)

    def read(self, input_ids: torch.LongTensor | None, **inputs) -> tuple[torch.Tensor, dict]:
        """Return the decoder's output `(batch, source, hidden)`, and the other outputs of `MetaphraseModel` by name."""
        if inputs.get("decoder_input_ids") is None and inputs.get("decoder_inputs_embeds") is None:
            if input_ids is None:
                raise ValueError(
                    "`input_ids` must be given without inputs of the decoder, which reads them, too, got none."
                )
            config = self.config
            starts = config.pad_token_id, config.decoder_start_token_id, None, config.decoder_start_from_labels
            inputs["decoder_input_ids"] = shift_right(input_ids, *starts)
        outputs = self.model(input_ids=input_ids, **inputs | {"use_cache": False, "return_dict": True})
        return outputs.last_hidden_state, {
            name: value for name, value in outputs.items() if name != "last_hidden_state"
        }


class MetaphraseForSequenceClassification(TwiceReadText):
    """A class or a number for each text."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.classification_head = MetaphraseClassificationHead(config, config.stack_sizes("decoder").hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqSequenceClassifierOutput:
        """Return the logits `(batch, labels)`, and the loss if there are labels. `input_ids` must be given.

        Args:
            labels: Classes `(batch,)`, or numbers: `(batch,)` for one label of the configuration, else `(batch, labels)`.
            **kwargs: Other inputs of `MetaphraseModel`.
        """
        if input_ids is None:
            raise ValueError("`input_ids` must be given, since they show where a text ends, got none.")
        hidden_states, rest = self.read(input_ids, attention_mask=attention_mask, **kwargs)
        is_last = self.config.classifier_pooling == "last"
        ends = torch.tensor(self.config.pad_token_id if is_last else self.config.eos_token_id, device=input_ids.device)
        ends = torch.isin(input_ids, ends, invert=is_last)
        places = (ends * torch.arange(ends.shape[1], device=ends.device)).argmax(dim=1)
        if is_last:
            # The decoder reads the last token one place later, if there is one.
            places = (places + 1).clamp(max=ends.shape[1] - 1)
        pooled = hidden_states[torch.arange(len(places), device=places.device), places]
        logits = self.classification_head(pooled)
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return Seq2SeqSequenceClassifierOutput(loss=loss, logits=logits, **rest)


class MetaphraseForQuestionAnswering(TwiceReadText):
    """The first and the last token of an answer in a text."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.stack_sizes("decoder").hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        """Return the logits of both places, each `(batch, source)`, and the loss if both `(batch,)` are given.

        `kwargs` are other inputs of `MetaphraseModel`.
        """
        hidden_states, rest = self.read(input_ids, attention_mask=attention_mask, **kwargs)
        start_logits, end_logits = self.qa_outputs(hidden_states).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return Seq2SeqQuestionAnsweringModelOutput(loss=loss, start_logits=start_logits, end_logits=end_logits, **rest)


class MetaphraseForTokenClassification(EncoderDecoderEmbeddings):
    """A class for each token, by the encoder alone."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"head_transform\.", r"lm_head\."]

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.model = MetaphraseEncoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Return the logits `(batch, source, labels)`, and the loss if there are labels `(batch, source)`, -100 for none."""
        inputs = {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        outputs = self.model(input_ids, **inputs, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        rest = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return TokenClassifierOutput(loss=loss, logits=logits, **rest)


MetaphraseForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
MetaphraseForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
MetaphraseForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
MetaphraseModel.register_for_auto_class("AutoModel")
MetaphraseForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
MetaphraseEncoderModel.register_for_auto_class("AutoModelForTextEncoding")
