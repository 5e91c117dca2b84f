"""Decode many sources in batches of similar length. Hypotheses have the order of the sources."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from metaphrase.decoding import fast_generation
from metaphrase.decoding.fast_generation import SequenceScores, is_metaphrase, totals_of_steps
from metaphrase.decoding.options import plain_options
from metaphrase.decoding.searches.constrained_beam_search import add_beams, constrained_beam_search
from metaphrase.decoding.searches.joint_search import Partner
from metaphrase.inference.engine import BatchSearch, Engine, Hypothesis
from metaphrase.inference.progress import progress_bar
from metaphrase.inference.sources import PROMPT, evaluating, numbering, prompts_of, read_prompts, with_start
from metaphrase.storage.generation_options import GENERATION_OPTIONS, check_options, length_limits, resolve_settings
from metaphrase.tokenization.batches import batches_by_length
from metaphrase.tokenization.vocabulary_map import VocabularyMap

DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192
# These options count the padding of a source, except with these values.
_OPTIONS_OF_PADDING = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}


def decode(
    model: PreTrainedModel | Engine, sources: Sequence[Sequence[int]], *, return_scores: bool = False, **arguments
) -> list[list[Hypothesis]]:
    """Run `model.generate()`, or an engine, over all sources.

    `force_words_ids` are phrases that each target contains. A length option overrides any length of the generation config.
    `decoder_input_ids` has a row for each source or one for all; hypotheses begin with it, scores leave it out.

    Args:
        model: Any encoder-decoder with a generation mixin, or an engine. It keeps its mode, training or evaluation.
        sources: Token ids of each source, with end of sequence.
        return_scores: True if hypotheses carry their score.
        **arguments: `batch_size`, `show_progress` and others of `decode_batches`, and those of `generate()`.

    Returns:
        For each source, in order, its `num_return_sequences` hypotheses. Beam search ranks them, best first.

    Raises:
        ValueError: If arguments contradict each other, or as `generate()` does.
    """
    batching = {name: arguments.pop(name) for name in _ARGUMENTS_OF_BATCHES if name in arguments}
    options = read_prompts(plain_options(arguments), len(sources))
    return decode_batches(model, sources, options, return_scores=return_scores, **batching)


_ARGUMENTS_OF_BATCHES = ("batch_size", "max_tokens_per_batch", "show_progress", "on_batch", "partners", "search")
_ARGUMENTS_OF_BATCHES += ("vocabulary_map",)


def decode_batches(
    model: PreTrainedModel | Engine,
    sources: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    *,
    return_scores: bool,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    show_progress: bool | None = False,
    on_batch: Callable[[int], object] | None = None,
    partners: Sequence[Partner] = (),
    search: Callable | None = None,
    vocabulary_map: VocabularyMap | None = None,
) -> list[list[Hypothesis]]:
    """Decode with plain options, see `decode`.

    Args:
        model: As for `decode`.
        sources: As for `decode`.
        options: Arguments of `generate()`, from `plain_options` and `read_prompts`.
        return_scores: True if hypotheses carry their score.
        batch_size: Most sources in a batch. It is 1 if transformers drafts tokens, or if an option looks at padded sources
            (`encoder_repetition_penalty`, `encoder_no_repeat_ngram_size`).
        max_tokens_per_batch: Most source tokens in a batch, padding included.
        show_progress: As for `progress_bar`.
        on_batch: Called after each batch with the number of its sources, for the caller's progress bar.
        partners: Other models that take part, each with its own ids of the sources.
        search: The search of all models: an `EnsembleSearch` or a `SpeculativeSearch`.
        vocabulary_map: Permits the tokens of a batch, for the fast loops. Other searches and engines do not read the map.
    """
    prompts: dict[str, Any] = {}
    results: list[list[Hypothesis] | None] = [None] * len(sources)
    sources_of_models = [sources, *(partner.sources for partner in partners)]
    lengths = [max(map(len, ids)) for ids in zip(*sources_of_models, strict=True)]
    if isinstance(model, torch.nn.Module):
        models = [model, *(partner.model for partner in partners)]
        options = with_start(model, options)
        _check_forced(model, options)
        prompts = {PROMPT: options.pop(PROMPT)} if options.get(PROMPT) is not None else {}
        if _is_assisted(model, options) or _depends_on_padding(resolve_settings(model, options)):
            # transformers' assisted loop takes one source. A source alone has no padding.
            batch_size = 1
        searching = _searching(models, search, return_scores, vocabulary_map, options)
    else:
        searching = model.searching(options, return_scores)
    with searching as search_batch, progress_bar(len(sources), "sentence", show_progress) as bar:
        # An engine has checked its options by now, with other bounds.
        check_options(options)
        for batch in batches_by_length(lengths, batch_size, max_tokens_per_batch):
            with numbering([index + 1 for index in batch]):
                rows = search_batch(
                    *([ids[index] for index in batch] for ids in sources_of_models), **prompts_of(prompts, batch)
                )
            for index, hypotheses in zip(batch, rows, strict=True):
                results[index] = hypotheses
            bar.update(len(batch))
            if on_batch is not None:
                on_batch(len(batch))
    return results


@contextlib.contextmanager
def _searching(
    models: Sequence[PreTrainedModel],
    joint_search: Callable | None,
    return_scores: bool,
    vocabulary_map: VocabularyMap | None,
    options: dict,
) -> Iterator[BatchSearch]:
    """Put the models into evaluation mode inside this context. Yields the search for one batch."""
    needs_phrases = options.get("force_words_ids") is not None
    if needs_phrases and joint_search is not None:
        raise ValueError("Required phrases need a single model, got several.")
    if needs_phrases:
        options = add_beams(models[0], options)
        options |= {"custom_generate": constrained_beam_search, "return_dict_in_generate": True, "output_scores": False}
    elif joint_search is None and is_metaphrase(models[0]) and _is_plain(models[0], options):
        options = options | {"custom_generate": fast_generation.search, "return_scores": return_scores}
    elif joint_search is None:
        options = options | {"return_dict_in_generate": True, "output_scores": return_scores, "output_logits": False}

    def search_batch(*sources: list[Sequence[int]], **prompts) -> list[list[Hypothesis]]:
        inputs, *partner_inputs = map(pad_sources, sources, models)
        batch_options = options | {name: rows.expand(len(sources[0]), -1) for name, rows in prompts.items()}
        if joint_search is not None:
            search = functools.partial(joint_search, partners=list(zip(models[1:], partner_inputs, strict=True)))
            batch_options |= {"custom_generate": search, "return_scores": return_scores}
        elif vocabulary_map is not None and options.get("custom_generate") is fast_generation.search:
            batch_options["permitted"] = torch.from_numpy(vocabulary_map.permitted(sources[0]))
        hypotheses = _generate(models[0], inputs, return_scores, batch_options)
        count = len(hypotheses) // len(sources[0])
        return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]

    with evaluating(models), torch.inference_mode():
        yield search_batch


def pad_sources(sources: list[Sequence[int]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` `(batch, source)`, padded on the right.

    Raises:
        ValueError: If the embedding has no row for an id.
    """
    width = max(len(source) for source in sources)
    pad = model.config.pad_token_id or 0
    ids = [list(source) + [pad] * (width - len(source)) for source in sources]
    mask = [[1] * len(source) + [0] * (width - len(source)) for source in sources]
    num_rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if num_rows is not None and width and (largest := max(map(max, ids))) >= num_rows:
        raise ValueError(f"Token ids must be rows of the model's embedding, below {num_rows}, got {largest}.")
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


