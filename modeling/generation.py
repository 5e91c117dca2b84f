"""Generation: `generate()` without what need not be done for each hypothesis, or at each step.

Which text comes out is defined by transformers' own loops; they also run wherever something is asked for that is not known here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.utils.output_capturing import capture_outputs

from .beam_search import beam_search
from .cache_name import CACHE_NAME, CACHE_NAMES
from .chosen_scores import ChosenScores
from .compiled_steps import compiled_steps, reorder_in_place
from .decoder_state import DecoderState
from .module_record import walk
from .sampling import sample
from .search_rules import unknown_criteria, unknown_processors
from .shortlist import Shortlist
from .step_head import step_head, step_shortlist
from .tree_decoder_state import TreeDecoderState

# What the loops here know of the arguments of the network; a Trainer hands labels on, which are not read.
_KNOWN = {"attention_mask", "encoder_outputs", "labels", "logits_to_keep", "use_cache", *CACHE_NAMES}
# Those of torch and transformers attend alike; what a user registered is for transformers' loops to call.
_KERNELS = {"eager", "sdpa", "flex_attention"}


class SharedSourceCache(EncoderDecoderCache):
    """A cache in which the hypotheses of a source share its keys and values."""

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Hypotheses change places within their source, whose keys and values stay."""
        reorder_in_place(self.self_attention_cache, beam_idx)

    def spread(self) -> EncoderDecoderCache:
        """A cache as transformers has it, with a row of the source for each hypothesis; itself, if it is static."""
        if type(self.cross_attention_cache) is not DynamicCache:
            return self
        keys = self.cross_attention_cache.layers[0].keys if self.cross_attention_cache.layers else None
        copies = 1 if keys is None else len(self.self_attention_cache.layers[0].keys) // len(keys)
        if copies > 1:
            self.cross_attention_cache.batch_repeat_interleave(copies)
        return EncoderDecoderCache(self.self_attention_cache, self.cross_attention_cache)


