"""The entrance to the fast decoder: `generate()` of Metaphrase models, `Generator` and the searches call `search`.

transformers' loops define the result. They run where the fast loops do not support an option; `model.last_search` says which
loop ran, and why.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.utils.output_capturing import capture_outputs

from metaphrase.decoding.beam_search import BeamState, Selection, beam_search
from metaphrase.decoding.decoder_state import DecoderState, prepared_head, prepared_rows
from metaphrase.decoding.options import are_ends, has_unknown_criteria, has_unknown_processors, process_permitted
from metaphrase.decoding.prepacked_weights import walk
from metaphrase.decoding.sampling import sample
from metaphrase.decoding.shortlist import Shortlist
from metaphrase.modeling.compat import CACHE_NAME, CACHE_NAMES
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.ops.linear_and_dropout import is_offloaded

logger = logging.getLogger(__name__)

# Arguments of the network that the loops of this package support. A Trainer hands on labels, which are not read.
_SUPPORTED_ARGUMENTS = {"attention_mask", "encoder_outputs", "labels", "logits_to_keep", "use_cache", *CACHE_NAMES}
# Attention kernels of torch and transformers, which give equal results. A user's own kernel runs in transformers' loops.
_SUPPORTED_KERNELS = {"eager", "sdpa", "flex_attention"}
_SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
# These rotations depend on the length of the sequence so far.
_CHANGING_ROTATIONS = ("dynamic", "longrope")


@dataclass(frozen=True)
class LastSearch:
    """The loop that decoded last, as `model.last_search`.

    Attributes:
        loop: "fast" or "transformers".
        reason: First reason why the fast loop did not run; empty if it did.
    """

    loop: str
    reason: str = ""


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

    `generate()` calls it, also as `generate(custom_generate=search, return_scores=True)`. The result is ids
    `(sources * copies, length)`, or an output that holds them.

    Args:
        return_scores: None returns what transformers' loops return. True and False return `sequences`, with
            `sequences_scores` `(rows)` if True: scores of beams as transformers computes them, else sums of log-probabilities
            as `sample` computes them.
        permitted: Tokens to select from, (count,), beside those of the prompt and the configuration. Transformers' loops, and
            heads whose rows cannot be selected, select from all tokens.
    """
    config = generation_config
    reason = find_obstacle(model, input_ids, logits_processor, stopping_criteria, config, **model_kwargs)
    if return_scores is None and config.return_dict_in_generate and not reason:
        reason = "return_dict_in_generate"
    model.last_search = LastSearch("transformers" if reason else "fast", reason or "")
    logger.debug("decoding by the %s loop%s", model.last_search.loop, f": {reason}" if reason else "")
    if reason:
        return _search_by_transformers(
            model, input_ids, logits_processor, stopping_criteria, config, return_scores, **model_kwargs
        )
    copies = max(config.num_beams, config.num_return_sequences)
    encoder_output, mask = encoded_sources(model_kwargs, copies)
    decoder, prompt, (project, shorten) = model.get_decoder(), input_ids[::copies], prepared_projections(model)
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


