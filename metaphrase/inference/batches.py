"""Decode ids in batches of similar length, with torch or another engine. Hypotheses have the order of the sources."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from metaphrase.decoding import fast_generation
from metaphrase.decoding.fast_generation import totals_of_steps
from metaphrase.decoding.options import plain_options
from metaphrase.decoding.searches.constrained_beam_search import add_beams, constrained_beam_search
from metaphrase.decoding.searches.joint_search import Partner, SpeculativeSearch
from metaphrase.inference.progress import progress_bar
from metaphrase.storage.generation_options import GENERATION_OPTIONS, check_options, length_limits, resolve_settings
from metaphrase.tokenization.batches import batches_by_length
from metaphrase.tokenization.vocabulary_map import VocabularyMap

DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192
# These options count the padding of a source, except with these values.
_OPTIONS_OF_PADDING = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
# Most tokens of a source for a model without a limit, such as T5, unless a batch may have more. The memory for attention grows
# with the square of this number.
MAX_TOKENS_WITHOUT_POSITIONS = 8192


@dataclass(frozen=True)
class Hypothesis:
    """One decoded target.

    Attributes:
        ids: Token ids without start token and padding. The last one is the end of sequence if the model wrote it.
        score: Length-normalized score of beam search, else the sum of log-probabilities. Those of samples are the model's own,
            without temperature, `top_p` and the like. `None` without `return_scores`.
        is_finished: True if the model wrote the end of sequence within the length limit. An end that `forced_eos_token_id` put
            there does not count.
    """

    ids: list[int]
    score: float | None
    is_finished: bool


# Takes the sources of a batch once for each model (token ids). Returns the hypotheses of each source.
BatchSearch = Callable[..., list[list[Hypothesis]]]


class Engine(Protocol):
    """Decoder in place of a transformers model, such as `CTranslate2Engine`. It is no `torch.nn.Module`.

    Attributes:
        generation_config: Defaults for options that a call leaves out.
    """

    generation_config: GenerationConfig

    def make_search(self, options: Mapping[str, Any], return_scores: bool) -> BatchSearch:
        """Return the search for the batches of one call. `ValueError` for an option that the engine does not support."""


class TooLongError(ValueError):
    """A source, or a target that was given, has more tokens than its model has positions, or than fit into memory.

    The number counts from 1; in a file it is that of the line.
    """

    def __init__(self, number: int, num_tokens: int, limit: int, side: str = "source", has_positions: bool = True):
        # An error from another process is rebuilt from these arguments.
        super().__init__(number, num_tokens, limit, side, has_positions)
        self.number = number

    def __str__(self) -> str:
        number, num_tokens, limit, side, has_positions = self.args
        hint = f" Set `max_source_length` to {limit} or less to truncate it." if side == "source" else ""
        hint += "" if has_positions else " Set `max_tokens_per_batch` to read it whole, with more memory."
        reason = "than the model has positions" if has_positions else "than `max_tokens_per_batch` or the default"
        return (
            f"A {side} must not have more tokens {reason}, {limit}, got {num_tokens} in "
            f"number {number} (in a file: line {number}).{hint}"
        )


@contextlib.contextmanager
def numbering(numbers: Sequence[int]) -> Iterator[None]:
    """Replace the number in a `TooLongError`: source i of a selection has number `numbers[i - 1]`."""
    try:
        yield
    except TooLongError as error:
        raise TooLongError(numbers[error.number - 1], *error.args[1:]) from None


def check_sources(sources: Sequence[Sequence[int]], positions: int | None, max_tokens_per_batch: int) -> None:
    """Raise `TooLongError` for a source with more tokens than `positions`, or than a batch may have without such a limit."""
    limit = max(MAX_TOKENS_WITHOUT_POSITIONS, max_tokens_per_batch) if positions is None else positions
    for number, source in enumerate(sources, start=1):
        if len(source) > limit:
            raise TooLongError(number, len(source), limit, has_positions=positions is not None)


def check_source_length(length: int, encode: Callable[[list[str]], list[list[int]]], prefix: str) -> None:
    """Raise `ValueError` if `max_source_length` has no room for a token of the text beside special tokens and prefix."""
    # White space at the end of the prefix may be part of the next token.
    [ids] = encode([prefix.rstrip()])
    if length <= len(ids):
        raise ValueError(
            f"`max_source_length` must be above {len(ids)}, the special tokens and those of `source_prefix`, got {length}."
        )


def longest_source(model: Any) -> int | None:
    """Return the most tokens of a source, with the end of sequence, or None if the model has no limit."""
    return _num_positions(model, "get_encoder", "position_limit")


def longest_target(model: Any) -> int | None:
    """Return the most tokens of the decoder's input, with the start token, or None if the model has no limit."""
    return _num_positions(model, "get_decoder", "decoder_position_limit")


