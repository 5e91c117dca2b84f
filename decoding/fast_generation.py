"""The door into the fast decoder: `generate()` of Metaphrase models, `Generator` and the searches call `search`.

transformers' loops define the result. They run where the fast loops do not support an option; `model.last_search` says which
loop ran, and why.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import CompileConfig, GenerationMixin
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.utils.output_capturing import capture_outputs

from metaphrase.decoding.beam_search import Selection, beam_search
from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.prepared_decoder import prepared_head, prepared_rows
from metaphrase.decoding.sampling import sample
from metaphrase.decoding.shortlist import Shortlist
from metaphrase.decoding.supported_processors import (
    are_ends,
    process_permitted,
    unknown_criteria,
    unknown_processors,
)
from metaphrase.decoding.weight_copies import walk
from metaphrase.modeling.compat import CACHE_NAME, CACHE_NAMES, is_offloaded
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

logger = logging.getLogger(__name__)

# Arguments of the network that the loops of this package support. A Trainer hands on labels, which are not read.
SUPPORTED_ARGUMENTS = {"attention_mask", "encoder_outputs", "labels", "logits_to_keep", "use_cache", *CACHE_NAMES}
# Attention kernels of torch and transformers, which give equal results. A user's own kernel runs in transformers' loops.
_SUPPORTED_KERNELS = {"eager", "sdpa", "flex_attention"}
_SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LastSearch:
    """The loop that decoded last, as `model.last_search`.

    Attributes:
        loop: "fast" or "transformers".
        reason: First reason why the fast loop did not run; empty if it did.
    """

    loop: str
    reason: str = ""


class SharedSourceCache(EncoderDecoderCache):
    """A cache in which all hypotheses of a source share the keys and values of the source."""

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Reorder hypotheses within their sources. Keys and values of the sources stay where they are.

        Tensors of a static cache keep their addresses, to which compiled code refers.
        """
        for layer in self.self_attention_cache.layers:
            if not layer.is_compileable:
                layer.reorder_cache(beam_idx)
            elif layer.is_initialized:
                for states in (layer.keys, layer.values):
                    states.copy_(states.index_select(0, beam_idx.to(states.device)))

    def spread(self) -> EncoderDecoderCache:
        """Return transformers' kind of cache, with one row of the source per hypothesis; itself, if it is static."""
        if type(self.cross_attention_cache) is not DynamicCache:
            return self
        keys = self.cross_attention_cache.layers[0].keys if self.cross_attention_cache.layers else None
        copies = 1 if keys is None else len(self.self_attention_cache.layers[0].keys) // len(keys)
        if copies > 1:
            self.cross_attention_cache.batch_repeat_interleave(copies)
        return EncoderDecoderCache(self.self_attention_cache, self.cross_attention_cache)


