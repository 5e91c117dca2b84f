"""The entrance to the fast decoder, greedy search and sampling: `generate()`, `Generator` and the searches call `generate`.

transformers' loops define the result. They run where the fast loops do not support a model or an option;
`model.search_obstacle` says why.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import EosTokenCriteria, GenerationMixin, MaxLengthCriteria
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.utils.output_capturing import capture_outputs

from metaphrase.decoding import prepacked_weights
from metaphrase.decoding.beam_search import BeamState, Selection, beam_search
from metaphrase.decoding.decoder_state import DecoderState, prepare_head, prepared_rows
from metaphrase.decoding.options import ROW_PROCESSORS, are_ends, only_lower, process
from metaphrase.decoding.prepacked_weights import can_record, prepared_copies
from metaphrase.errors import MetaphraseError
from metaphrase.modeling.configuration_metaphrase import SLIDING
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.modeling.positions import has_changing_rotation
from metaphrase.modeling.stacks import CACHE_NAME, CACHE_NAMES
from metaphrase.ops.linear_and_dropout import is_hooked

logger = logging.getLogger(__name__)

# Arguments of the network that the loops of this package support. A Trainer hands on labels, which are not read.
_SUPPORTED_ARGUMENTS = {"attention_mask", "encoder_outputs", "labels", "logits_to_keep", "use_cache", *CACHE_NAMES}
# Attention kernels of torch and transformers, which give equal results. A user's own kernel runs in transformers' loops.
_SUPPORTED_KERNELS = {"eager", "sdpa", "flex_attention"}
_SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


def is_metaphrase(model: object) -> bool:
    """Return True if the fast loops can run the decoder of a model, which may be wrapped in an adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return isinstance(base, MetaphraseForConditionalGeneration)