def _num_positions(model: Any, method: str, name: str) -> int | None:
    if not hasattr(model, method):
        return None
    # FSMT's stacks have no configuration of their own.
    config = getattr(getattr(model, method)(), "config", model.config)
    return getattr(config, name if config.model_type == "metaphrase" else "max_position_embeddings", None)


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Set models to evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # A module comes before its submodules, whose modes `train` changes. A stack also acts on a call of `train`.
        for module, was_training in modes:
            if module.training != was_training:
                module.train(was_training)


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `generate()` in their plain form, checked. Options that are plain stay as they are."""
    options = plain_options(options)
    for name in ("decoder_input_ids", "prefix_allowed_tokens_fn"):
        if options.get(name) is not None:
            raise ValueError(f"`{name}` has rows of a batch, which are no texts. Call `model.generate()` with it.")
    check_options(options)
    return options


def decode(
    model: PreTrainedModel | Engine,
    sources: Sequence[Sequence[int]],
    *,
    return_scores: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    show_progress: bool | None = False,
    on_batch: Callable[[int], object] | None = None,
    partners: Sequence[Partner] = (),
    search: Callable | None = None,
    vocabulary_map: VocabularyMap | None = None,
    **generation_kwargs,
) -> list[list[Hypothesis]]:
    """Run `model.generate()`, or an engine, over all sources.

    `force_words_ids` are phrases that each target contains. A length option overrides any length of the generation config.

    Args:
        model: Any encoder-decoder with a generation mixin, or an engine. It keeps its mode, training or evaluation.
        sources: Token ids of each source, with end of sequence.
        return_scores: True if hypotheses carry their score.
        batch_size: Most sources in a batch. It is 1 if tokens are drafted, or if an option looks at padded sources
            (`encoder_repetition_penalty`, `encoder_no_repeat_ngram_size`).
        max_tokens_per_batch: Most source tokens in a batch, padding included.
        show_progress: As for `progress_bar`.
        on_batch: Called after each batch with the number of its sources, for the caller's progress bar.
        partners: Other models that take part, each with its own ids of the sources.
        search: The search of all models: an `EnsembleSearch` or a `SpeculativeSearch`.
        vocabulary_map: Permits the tokens of a batch, for the fast loops. Other searches and engines do not read the map.
        **generation_kwargs: Arguments of `generate()`.

    Returns:
        For each source, in order, its `num_return_sequences` hypotheses. Beam search ranks them, best first.

    Raises:
        ValueError: If arguments contradict each other, or as `generate()` does.
    """
    options = read_options(generation_kwargs)
    results: list[list[Hypothesis] | None] = [None] * len(sources)
    sources_of_models = [sources, *(partner.sources for partner in partners)]
    lengths = [max(map(len, ids)) for ids in zip(*sources_of_models, strict=True)]
    with contextlib.ExitStack() as context:
        if isinstance(model, torch.nn.Module):
            models = [model, *(partner.model for partner in partners)]
            settings = resolve_settings(model, options)
            counts_padding = any(settings.get(name) not in (None, off) for name, off in _OPTIONS_OF_PADDING.items())
            if counts_padding or _is_assisted(settings) or isinstance(search, SpeculativeSearch):
                # Loops with drafts take one source. A source alone has no padding.
                batch_size = 1
            search_batch = _make_search(models, search, return_scores, vocabulary_map, options)
            context.enter_context(evaluating(models))
            context.enter_context(torch.inference_mode())
        else:
            search_batch = model.make_search(options, return_scores)
        bar = context.enter_context(progress_bar(len(sources), "sentence", show_progress))
        for batch in batches_by_length(lengths, batch_size, max_tokens_per_batch):
            rows = search_batch(*([ids[index] for index in batch] for ids in sources_of_models))
            for index, hypotheses in zip(batch, rows, strict=True):
                results[index] = hypotheses
            bar.update(len(batch))
            if on_batch is not None:
                on_batch(len(batch))
    return results


def _make_search(
    models: Sequence[PreTrainedModel],
    joint_search: Callable | None,
    return_scores: bool,
    vocabulary_map: VocabularyMap | None,
    options: Mapping[str, Any],
) -> BatchSearch:
    options = dict(options)
    if options.get("force_words_ids") is not None:
        if joint_search is not None:
            raise ValueError("Required phrases need a single model, got several.")
        options = add_beams(models[0], options)
        options |= {"custom_generate": constrained_beam_search, "return_dict_in_generate": True, "output_scores": False}
    elif joint_search is None and _is_plain(models[0], options):
        options |= {"custom_generate": fast_generation.generate, "return_scores": return_scores}
    elif joint_search is None:
        options |= dict.fromkeys(("output_scores", "output_logits"), return_scores) | {"return_dict_in_generate": True}

    def search_batch(*sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
        inputs, *partner_inputs = map(pad_sources, sources, models)
        batch_options = dict(options)
        if joint_search is not None:
            search = functools.partial(joint_search, partners=list(zip(models[1:], partner_inputs, strict=True)))
            batch_options |= {"custom_generate": search, "return_scores": return_scores}
        elif vocabulary_map is not None and options.get("custom_generate") is fast_generation.generate:
            batch_options["permitted"] = torch.from_numpy(vocabulary_map.permitted(sources[0]))
        hypotheses = _generate(models[0], inputs, return_scores, batch_options)
        count = len(hypotheses) // len(sources[0])
        return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]

    return search_batch


def pad_sources(sources: list[Sequence[int]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` `(batch, source)`, padded on the right."""
    width = max(len(source) for source in sources)
    pad = model.config.pad_token_id or 0
    ids = [list(source) + [pad] * (width - len(source)) for source in sources]
    mask = [[1] * len(source) + [0] * (width - len(source)) for source in sources]
    num_rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    # A tokenizer may have more entries than its model. On a GPU, torch's error would name no id.
    if num_rows is not None and width and (largest := max(map(max, ids))) >= num_rows:
        raise ValueError(f"Token ids must be rows of the model's embedding, below {num_rows}, got {largest}.")
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