def is_metaphrase(model: object) -> bool:
    """Return True if the fast loops can run the decoder of a model, which may be wrapped in an adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return isinstance(base, MetaphraseForConditionalGeneration)


def search(
    model: MetaphraseForConditionalGeneration,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    return_scores: bool | None = None,
    permitted: torch.Tensor | None = None,
    **model_kwargs,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput:
    """Decode by greedy search, sampling or beam search: by the fast loop if it can, else by transformers' loop.

    `generate()` calls it, also as `generate(custom_generate=search, return_scores=True)`.

    Args:
        model: The model.
        input_ids: First target ids of each hypothesis, `(sources * copies, length)`.
        logits_processor: Processors of the logits.
        stopping_criteria: Criteria of length and end of sequence, and the caller's own.
        generation_config: As `generate()` prepares it.
        return_scores: None returns what transformers' loops return. True and False return `sequences`, with
            `sequences_scores` `(rows)` if True: scores of beams as transformers computes them, else sums of log-probabilities
            as `sample` computes them.
        permitted: Tokens to select from, (count,), beside those of the prompt and the configuration. Transformers' loops, and
            heads whose rows cannot be selected, select from all tokens.
        **model_kwargs: From `generate()`, `encoder_outputs` among them.

    Returns:
        Ids `(sources * copies, length)`, or an output that holds them.
    """
    config = generation_config
    reason = obstacle(model, input_ids, logits_processor, stopping_criteria, config, **model_kwargs)
    if return_scores is None and config.return_dict_in_generate and not reason:
        reason = "return_dict_in_generate"
    model.last_search = LastSearch("transformers" if reason else "fast", reason)
    logger.debug("decoding by the %s loop%s", model.last_search.loop, f": {reason}" if reason else "")
    if not reason:
        encoder_output, mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
        decoder, copies = model.get_decoder(), len(input_ids) // len(encoder_output)
        prompt, (project, shorten) = input_ids[::copies], prepared_projections(model)
        if permitted is not None:
            vocab_size = model.config.decoder_vocab_size
            permitted = _complete(permitted, prompt, config, vocab_size)
            head = prepared_rows(model.get_output_embeddings(), permitted)
            permitted = None if head is None else permitted
        if permitted is not None:
            project, shorten = functools.partial(model.project, head=head), None
            if logits_processor:
                logits_processor = [process_permitted(logits_processor, permitted, vocab_size)]
        if config.num_beams > 1:
            state, selection = BeamState(decoder, encoder_output, mask), Selection(config, permitted)
            ids, scores = beam_search(project, state, prompt, logits_processor, config, selection)
        else:
            state = DecoderState(decoder, encoder_output, mask)
            arguments = (config, bool(return_scores), shorten, permitted)
            ids, scores = sample(project, state, prompt, copies, logits_processor, *arguments)
        if return_scores is None:
            return ids
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)
    loop = GenerationMixin._sample if config.num_beams == 1 else GenerationMixin._beam_search
    chosen = SequenceScores()
    if return_scores is not None:
        config.return_dict_in_generate, config.output_scores = True, return_scores
    if return_scores and config.do_sample and config.num_beams == 1:
        logits_processor = chosen.behind(logits_processor)
    criteria = StoppingCriteriaList([*stopping_criteria, *([chosen] if return_scores else [])])
    with _compiled_steps(model, config, model_kwargs):
        output = loop(model, input_ids, logits_processor, criteria, config, **model_kwargs)
    if return_scores is None:
        cache = getattr(output, CACHE_NAME, None)
        if isinstance(cache, SharedSourceCache):
            setattr(output, CACHE_NAME, cache.spread())
        return output
    scores = getattr(output, "sequences_scores", None)
    if return_scores and scores is None:
        scores = chosen.totals(output.sequences, input_ids.shape[1], config._eos_token_tensor)
    return GenerateBeamEncoderDecoderOutput(sequences=output.sequences, sequences_scores=scores)


def _complete(permitted: torch.Tensor, prompt: torch.Tensor, config: GenerationConfig, vocab_size: int) -> torch.Tensor:
    """Return the permitted tokens, those of the prompt, the ends and the forced tokens, ascending."""
    forced = [config.forced_bos_token_id, config.forced_eos_token_id]
    values = [
        torch.as_tensor(value).flatten().to(prompt)
        for value in (*forced, config._eos_token_tensor)
        if value is not None
    ]
    tokens = torch.cat([permitted.to(prompt), prompt.flatten(), *values]).unique()
    # An end of -1 means that no token ends a target.
    return tokens[(tokens >= 0) & (tokens < vocab_size)]


@contextlib.contextmanager
def _compiled_steps(model: GenerationMixin, config: GenerationConfig, model_kwargs: dict) -> Iterator[None]:
    """Compile the steps of transformers' beam search where transformers would compile the steps of greedy search.

    This is the case with a static cache, on an accelerator or with a `compile_config` that says so. The gain on accelerators has
    not been measured.
    """
    # transformers uses `_compiled_call_impl` for greedy search and sampling, and `torch.compile(model)` sets it.
    is_compiled = config.num_beams == 1 or model._compiled_call_impl is not None
    if is_compiled or not model._valid_auto_compile_criteria(model_kwargs, config):
        yield
        return
    # With equal options, later calls find the code of earlier calls.
    step = torch.compile(nn.Module._call_impl, **(config.compile_config or CompileConfig()).to_dict())

    def call(*args, **kwargs):
        cache = kwargs.get(CACHE_NAME)
        # The prefill has the lengths of prompt and source, and is not compiled.
        is_step = isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values())
        return (step if is_step else nn.Module._call_impl)(model, *args, **kwargs)

    model._compiled_call_impl = call
    try:
        yield
    finally:
        # Another thread may have removed the attribute.
        vars(model).pop("_compiled_call_impl", None)


def prepared_projections(
    model: MetaphraseForConditionalGeneration,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], Shortlist | None] | None]:
    """Return `model.project` for decoding steps with the weights as they are now, and a projection to shortlists or None."""
    head, shortlist = prepared_head(model.get_decoder(), model.get_output_embeddings())
    project = functools.partial(model.project, head=head)
    if shortlist is None or not _is_of_package(type(model).project):
        return project, None
    return project, lambda hidden_states: shortlist(model.scale(hidden_states))


def obstacle(
    model: MetaphraseForConditionalGeneration,
    input_ids: torch.LongTensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: object = None,
    **model_kwargs,
) -> str:
    """Return the first reason why the fast loops cannot decode, or an empty string."""
    cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
    copies = max(config.num_beams, config.num_return_sequences)
    names = {name for name, value in model_kwargs.items() if value is not None}
    conditions = {
        "synced_gpus": lambda: synced_gpus,
        "low_memory": lambda: config.low_memory,
        "assistant": lambda: config.is_assistant,
        "sampled beams": lambda: config.do_sample and config.num_beams > 1,
        "streamer": lambda: streamer is not None,
        "prefill_chunk_size": lambda: config.prefill_chunk_size is not None,
        "logits processor": lambda: unknown_processors(processors),
        "stopping criterion": lambda: unknown_criteria(criteria, config),
        "argument of the network": lambda: names - SUPPORTED_ARGUMENTS,
        "kind of cache": lambda: (
            type(cache) is not SharedSourceCache
            or type(cache.self_attention_cache) is not DynamicCache
            or cache.self_attention_cache.offloading
        ),
        "attn_implementation": lambda: model.config._attn_implementation not in _SUPPORTED_KERNELS,
        "model in training": lambda: model.training,
        "dtype": lambda: computing_dtype(model) not in _SUPPORTED_DTYPES,
        "prompts of one source that differ": lambda: len(input_ids) != copies * len(model_kwargs["encoder_outputs"][0]),
        # The attention kernel decides what a row without a token attends to.
        "source without a token": lambda: mask is not None and not bool(mask.any(dim=1).all()),
        "hook or own forward": lambda: not calls_are_plain(model),
    }
    return next((name for name, is_met in conditions.items() if is_met()), "")


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the model's products, under autocast too."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


def calls_are_plain(model: MetaphraseForConditionalGeneration) -> bool:
    """Return True if no hook and no replaced method of a user would run in a call of the model or its decoder."""
    attributes, modules = vars(model), (model, model.base_model, *walk(model.get_decoder()))
    hooks = [hook for module in modules for hook in module._forward_hooks.values()]
    return (
        "prepare_inputs_for_generation" not in attributes
        # accelerate casts around the original `forward`, which it stores.
        and ("forward" not in attributes or "_original_forward" in attributes)
        and all(_is_of_package(getattr(type(model), name)) for name in ("forward", "prepare_inputs_for_generation"))
        and not any(module._forward_pre_hooks or is_offloaded(module) for module in modules)
        # transformers leaves hooks behind that recorded hidden states or attention weights.
        and all(getattr(hook, "__module__", None) == capture_outputs.__module__ for hook in hooks)
    )


def _is_of_package(method: Callable) -> bool:
    """Return True if a method is defined by the network itself, not by a subclass elsewhere."""
    return method.__module__.rpartition(".")[0] == MetaphraseForConditionalGeneration.__module__.rpartition(".")[0]


def _can_share_sources(model: MetaphraseForConditionalGeneration) -> bool:
    # Flash attention takes a padding mask for the mask of the last queries. A hook of the decoder, such as peft's choice of
    # an adapter for each row, may expect one row of the source per hypothesis. peft's prefixes come in a cache with such rows.
    is_hooked = any(module._forward_pre_hooks for module in walk(model.get_decoder()))
    has_prefixes = "prepare_inputs_for_generation" in vars(model)
    return not is_hooked and not has_prefixes and "flash" not in model.config._attn_implementation


class FastGeneration(GenerationMixin):
    """The four steps of `generate()` that `install` replaces."""

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        """Repeat the prompt for each hypothesis. The source stays as it is, and all its hypotheses share it."""
        expand = functools.partial(GenerationMixin._expand_inputs_for_generation, self, expand_size)
        shares = is_encoder_decoder and expand_size > 1 and model_kwargs.get(CACHE_NAME) is None
        if not shares or not _can_share_sources(self):
            return expand(is_encoder_decoder, input_ids, **model_kwargs)
        shared = {
            name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs
        }
        input_ids, model_kwargs = expand(False, input_ids, **model_kwargs)
        return input_ids, model_kwargs | shared

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Make a cache whose hypotheses share their source."""
        shares = model_kwargs.get(CACHE_NAME) is None and _can_share_sources(self)
        is_plain = generation_config.use_cache is not False and not generation_config.is_assistant
        if shares and is_plain and generation_config.cache_implementation in (None, "dynamic"):
            # transformers would copy the configuration, to look for sliding windows that Metaphrase models do not have.
            model_kwargs[CACHE_NAME] = SharedSourceCache(DynamicCache(), DynamicCache())
            return
        GenerationMixin._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None and shares:
            model_kwargs[CACHE_NAME] = SharedSourceCache(cache.self_attention_cache, cache.cross_attention_cache)

    _sample = _beam_search = search


