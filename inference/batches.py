"""Decoding: many sources in, their hypotheses out, in order; batches of like length inside."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from metaphrase.decoding import fast_generation
from metaphrase.decoding.fast_generation import is_metaphrase
from metaphrase.decoding.options import GENERATION_OPTIONS, plain_options
from metaphrase.decoding.searches.choose import choose_search
from metaphrase.decoding.searches.joint_search import Partner
from metaphrase.decoding.sequence_scores import SequenceScores, totals_of_steps
from metaphrase.inference.engine import BatchSearch, Engine, Hypothesis
from metaphrase.inference.source_limits import numbering
from metaphrase.inference.text_options import (
    FUNCTION_OPTION,
    ROW_OPTIONS,
    options_of_texts,
    read_text_options,
    with_start,
)
from metaphrase.modeling.pipeline_support import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_TOKENS_PER_BATCH,
    batches_by_length,
    checking_targets,
    evaluating,
    length_limits,
    looks_at_padding,
    settings_of,
)

# Before 5.24, transformers tells a function for the tokens of a prefix the row of a sample; later, the source that it is of.
_TELLS_ROWS = Version(transformers.__version__) < Version("5.24.dev0")


def decode(
    model: PreTrainedModel | Engine,
    sources: Sequence[Sequence[int]],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    return_scores: bool = False,
    show_progress: bool | None = False,
    on_batch: Callable[[int], object] | None = None,
    partners: Sequence[Partner] = (),
    search: Callable | None = None,
    **generation_kwargs,
) -> list[list[Hypothesis]]:
    """Runs `model.generate()`, or an engine, over all sources.

    Args:
        model: Any encoder-decoder with a generation mixin; its mode (training or not) is left as it was. Or an engine.
        sources: Token ids of each source, with its end of sequence.
        batch_size: Most sources in a batch. Where transformers drafts tokens, or a setting looks at the sources with their
            padding (`encoder_repetition_penalty`, `encoder_no_repeat_ngram_size`), there is one.
        max_tokens_per_batch: Most source tokens in a batch, padding counted.
        return_scores: Whether hypotheses carry their score.
        show_progress: A progress bar; `None` shows it on a terminal only.
        on_batch: Called after each batch with the number of its sources, by whom has a progress bar of a larger whole.
        partners: Other models that take part, each with what it reads of the sources.
        search: What joins them: an `EnsembleSearch` or a `SpeculativeSearch`.
        **generation_kwargs: As for `generate()`; and those that transformers 5 has left to code on the Hub, for searches of
            this package: `num_beam_groups` with `diversity_penalty`, `penalty_alpha` with `top_k`, `force_words_ids`. A length
            comes before the model's own, whether either counts the start token or not. `decoder_input_ids` has a row for each
            source or one for all, which hypotheses begin with and scores leave out; `prefix_allowed_tokens_fn` is called with
            the number of the source.

    Returns:
        For each source, in order, its `num_return_sequences` hypotheses, best first where they are ranked.

    Raises:
        ValueError: If arguments contradict each other, or as `generate()` does.
    """
    options = plain_options(generation_kwargs)
    options = read_text_options(options, len(sources))
    of_texts: dict[str, Any] = {}
    results: list[list[Hypothesis] | None] = [None] * len(sources)
    read = [sources, *(partner.sources for partner in partners)]
    # What one model reads may be longer than what another one does.
    lengths = [max(map(len, of_models)) for of_models in zip(*read, strict=True)]
    bar = tqdm(total=len(sources), unit="sentence", disable=None if show_progress is None else not show_progress)
    if isinstance(model, Engine):
        searching = model.searching(options, return_scores)
    else:
        models = [model, *(partner.model for partner in partners)]
        options = with_start(model, options)
        _check_forced(model, options)
        of_texts = {name: options.pop(name) for name in (*ROW_OPTIONS, FUNCTION_OPTION) if name in options}
        copies = _copies(model, options)
        if _is_assisted(model, options) or looks_at_padding(settings_of(model, options)):
            # All that transformers' own loop can do; or a source must stand alone to come without padding.
            batch_size = 1
        searching = _searching(models, search, return_scores, options)
    with searching as search_batch, bar:
        for batch in batches_by_length(lengths, batch_size, max_tokens_per_batch):
            of_batch = options_of_texts(of_texts, batch, copies) if of_texts else {}
            with numbering([index + 1 for index in batch]):
                found = search_batch(*([ids[index] for index in batch] for ids in read), **of_batch)
            for index, hypotheses in zip(batch, found, strict=True):
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
    generation_kwargs: dict,
) -> Iterator[BatchSearch]:
    """Everything in evaluation, and what decodes a batch, for as long as that."""
    chosen_search, generation_kwargs = choose_search(models[0], generation_kwargs)
    if joint_search is not None and chosen_search is not None:
        raise ValueError(
            f"Several models must decode greedily, by beams or by sampling, got arguments of {chosen_search.__name__}."
        )

    def search_batch(*read: list[Sequence[int]], **of_batch) -> list[list[Hypothesis]]:
        inputs, *others = map(pad_sources, read, models)
        asked = generation_kwargs | of_batch
        for name in ROW_OPTIONS:
            if asked.get(name) is not None:
                asked[name] = asked[name].expand(len(read[0]), -1)
        if joint_search is not None:
            search = functools.partial(joint_search, partners=list(zip(models[1:], others, strict=True)))
            options = {"custom_generate": search, "return_scores": return_scores}
        else:
            options = _search_options(models[0], chosen_search, return_scores, asked)
        hypotheses = list(_generate(models[0], inputs, return_scores, asked | options))
        count = len(hypotheses) // len(read[0])
        return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]

    with evaluating(models), checking_targets(models[0]), torch.inference_mode():
        yield search_batch


def pad_sources(sources: list[Sequence[int]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Ids and mask `(batch, source)`, padded on the right."""
    width = max(len(source) for source in sources)
    pad = model.config.pad_token_id or 0
    ids = [list(source) + [pad] * (width - len(source)) for source in sources]
    mask = [[1] * len(source) + [0] * (width - len(source)) for source in sources]
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