class MetaphraseGenerationMixin(GenerationMixin):
    """`generate()` with the source encoded, kept and asked once, however many hypotheses there are of it."""

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs,
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        shares = is_encoder_decoder and expand_size > 1 and model_kwargs.get(CACHE_NAME) is None
        if not shares or not self._can_share_sources():
            return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        shared = {
            name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs
        }
        input_ids, model_kwargs = super()._expand_inputs_for_generation(expand_size, False, input_ids, **model_kwargs)
        return input_ids, model_kwargs | shared

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        is_given = model_kwargs.get(CACHE_NAME) is not None
        shares = not is_given and self._can_share_sources()
        is_plain = generation_config.use_cache is not False and not generation_config.is_assistant
        if shares and is_plain and generation_config.cache_implementation in (None, "dynamic"):
            # transformers copies the model's configuration for each cache, to look for windows in it, which are not there.
            model_kwargs[CACHE_NAME] = SharedSourceCache(DynamicCache(), DynamicCache())
            return
        # Up to 5.14 transformers keeps a static cache for the next call, and looks at the rows of its first half alone.
        kept = getattr(self, "_cache", None)
        if isinstance(kept, EncoderDecoderCache):
            keys = kept.cross_attention_cache.layers[0].keys
            if keys is None or len(keys) != len(model_kwargs["encoder_outputs"][0]):
                del self._cache
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None and shares:
            model_kwargs[CACHE_NAME] = SharedSourceCache(cache.self_attention_cache, cache.cross_attention_cache)

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        if generation_config.return_dict_in_generate or not self._is_known(*arguments, **kwargs):
            return _with_plain_cache(super()._sample(*arguments, **kwargs))
        return self._search(input_ids, logits_processor, generation_config, kwargs)[0]

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        if generation_config.return_dict_in_generate or not self._is_known(*arguments, **kwargs):
            with compiled_steps(self, generation_config, kwargs):
                return _with_plain_cache(super()._beam_search(*arguments, **kwargs))
        return self._search(input_ids, logits_processor, generation_config, kwargs)[0]

    @staticmethod
    def search_with_scores(
        model: "MetaphraseGenerationMixin",
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        return_scores: bool = True,
        **kwargs,
    ) -> GenerateBeamEncoderDecoderOutput:
        """For `generate(custom_generate=...)`: `sequences` and what they scored, without what was thought of on the way.

        Returns:
            `sequences_scores` `(rows)`: for beam search as transformers has them, else sums of log-probabilities.
        """
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        if model._is_known(*arguments, **kwargs):
            ids, scores = model._search(input_ids, logits_processor, generation_config, kwargs, return_scores)
            return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)
        # What only transformers' loops can do.
        generation_config.return_dict_in_generate, generation_config.output_scores = True, return_scores
        loop = GenerationMixin._sample if generation_config.num_beams == 1 else GenerationMixin._beam_search
        chosen = ChosenScores()
        criteria = StoppingCriteriaList([*stopping_criteria, *([chosen] if return_scores else [])])
        with compiled_steps(model, generation_config, kwargs):
            output = loop(model, input_ids, logits_processor, criteria, generation_config, **kwargs)
        scores = getattr(output, "sequences_scores", None)
        if return_scores and scores is None:
            scores = chosen.totals(output.sequences, input_ids.shape[1], generation_config._eos_token_tensor)
        return GenerateBeamEncoderDecoderOutput(sequences=output.sequences, sequences_scores=scores)

    def _search(
        self,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        with_scores: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        memory, mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
        copies = len(input_ids) // len(memory)
        prompt, project = input_ids[::copies], self.step_projection()
        if config.num_beams > 1:
            state = TreeDecoderState(self.get_decoder(), memory, mask)
            return beam_search(project, state, prompt, processors, config)
        state = DecoderState(self.get_decoder(), memory, mask)
        # Probabilities are of all tokens.
        shorten = None if config.do_sample or with_scores else self._step_shortlist()
        return sample(project, state, prompt, copies, processors, config, with_scores, shorten)

    def step_projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`project`, made ready for the decoder's steps: as the weights are now."""
        return functools.partial(self.project, head=step_head(self.get_decoder(), self.get_output_embeddings()))

    def _step_shortlist(self) -> Callable[[torch.Tensor], Shortlist | None] | None:
        shorten = step_shortlist(self.get_decoder(), self.get_output_embeddings())
        if shorten is None or not _is_of_package(type(self).project):
            return None
        return lambda hidden_states: shorten(self._scale(hidden_states))

    def _is_known(
        self,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: object = None,
        **model_kwargs,
    ) -> bool:
        """Whether the loops here can do what is asked for."""
        cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        copies = max(config.num_beams, config.num_return_sequences)
        return (
            not (synced_gpus or config.low_memory or config.is_assistant)
            and not (config.do_sample and config.num_beams > 1)
            and streamer is None
            and config.prefill_chunk_size is None
            and not unknown_processors(processors)
            and not unknown_criteria(criteria, config)
            and {name for name, value in model_kwargs.items() if value is not None} <= _KNOWN
            and type(cache) is SharedSourceCache
            and type(cache.self_attention_cache) is DynamicCache
            and not cache.self_attention_cache.offloading
            and self.config._attn_implementation in _KERNELS
            and not self.training
            and self._computing_dtype() in (torch.float32, torch.bfloat16)
            # Each source has the prompt that came with it.
            and len(input_ids) == copies * len(model_kwargs["encoder_outputs"][0])
            # What a row without a token attends to is the kernel's to say.
            and (mask is None or bool(mask.any(dim=1).all()))
            and self._calls_are_plain()
        )

    def _can_share_sources(self) -> bool:
        # Flash attention takes a padding mask for that of the last queries; and what is hooked to the decoder, as peft's choice
        # of an adapter for each row, may count on a row of the source for each hypothesis. Its prefixes
        # come in a cache of their own.
        is_hooked = any(module._forward_pre_hooks for module in walk(self.get_decoder()))
        has_own_inputs = "prepare_inputs_for_generation" in vars(self)
        return not is_hooked and not has_own_inputs and "flash" not in self.config._attn_implementation

    def _computing_dtype(self) -> torch.dtype:
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    def _calls_are_plain(self) -> bool:
        """Whether a call of this model, or of its decoder, would meet nothing that a user put in its way."""
        own = vars(self)
        is_own = (
            "prepare_inputs_for_generation" not in own
            # accelerate casts around the forward pass that it keeps beside its own.
            and ("forward" not in own or "_original_forward" in own)
            and all(_is_of_package(getattr(type(self), name)) for name in ("forward", "prepare_inputs_for_generation"))
        )
        return is_own and not any(
            module._forward_pre_hooks
            # `hasattr` asks a module for parameters, buffers and modules of that name first.
            or "_hf_hook" in vars(module)
            or (module._forward_hooks and any(map(_counts, module._forward_hooks.values())))
            for module in (self, self.base_model, *walk(self.get_decoder()))
        )


def _is_of_package(method: Callable) -> bool:
    """Whether it is defined beside this module, and not by a subclass elsewhere."""
    return method.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _with_plain_cache(output: torch.Tensor | GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput):
    """What transformers' loops return, with a cache that fits sources which are repeated for each hypothesis."""
    cache = getattr(output, CACHE_NAME, None)
    if isinstance(cache, SharedSourceCache):
        setattr(output, CACHE_NAME, cache.spread())
    return output


def _counts(hook: Callable) -> bool:
    """Whether a hook is more than one that transformers leaves once hidden states or attention weights were asked for."""
    return getattr(hook, "__module__", None) != capture_outputs.__module__