def encoded_sources(model_kwargs: dict, copies: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the encoder output (sources, S, D) and its mask, which `generate()` repeats for each hypothesis of a source."""
    mask = model_kwargs.get("attention_mask")
    encoder_output = model_kwargs["encoder_outputs"][0][::copies].contiguous()
    return encoder_output, None if mask is None else mask[::copies]


def _search_by_transformers(
    model: MetaphraseForConditionalGeneration,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    return_scores: bool | None,
    **model_kwargs,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput:
    loop = GenerationMixin._sample if config.num_beams == 1 else GenerationMixin._beam_search
    step_scores = SequenceScores()
    if return_scores is not None:
        config.return_dict_in_generate, config.output_scores = True, return_scores
    if return_scores:
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, step_scores])
        if config.do_sample and config.num_beams == 1:
            logits_processor = step_scores.behind(logits_processor)
    output = loop(model, input_ids, logits_processor, stopping_criteria, config, **model_kwargs)
    if return_scores is None:
        return output
    scores = getattr(output, "sequences_scores", None)
    if return_scores and scores is None:
        scores = step_scores.totals(output.sequences, input_ids.shape[1], config._eos_token_tensor)
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


def prepared_projections(
    model: MetaphraseForConditionalGeneration,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], Shortlist | None] | None]:
    """Return `model.project` for decoding steps with the weights as they are now, and a projection to shortlists or None."""
    head, shortlist = prepared_head(model.get_decoder(), model.get_output_embeddings())
    project = functools.partial(model.project, head=head)
    if shortlist is None or not _is_of_package(type(model).project):
        return project, None
    return project, lambda hidden_states: shortlist(model.scale(hidden_states))


def find_obstacle(
    model: MetaphraseForConditionalGeneration,
    input_ids: torch.LongTensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: object = None,
    **model_kwargs,
) -> str | None:
    """Return the first reason why the fast loops cannot decode, or None."""
    cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
    names = {name for name, value in model_kwargs.items() if value is not None}
    conditions = {
        "synced_gpus": synced_gpus,
        "sampled beams": config.do_sample and config.num_beams > 1,
        "streamer": streamer is not None,
        "logits processor": has_unknown_processors(processors),
        "stopping criterion": has_unknown_criteria(criteria, config),
        "argument of the network": names - _SUPPORTED_ARGUMENTS,
        # A cache of the caller must be filled.
        "kind of cache": cache is not None
        and (
            type(cache) is not EncoderDecoderCache
            or type(cache.self_attention_cache) is not DynamicCache
            or cache.self_attention_cache.offloading
            or cache.get_seq_length() > 0
            or getattr(cache, "_is_user_defined", False)
        ),
        "several prompts of one source": len(input_ids) != len(model_kwargs["encoder_outputs"][0]),
        # The attention kernel decides what a row without a token attends to.
        "source without a token": mask is not None and not bool(mask.any(dim=1).all()),
    }
    return next((name for name, is_met in conditions.items() if is_met), None) or find_obstacle_of_model(model)


def find_obstacle_of_model(model: MetaphraseForConditionalGeneration) -> str | None:
    """Return the first reason why the fast loops cannot run a model in its present state, or None."""
    conditions = {
        "attn_implementation": model.config._attn_implementation not in _SUPPORTED_KERNELS,
        "model in training": model.training,
        "dtype": model.dtype not in _SUPPORTED_DTYPES,
        "autocast": torch.is_autocast_enabled(model.device.type),
        "rope_type": (model.config.rope_parameters or {}).get("rope_type") in _CHANGING_ROTATIONS,
        "hook or own forward": not _calls_are_plain(model),
    }
    return next((name for name, is_met in conditions.items() if is_met), None)


def _calls_are_plain(model: MetaphraseForConditionalGeneration) -> bool:
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


class SequenceScores(StoppingCriteria):
    """A criterion that never stops. It reads the scores of each step when the tokens are selected, and then empties them.

    With `output_scores` transformers' loops store the scores of all tokens and steps. Without, they do not return the scores of
    beams, which they sum up themselves.
    """

    def __init__(self, empties: bool = True):
        """Leave the scores in place if `empties` is False, for other criteria that may read earlier steps."""
        self._empties, self._num_read = empties, 0
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
        """Return the processors behind one that reads the logits, by which samples are scored."""

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
                self._log_probs.append(_log_probs(step if self._logits is None else self._logits, input_ids[:, column]))
            if self._empties:
                step.set_()
        self._num_read = len(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def totals(self, sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None) -> torch.Tensor:
        """Return the sums of log-probabilities (rows,) of sequences (rows, length) behind the prompt, up to the ends."""
        return _sum_to_ends(self._log_probs, sequences[:, prompt_length:], ends)


def totals_of_steps(
    scores: tuple[torch.Tensor, ...], sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None
) -> torch.Tensor:
    """Return `SequenceScores.totals` from the scores (rows, V) of all steps."""
    tokens = sequences[:, prompt_length:]
    return _sum_to_ends([_log_probs(*step) for step in zip(scores, tokens.unbind(1), strict=False)], tokens, ends)


def _sum_to_ends(log_probs: list[torch.Tensor], tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    # Steps behind the tokens were undone.
    if not (log_probs := log_probs[: tokens.shape[1]]):
        return torch.zeros(len(tokens), device=tokens.device)
    is_end = are_ends(tokens, ends).long()
    is_padding = (is_end.cumsum(dim=1) > is_end)[:, : len(log_probs)]
    return torch.stack(log_probs, dim=1).masked_fill(is_padding.to(log_probs[0].device), 0.0).sum(dim=1)


def _log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    # The padding id may be outside of the vocabulary.
    tokens = tokens.clamp(0, scores.shape[-1] - 1)
    return scores.float().log_softmax(dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]