def _copies(model: PreTrainedModel, options: dict) -> int:
    """Rows of each text that a function is told apart: samples, which are no beams."""
    if not _TELLS_ROWS:
        return 1
    names, own = ("num_beams", "num_return_sequences"), model.generation_config
    beams, count = (getattr(own, name) if options.get(name) is None else options[name] for name in names)
    return 1 if (beams or 1) > 1 else count or 1


def _check_forced(model: PreTrainedModel, options: dict) -> None:
    size = getattr(model.get_output_embeddings(), "out_features", None)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        for token in torch.as_tensor([] if options.get(name) is None else options[name]).flatten().tolist():
            if size is not None and not 0 <= token < size:
                raise ValueError(f"`{name}` must be an id from 0 and below {size}, got {token}.")


def _is_assisted(model: PreTrainedModel, options: dict) -> bool:
    """Whether transformers drafts tokens: by another model, out of the source, or by a part of the model itself."""
    own = model.generation_config
    names = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return options.get("assistant_model") is not None or any(
        options[name] if name in options else getattr(own, name, None) for name in names
    )


def _with_one_fewest(model: PreTrainedModel, options: dict, prompt_length: int) -> dict:
    """The fewest new tokens as a length, of which a model may have one of its own: `generate()` would warn in every batch."""
    fewest = options.get("min_new_tokens")
    if fewest is None or model.generation_config.min_length is None:
        return options
    return {**options, "min_length": prompt_length + fewest, "min_new_tokens": None}


def _search_options(
    model: PreTrainedModel, search: Callable | None, return_scores: bool, generation_kwargs: dict
) -> dict:
    """Arguments of `generate()` for a search of this package, or else for one of transformers'."""
    if search is None and is_metaphrase(model) and _is_plain(model, generation_kwargs):
        return {"custom_generate": fast_generation.search, "return_scores": return_scores}
    options = {"return_dict_in_generate": True, "output_scores": return_scores, "output_logits": False}
    # The scores of its steps are none of what a search here returns.
    return options if search is None else options | {"custom_generate": search, "output_scores": False}


def _generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], return_scores: bool, generation_kwargs: dict
) -> Iterator[Hypothesis]:
    prompt = generation_kwargs.get("decoder_input_ids")
    prompt_length = 1 if prompt is None else prompt.shape[1]
    generation_kwargs = _with_one_fewest(model, generation_kwargs, prompt_length)
    chosen = None
    if generation_kwargs.get("output_scores") and generation_kwargs.get("custom_generate") is None:
        others = generation_kwargs.get("stopping_criteria") or []
        chosen = SequenceScores(empties=not others)
        generation_kwargs = {**generation_kwargs, "stopping_criteria": StoppingCriteriaList([*others, chosen])}
    # In a run whose weights are shared out, it would else wait for what the other processes decode.
    output = model.generate(**inputs, **{"synced_gpus": False} | generation_kwargs)
    ends = generation_kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    ends = set() if ends is None else set(torch.as_tensor(ends).flatten().tolist())
    forced_end = _forced_end(model, generation_kwargs, prompt_length)
    rows = [_cut(row, ends, prompt_length - 1, forced_end) for row in output.sequences[:, 1:].tolist()]
    scores = _scores(output, prompt_length, ends, chosen) if return_scores else [None] * len(rows)
    for (ids, is_finished), score in zip(rows, scores, strict=True):
        yield Hypothesis(ids, score, is_finished)


def _is_plain(model: PreTrainedModel, generation_kwargs: dict) -> bool:
    """Whether the search is greedy, by beams or by sampling, with no options but those that can be told by name."""
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)
    known = {*GENERATION_OPTIONS, "bad_words_ids", "eos_token_id", "synced_gpus"}
    given = {name for name, value in generation_kwargs.items() if value is not None}
    return known >= given and model.generation_config.get_generation_mode() in modes


def _forced_end(model: PreTrainedModel, generation_kwargs: dict, prompt_length: int) -> int | None:
    """Place, the start token not counted, of an end that is forced where the length limit is met; `None` if there is none."""
    if settings_of(model, generation_kwargs).get("forced_eos_token_id") is None:
        return None
    _, most = length_limits(model, generation_kwargs, prompt_length)
    if most is None:
        # As `generate()` does where nobody has said anything.
        most = GenerationConfig._get_default_generation_params()["max_length"] + prompt_length
        most = min(most, getattr(model.config, "max_position_embeddings", None) or most)
    return most - 2


def _cut(row: list[int], ends: set[int], num_given: int, forced_end: int | None = None) -> tuple[list[int], bool]:
    """The ids up to the first end of sequence behind those that were given, and whether there is one that was not forced."""
    for place, token in enumerate(row):
        if place >= num_given and token in ends:
            return row[: place + 1], place != forced_end
    return row, False


def _scores(output, prompt_length: int, ends: set[int], chosen: SequenceScores | None) -> list[float]:
    """The score of each row."""
    sequences_scores = getattr(output, "sequences_scores", None)
    if sequences_scores is not None:
        return sequences_scores.tolist()
    ends = torch.tensor(sorted(ends), dtype=torch.long, device=output.sequences.device)
    # A caller's own loop may ask no criteria.
    totals = functools.partial(totals_of_steps, output.scores) if chosen is None else chosen.totals
    return totals(output.sequences, prompt_length, ends).tolist()