def _check_forced(model: PreTrainedModel, options: dict) -> None:
    size = getattr(model.get_output_embeddings(), "out_features", None)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        for token in torch.as_tensor([] if options.get(name) is None else options[name]).flatten().tolist():
            if size is not None and not 0 <= token < size:
                raise ValueError(f"`{name}` must be an id from 0 and below {size}, got {token}.")


def _is_assisted(model: PreTrainedModel, options: dict) -> bool:
    """Return True if transformers drafts tokens: by another model, by lookup, or by layers of the model itself."""
    config = model.generation_config
    names = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return options.get("assistant_model") is not None or any(
        options[name] if name in options else getattr(config, name, None) for name in names
    )


def _is_sampled_alone(model: PreTrainedModel, options: dict) -> bool:
    """Return True for plain sampling. Its loop gets no streamer as a `custom_generate`."""
    settings = resolve_settings(model, options)
    is_plain = (settings.get("num_beams") or 1) == 1 and options.get("streamer") is None
    return bool(settings.get("do_sample")) and is_plain and not _is_assisted(model, options)


def _generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], return_scores: bool, generation_kwargs: dict
) -> list[Hypothesis]:
    prompt = generation_kwargs.get(PROMPT)
    prompt_length = 1 if prompt is None else prompt.shape[1]
    min_new_tokens = generation_kwargs.get("min_new_tokens")
    if min_new_tokens is not None and model.generation_config.min_length is not None:
        # `generate()` warns if both are set.
        generation_kwargs = {**generation_kwargs, "min_length": prompt_length + min_new_tokens, "min_new_tokens": None}
    step_scores = None
    if generation_kwargs.get("output_scores") and generation_kwargs.get("custom_generate") is None:
        criteria = generation_kwargs.get("stopping_criteria") or []
        step_scores = SequenceScores(empties=not criteria)
        generation_kwargs = {**generation_kwargs, "stopping_criteria": StoppingCriteriaList([*criteria, step_scores])}
        if _is_sampled_alone(model, generation_kwargs):
            generation_kwargs["custom_generate"] = step_scores.sample
    # With sharded weights, `generate()` would otherwise wait for the batches of other processes.
    output = model.generate(**inputs, **{"synced_gpus": False} | generation_kwargs)
    eos_token_ids = generation_kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    eos_token_ids = set() if eos_token_ids is None else set(torch.as_tensor(eos_token_ids).flatten().tolist())
    forced_index = _forced_eos_index(model, generation_kwargs, prompt_length)
    rows = [_cut(row, eos_token_ids, prompt_length - 1, forced_index) for row in output.sequences[:, 1:].tolist()]
    scores = [None] * len(rows)
    if return_scores:
        scores = _sequence_scores(output, prompt_length, eos_token_ids, step_scores)
    return [Hypothesis(ids, score, is_finished) for (ids, is_finished), score in zip(rows, scores, strict=True)]