def generate(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    return_scores: bool | None = None,
    permitted: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput:
    """Decode by greedy search, sampling or beam search: by the fast loop if it can, else by transformers' loop.

    `generate()` calls it, also as `generate(custom_generate=generate, return_scores=True)`. The result is ids
    `(sources * copies, length)`, or an output that holds them. The first reason why the fast loop did not run, or None, becomes
    `model.search_obstacle`.

    Args:
        return_scores: None returns what transformers' loops return. True and False return `sequences`, with
            `sequences_scores` `(rows)` if True: scores of beams as transformers computes them, else sums of log-probabilities
            as `sample` computes them.
        permitted: Tokens to select from, (count,), beside those of the prompt and the configuration. Transformers' loops, and
            heads whose rows cannot be selected, select from all tokens.
    """
    config, processors = kwargs["generation_config"], kwargs["logits_processor"]
    reason = find_obstacle(model, input_ids, **kwargs)
    if return_scores is None and config.return_dict_in_generate and not reason:
        reason = "return_dict_in_generate"
    model.search_obstacle = reason
    logger.debug("decoding by the %s", f"transformers loop: {reason}" if reason else "fast loop")
    if reason:
        return _generate_by_transformers(model, input_ids, return_scores, **kwargs)
    copies, head = max(config.num_beams, config.num_return_sequences), None
    sources, prompt = encoded_sources(kwargs, copies), input_ids[::copies]
    project, best_tokens = prepared_projections(model)
    if permitted is not None:
        # Ascending, with the tokens of the prompt, the ends and the forced tokens.
        values = permitted, prompt, config.forced_bos_token_id, config.forced_eos_token_id, config._eos_token_tensor
        tokens = [torch.as_tensor(value).flatten().to(prompt) for value in values if value is not None]
        tokens = torch.cat(tokens).unique()
        # An end of -1 means that no token ends a target.
        permitted = tokens[(tokens >= 0) & (tokens < model.config.decoder_vocab_size)]
        head = prepared_rows(model.get_output_embeddings(), permitted)
    if head is None:
        permitted = None
    else:
        project, best_tokens = functools.partial(model.project, head=head), None
        if processors:
            all_processors = processors

            def process_rows(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                """Let the processors see the scores of all tokens."""
                whole = scores.new_full((len(scores), model.config.decoder_vocab_size), -torch.inf)
                whole[:, permitted] = scores
                return process(all_processors, ids, whole)[:, permitted]

            processors = [process_rows]
    if config.num_beams > 1:
        state, selection = BeamState(model.get_decoder(), *sources), Selection(config, permitted)
        ids, scores = beam_search(project, state, prompt, processors, config, selection)
    else:
        state, rest = DecoderState(model.get_decoder(), *sources), (config, bool(return_scores), best_tokens, permitted)
        ids, scores = sample(project, state, prompt, copies, processors, *rest)
    if return_scores is None:
        return ids
    return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)


def encoded_sources(model_kwargs: dict, copies: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the encoder output (sources, S, D) and its mask, which `generate()` repeats for each hypothesis of a source."""
    mask = model_kwargs.get("attention_mask")
    encoder_output = model_kwargs["encoder_outputs"][0][::copies].contiguous()
    return encoder_output, None if mask is None else mask[::copies]


def _generate_by_transformers(
    model: PreTrainedModel, input_ids: torch.LongTensor, return_scores: bool | None, **kwargs
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput:
    config, step_scores = kwargs["generation_config"], SequenceScores()
    loop = GenerationMixin._sample if config.num_beams == 1 else GenerationMixin._beam_search
    if return_scores is not None:
        config.return_dict_in_generate, config.output_scores = True, return_scores
    if return_scores:
        kwargs["stopping_criteria"] = StoppingCriteriaList([*kwargs["stopping_criteria"], step_scores])
        if config.do_sample and config.num_beams == 1:
            processors = [step_scores.read_logits, *kwargs["logits_processor"]]
            kwargs["logits_processor"] = LogitsProcessorList(processors)
    output = loop(model, input_ids, **kwargs)
    if return_scores is None:
        return output
    scores = getattr(output, "sequences_scores", None)
    if return_scores and scores is None:
        tokens = output.sequences[:, input_ids.shape[1] :]
        scores = torch.zeros(len(tokens), device=tokens.device)
        if step_scores.log_probs:
            log_probs = torch.stack(step_scores.log_probs, dim=1)
            is_end = are_ends(tokens, config._eos_token_tensor).long()
            is_padding = (is_end.cumsum(dim=1) > is_end)[:, : log_probs.shape[1]]
            scores = log_probs.masked_fill(is_padding.to(log_probs.device), 0.0).sum(dim=1)
    return GenerateBeamEncoderDecoderOutput(sequences=output.sequences, sequences_scores=scores)


def prepared_projections(
    model: MetaphraseForConditionalGeneration,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., torch.Tensor | None] | None]:
    """Return `model.project` for decoding steps with the current weights, and a `ShortlistProjection` of its input or None."""
    head, shortlist = model.get_output_embeddings(), None
    if not is_hooked(head) and can_record(head) and head.weight.device.type == "cpu":
        head, shortlist = prepared_copies(model.get_decoder(), head, prepare_head)
    project, best_tokens = functools.partial(model.project, head=head), None
    has_own_project = type(model).project is not MetaphraseForConditionalGeneration.project
    if shortlist is not None and not has_own_project and model.config.final_logit_softcapping is None:

        def best_tokens(hidden_states: torch.Tensor, *arguments) -> torch.Tensor | None:
            return shortlist(model.transform(hidden_states), *arguments)

    return project, best_tokens


def find_obstacle(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: object = None,
    **model_kwargs,
) -> str | None:
    """Return the first reason why the fast loops cannot decode, or None."""
    if not is_metaphrase(model):
        return "a model of another family"
    config, cache, mask = generation_config, model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
    names, ends = {name for name, value in model_kwargs.items() if value is not None}, config._eos_token_tensor
    # Criteria other than the limits of the configuration, such as a caller's own.
    unknown_criteria = [
        item
        for item in stopping_criteria
        if not (type(item) is MaxLengthCriteria and item.max_length == config.max_length)
        and not (type(item) is EosTokenCriteria and ends is not None and item.eos_token_id.tolist() == ends.tolist())
    ]
    conditions = {
        "synced_gpus": synced_gpus,
        "sampled beams": config.do_sample and config.num_beams > 1,
        "streamer": streamer is not None,
        "logits processor": any(type(item) not in ROW_PROCESSORS for item in logits_processor),
        "stopping criterion": unknown_criteria,
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
    return next((name for name, is_met in conditions.items() if is_met), find_obstacle_of_model(model, config))


def find_obstacle_of_model(
    model: MetaphraseForConditionalGeneration, generation_config: GenerationConfig
) -> str | None:
    """Return the first reason why the fast loops cannot run a model in its present state, or None."""
    sizes, max_length = model.config.stack_sizes("decoder"), generation_config.max_length
    attributes, modules = vars(model), (model, model.base_model, *model.get_decoder().modules())
    hooks = [hook for module in modules for hook in module._forward_hooks.values()]
    conditions = {
        "merged_attention": model.config.merged_attention,
        "sliding_rope_theta": model.get_decoder().sliding_rotary_emb is not None,
        # All targets that fit into the window are within it.
        "decoder_window": SLIDING in sizes.layer_types and not (max_length and max_length <= sizes.window[0] + 1),
        "attn_implementation": model.config._attn_implementation not in _SUPPORTED_KERNELS,
        "model in training": model.training,
        "dtype": model.dtype not in _SUPPORTED_DTYPES,
        "autocast": torch.is_autocast_enabled(model.device.type),
        "rope_type": has_changing_rotation(model.config),
        "hook or own forward": "prepare_inputs_for_generation" in attributes
        # accelerate casts around the original `forward`, which it stores.
        or ("forward" in attributes and "_original_forward" not in attributes)
        or type(model).forward is not MetaphraseForConditionalGeneration.forward
        or type(model).prepare_inputs_for_generation
        is not MetaphraseForConditionalGeneration.prepare_inputs_for_generation
        or any(module._forward_pre_hooks or "_hf_hook" in vars(module) for module in modules)
        # transformers leaves hooks behind that recorded hidden states or attention weights.
        or any(getattr(hook, "__module__", None) != capture_outputs.__module__ for hook in hooks),
    }
    return next((name for name, is_met in conditions.items() if is_met), None)


def sample(
    project: Callable[[torch.Tensor], torch.Tensor],
    state: DecoderState,
    prompt: torch.Tensor,
    copies: int,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    with_scores: bool = False,
    best_tokens: Callable[..., torch.Tensor | None] | None = None,
    permitted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Extend targets by the most probable tokens, or by tokens drawn at random.

    Args:
        project: Returns logits from the decoder's output.
        state: State of the sources, before the prompt (sources, length).
        with_scores: True returns log-probabilities: of samples under the model itself, of greedy search after the processors.
        best_tokens: The second function of `prepared_projections`. Only greedy search of one target without scores calls it.
        permitted: The token of each logit, (V,). None means all tokens of the vocabulary.

    Returns:
        Ids (sources * copies, length), padded behind their ends, and their scores, (sources * copies,).
    """
    ends, prompt_length = config._eos_token_tensor, prompt.shape[1]
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    ids = prompt.repeat_interleave(copies, dim=0)
    # Targets that left the batch: their rows in the result, and their ids.
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    totals = torch.zeros(len(ids), device=ids.device) if with_scores else None
    # The row in the result of each row of the batch.
    rows = torch.arange(len(ids), device=ids.device)
    is_ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    # Scores and sampling need the logits of all tokens.
    if config.do_sample or with_scores or copies > 1 or not only_lower(processors):
        best_tokens = None
    unread: Sequence[torch.Tensor] = prompt.unbind(1)
    for length in range(prompt_length, config.max_length):
        for token in unread:
            hidden_states = state.step(token)
        tokens = None if best_tokens is None else best_tokens(hidden_states, processors, ids)
        if tokens is None:
            logits = project(hidden_states).float()
            if length == prompt_length:
                state.expand_beams(copies)
                logits = logits.repeat_interleave(copies, dim=0)
            scores = process(processors, ids, logits)
            tokens = _draw(scores) if config.do_sample else scores.argmax(dim=-1)
            if totals is not None:
                # The distribution that samples are drawn from may be cut to a single token, with a score of 0.
                log_probs = _log_probs(logits if config.do_sample else scores, tokens)
                totals[rows] += log_probs.masked_fill(is_ended, 0.0)
            tokens = tokens if permitted is None else permitted[tokens]
        if ends is not None:
            # With one target per source, targets that have ended are no longer in the batch.
            if copies > 1:
                tokens = tokens.masked_fill(is_ended, padding)
            is_ended = is_ended | are_ends(tokens, ends)
        ids = torch.cat((ids, tokens[:, None]), dim=1)
        is_done = is_ended if copies == 1 else is_ended.view(-1, copies).all(dim=1)
        unread = (tokens,)
        is_last = length + 1 == config.max_length
        if is_last or True in is_done.tolist():
            is_leaving = is_done.repeat_interleave(copies) | is_last
            done.append((rows[is_leaving], ids[is_leaving]))
            if bool(is_leaving.all()):
                break
            ids, rows, is_ended = ids[~is_leaving], rows[~is_leaving], is_ended[~is_leaving]
            state.select_sources((~is_done).nonzero()[:, 0])
            unread = (ids[:, -1],)
    if not done:
        # The prompt has the maximum length.
        return ids, totals
    result = ids.new_full((len(prompt) * copies, done[-1][1].shape[1]), padding)
    for rows, ended_ids in done:
        result[rows, : ended_ids.shape[1]] = ended_ids
    return result, totals


def sample_by_prefix(
    model: PreTrainedModel, input_ids: torch.LongTensor, partners: Sequence = (), return_scores: bool = False, **kwargs
) -> GenerateBeamEncoderDecoderOutput:
    """Draw several targets of each source as sampling does, and compute a beginning that some of them share once.

    The targets of a source are independent of each other, but the random numbers are not those of `sample`: equal beginnings
    draw their next tokens together. The more certain a model is, the fewer rows there are.

    Returns:
        Ids (sources * copies, length), padded behind their ends, and the sums of their log-probabilities, if asked for. Equal
        targets of a source are neighbours.
    """
    config, processors = kwargs["generation_config"], kwargs["logits_processor"]
    if find_obstacle(model, input_ids, **kwargs) is not None:
        return generate(model, input_ids, return_scores, **kwargs)
    copies = config.num_return_sequences
    sources, ids = encoded_sources(kwargs, copies), input_ids[::copies]
    state, (project, _) = DecoderState(model.get_decoder(), *sources), prepared_projections(model)
    # For each row, its source, the number of targets that begin with its ids, and the log-probability of these.
    owners, totals = torch.arange(len(ids), device=ids.device), torch.zeros(len(ids), device=ids.device)
    counts, places, done = torch.full_like(owners, copies), torch.arange(copies, device=ids.device), []
    unread: Sequence[torch.Tensor] = ids.unbind(1)
    for length in range(ids.shape[1] + 1, config.max_length + 1):
        for token in unread:
            hidden_states = state.step(token)
        logits = project(hidden_states).float()
        draws, is_needed = _draw(process(processors, ids, logits), copies), places < counts[:, None]
        children = torch.stack((is_needed.nonzero()[:, 0], draws[is_needed]))
        (parents, tokens), counts = children.unique(dim=1, return_counts=True)
        if return_scores:
            totals = totals[parents] + logits.log_softmax(dim=-1)[parents, tokens]
        ids, owners = torch.cat((ids[parents], tokens[:, None]), dim=1), owners[parents]
        is_done = torch.full_like(tokens, length == config.max_length, dtype=torch.bool)
        if config._eos_token_tensor is not None:
            is_done |= are_ends(tokens, config._eos_token_tensor)
        ended = owners, ids, counts, totals if return_scores else owners
        done += zip(*(part[is_done] for part in ended), strict=True)
        if bool(is_done.all()):
            break
        ids, owners, counts, parents = (part[~is_done] for part in (ids, owners, counts, parents))
        totals = totals[~is_done] if return_scores else totals
        if not torch.equal(parents, torch.arange(len(hidden_states), device=ids.device)):
            state.select_sources(parents)
        unread = (ids[:, -1],)
    done.sort(key=lambda target: int(target[0]))
    rows = [(row, score) for _, row, count, score in done for _ in range(int(count))]
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    sequences = nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True, padding_value=padding)
    scores = torch.stack([score for _, score in rows]) if return_scores else None
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)


