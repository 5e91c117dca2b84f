"""Generation: what `generate()` of an encoder-decoder need not do once for each hypothesis."""

from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin


class SharedSourceCache(EncoderDecoderCache):
    """A cache in which the hypotheses of a source share its keys and values."""

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Hypotheses change places within their source, whose keys and values stay."""
        self.self_attention_cache.reorder_cache(beam_idx)


class MetaphraseGenerationMixin(GenerationMixin):
    """`generate()` with the source encoded, kept and asked once, however many hypotheses there are of it."""

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs,
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        shares = is_encoder_decoder and expand_size > 1 and model_kwargs.get("past_key_values") is None
        # Flash attention takes a padding mask for that of the last queries.
        if not shares or "flash" in self.config._attn_implementation:
            return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        shared = {
            name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs
        }
        input_ids, model_kwargs = super()._expand_inputs_for_generation(expand_size, False, input_ids, **model_kwargs)
        return input_ids, model_kwargs | shared

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        is_given = model_kwargs.get("past_key_values") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if cache is not None and not is_given and "flash" not in self.config._attn_implementation:
            model_kwargs["past_key_values"] = SharedSourceCache(cache.self_attention_cache, cache.cross_attention_cache)