def _is_plain(model: PreTrainedModel, generation_kwargs: dict) -> bool:
    """Return True for greedy search, beam search and sampling with no other options than those of the command line."""
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)
    known = {*GENERATION_OPTIONS, "bad_words_ids", "eos_token_id", "synced_gpus"}
    names = {name for name, value in generation_kwargs.items() if value is not None}
    return known >= names and model.generation_config.get_generation_mode() in modes


def _forced_eos_index(model: PreTrainedModel, generation_kwargs: dict, prompt_length: int) -> int | None:
    """Return the index, without start token, at which `forced_eos_token_id` ends a sequence; `None` if it is not set."""
    if resolve_settings(model, generation_kwargs).get("forced_eos_token_id") is None:
        return None
    _, max_length = length_limits(model, generation_kwargs, prompt_length)
    if max_length is None:
        # The default of `generate()`.
        max_length = GenerationConfig._get_default_generation_params()["max_length"] + prompt_length
        max_length = min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
    return max_length - 2


def _cut(
    row: list[int], eos_token_ids: set[int], num_prompt_tokens: int, forced_index: int | None
) -> tuple[list[int], bool]:
    """Return the ids up to the first end of sequence after the prompt, and True if the model wrote that end itself."""
    for index, token in enumerate(row):
        if index >= num_prompt_tokens and token in eos_token_ids:
            return row[: index + 1], index != forced_index
    return row, False


def _sequence_scores(
    output, prompt_length: int, eos_token_ids: set[int], step_scores: SequenceScores | None
) -> list[float]:
    sequences_scores = getattr(output, "sequences_scores", None)
    if sequences_scores is not None:
        return sequences_scores.tolist()
    ends = torch.tensor(sorted(eos_token_ids), dtype=torch.long, device=output.sequences.device)
    # A custom loop need not call the stopping criteria.
    totals = functools.partial(totals_of_steps, output.scores) if step_scores is None else step_scores.totals
    return totals(output.sequences, prompt_length, ends).tolist()


def _depends_on_padding(settings: Mapping[str, Any]) -> bool:
    return any(settings.get(name) not in (None, neutral) for name, neutral in _OPTIONS_OF_PADDING.items())