def _is_plain(model: PreTrainedModel, options: Mapping[str, Any]) -> bool:
    """Return True for greedy search, beam search and sampling with no other options than those of the command line."""
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)
    known = {*GENERATION_OPTIONS, "bad_words_ids", "eos_token_id", "synced_gpus"}
    names = {name for name, value in options.items() if value is not None}
    return known >= names and model.generation_config.get_generation_mode() in modes


def _is_assisted(settings: Mapping[str, Any]) -> bool:
    """Return True if transformers drafts tokens: by another model, by lookup, or by layers of the model itself."""
    names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return any(settings.get(name) not in (None, False) for name in names)


def _generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], return_scores: bool, options: dict[str, Any]
) -> list[Hypothesis]:
    min_new_tokens = options.get("min_new_tokens")
    if min_new_tokens is not None and model.generation_config.min_length is not None:
        # `generate()` warns if both are set.
        options |= {"min_length": 1 + min_new_tokens, "min_new_tokens": None}
    settings = resolve_settings(model, options)
    # With sharded weights, `generate()` would otherwise wait for the batches of other processes.
    output = model.generate(**inputs, **{"synced_gpus": False} | options)
    ends = settings.get("eos_token_id")
    ends = set() if ends is None else set(torch.as_tensor(ends).flatten().tolist())
    forced_index = None
    if settings.get("forced_eos_token_id") is not None:
        forced_index = _most_tokens(model, options) - 2
    rows = [_cut(row, ends, forced_index) for row in output.sequences[:, 1:].tolist()]
    scores = [None] * len(rows)
    if return_scores and getattr(output, "sequences_scores", None) is not None:
        scores = output.sequences_scores.tolist()
    elif return_scores:
        end_ids = torch.tensor(sorted(ends), dtype=torch.long, device=output.sequences.device)
        steps = output.logits if settings.get("do_sample") and output.logits is not None else output.scores
        scores = totals_of_steps(steps, output.sequences, 1, end_ids).tolist()
    return [Hypothesis(ids, score, is_finished) for (ids, is_finished), score in zip(rows, scores, strict=True)]


def _most_tokens(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    """Return the most tokens of a target, with the start token. Without a limit it is the default of `generate()`."""
    _, max_length = length_limits(model, options)
    if max_length is None:
        max_length = GenerationConfig._get_default_generation_params()["max_length"] + 1
        max_length = min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
    return max_length


def _cut(row: list[int], ends: set[int], forced_index: int | None) -> tuple[list[int], bool]:
    """Return the ids up to the first end of sequence, and True if the model wrote that end itself."""
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1], index != forced_index
    return row, False