def install() -> None:
    """Let `generate()` of all Metaphrase models call `search`."""
    for name, method in vars(FastGeneration).items():
        if callable(method) and name in vars(GenerationMixin):
            setattr(MetaphraseForConditionalGeneration, name, method)


class SequenceScores(StoppingCriteria):
    """A criterion that never stops. It reads the scores of each step when the tokens are selected, and then empties them.

    With `output_scores` transformers' loops store the scores of all tokens and steps. Without, they do not return the scores of
    beams, which they sum up themselves. For samples, it reads the logits before other processors change them.
    """

    def __init__(self, empties: bool = True):
        """Args:
        empties: False leaves the scores in place, for other criteria that may read earlier steps.
        """
        self._empties = empties
        self._num_read = 0
        # One tensor (rows,) per step.
        self._log_probs: list[torch.Tensor] = []
        # Logits of this step, which samples are scored by.
        self._logits: torch.Tensor | None = None

    def sample(
        self, model: GenerationMixin, input_ids: torch.LongTensor, logits_processor: LogitsProcessorList, **kwargs
    ):
        """Sample by the model's own loop, for `generate(custom_generate=...)` with this criterion."""
        return model._sample(input_ids, self.behind(logits_processor), **kwargs)

    def behind(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Return the processors behind one that reads the logits."""

        def read(input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
            # A caller's own processor may change them in place.
            self._logits = logits.clone()
            return logits

        return LogitsProcessorList([read, *processors])

    def __call__(self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor, ...], **kwargs) -> torch.BoolTensor:
        """Read the scores of the new tokens: one per step, or several in speculative decoding."""
        for column, step in zip(range(self._num_read - len(scores), 0), scores[self._num_read :], strict=True):
            # In beam search the scores have more rows than the hypotheses.
            if len(step) == len(input_ids):
                scores_of_model = step if self._logits is None else self._logits
                self._log_probs.append(_log_probs(scores_of_model, input_ids[:, column]))
            if self._empties:
                step.set_()
        self._num_read = len(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def totals(self, sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None) -> torch.Tensor:
        """Return the sums of log-probabilities up to the end of each row, (rows,).

        Args:
            sequences: Output ids (rows, length). Steps behind them were undone.
            prompt_length: Tokens of the prompt.
            ends: Ids that end a target.
        """
        tokens = sequences[:, prompt_length:]
        if not self._log_probs or not tokens.shape[1]:
            return torch.zeros(len(tokens), device=tokens.device)
        # (rows, steps)
        per_token = torch.stack(self._log_probs[: tokens.shape[1]], dim=1)
        is_end = are_ends(tokens, ends).long()
        is_padding = is_end.cumsum(dim=1) > is_end
        return per_token.masked_fill(is_padding[:, : per_token.shape[1]].to(per_token.device), 0.0).sum(dim=1)


def totals_of_steps(
    scores: tuple[torch.Tensor, ...], sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None
) -> torch.Tensor:
    """Return `SequenceScores.totals` from the scores (rows, V) of all steps."""
    chosen, steps = SequenceScores(), zip(scores, sequences[:, prompt_length:].unbind(1), strict=False)
    chosen._log_probs = [_log_probs(*step) for step in steps]
    return chosen.totals(sequences, prompt_length, ends)


def _log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    # The padding id may be outside of the vocabulary.
    tokens = tokens.clamp(0, scores.shape[-1] - 1)
    return scores.float().log_softmax(dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]