def _draw(scores: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Draw tokens of each row of logits (rows, V), independent of each other, shape (rows,) or (rows, count)."""
    try:
        probabilities = nn.functional.softmax(scores, dim=-1)
        return torch.multinomial(probabilities, count, replacement=count > 1).squeeze(1)
    except RuntimeError as error:
        # Another reason may be too little memory.
        if bool(scores.isnan().any()) or not bool(scores.isfinite().any(dim=-1).all()):
            raise MetaphraseError(
                "Each row of logits must have a finite entry and no NaN to draw a token, got a row without. Check the "
                "weights of the model, and whether the options suppress all tokens."
            ) from error
        raise


class SequenceScores(StoppingCriteria):
    """A criterion that never stops. It reads the scores of each step when the tokens are selected, and then empties them.

    transformers' loops return the scores of beams only if they also store the scores of all tokens and steps. `log_probs` has one
    tensor (rows,) per step. Samples are scored by the logits, which the first of the logits processors reads.
    """

    def __init__(self):
        self.log_probs, self._logits = [], None

    def read_logits(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        # A caller's own processor may change them in place.
        self._logits = logits.clone()
        return logits

    def __call__(self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor, ...], **kwargs) -> torch.BoolTensor:
        # In beam search the scores have more rows than the hypotheses.
        if len(scores[-1]) == len(input_ids):
            logits = scores[-1] if self._logits is None else self._logits
            self.log_probs.append(_log_probs(logits, input_ids[:, -1]))
        scores[-1].set_()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    # The padding id may be outside of the vocabulary.
    tokens = tokens.clamp(0, scores.shape[-1] - 1)
    return scores.float().log_softmax(dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]


def plug_in() -> None:
    """Put the fast decoder into `generate()` of all Metaphrase models, and prepacked weights into their encoders."""
    MetaphraseForConditionalGeneration._sample = MetaphraseForConditionalGeneration._beam_search = generate
    prepacked_weights.plug_in()
