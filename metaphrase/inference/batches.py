"""Generate target ids from source ids, in batches of similar length. Hypotheses have the order of the sources."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from metaphrase.data.collators import PairCollator
from metaphrase.errors import MetaphraseError
from metaphrase.inference.progress import progress_bar
from metaphrase.modeling.pipelines import override_lengths
from metaphrase.plugins import needed_plugin, plugin
from metaphrase.storage.generation_options import (
    GENERATION_OPTIONS,
    check_options,
    length_limits,
    resolve_settings,
    use_floats,
)
from metaphrase.tokenization.texts import batches_by_length

DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192
# Most tokens of a source for a model without a limit, such as T5, unless a batch may have more. The memory for attention grows
# with the square of this number.
MAX_TOKENS_WITHOUT_POSITIONS = 8192
# Settings of a model for sources that are longer than those of training: tokens of a source up to which `max_length` holds, and
# the most that it grows to.
LONGER_SOURCES = ("usual_source_length", "max_length_limit")
# With these options `generate()` takes one source: they draft tokens, or count the padding of a source. The value is neutral.
_OPTIONS_OF_ONE_SOURCE = {
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"), None),
    "use_mtp": False,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
}


@dataclass(frozen=True)
class Hypothesis:
    """One generated target.

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


@dataclass(frozen=True, eq=False)
class Partner:
    """Another model that takes part in a search, and the ids of each source for this model, with their end."""

    model: PreTrainedModel
    sources: Sequence[Sequence[int]]


# Takes the number of sources of a batch that is done.
OnBatch = Callable[[int], object] | None
# Takes the sources of a batch once for each model (token ids). Returns the hypotheses of each source.
GenerateBatch = Callable[..., list[list[Hypothesis]]]


class Engine(Protocol):
    """Library in place of a transformers model, such as `CTranslate2Engine`. It is no `torch.nn.Module`.

    Attributes:
        generation_config: Defaults for options that a call leaves out.
    """

    generation_config: GenerationConfig

    def make_generate(self, options: Mapping[str, Any], return_scores: bool) -> GenerateBatch:
        """Return the function for the batches of one call. `MetaphraseError` for an option that the engine does not support."""


class TooLongError(MetaphraseError):
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


def _num_positions(model: Any, method: str, name: str) -> int | None:
    if not hasattr(model, method):
        return None
    # FSMT's stacks have no configuration of their own.
    config = getattr(getattr(model, method)(), "config", model.config)
    return getattr(config, name if config.model_type == "metaphrase" else "max_position_embeddings", None)


# Return the most tokens of a source, with the end of sequence, or of the decoder's input, with the start token. None is no limit.
longest_source = functools.partial(_num_positions, method="get_encoder", name="position_limit")
longest_target = functools.partial(_num_positions, method="get_decoder", name="decoder_position_limit")


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Set models to evaluation mode, and restore their mode afterwards."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of `generate()` by name, those of a `generation_config` among them, checked.

    Options of the call override those of the `generation_config`. A length replaces the same length in tokens of another kind
    (`max_length`, `max_new_tokens`). `num_return_sequences=None` becomes 1, and integers become floats where floats are needed.
    Options that are read already stay as they are.
    """
    options = override_lengths(options)
    config = options.pop("generation_config", None)
    if config is not None:
        settings = {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}
        for name in ("transformers_version", *LONGER_SOURCES):
            settings.pop(name, None)
        # A config may hold both lengths. As in `generate()`, new tokens override.
        for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if new_tokens in settings:
                settings.pop(length, None)
        options = override_lengths(settings) | options
    if options.get("num_return_sequences", 1) is None:
        options["num_return_sequences"] = 1
    use_floats(options)
    for name in ("decoder_input_ids", "prefix_allowed_tokens_fn"):
        if options.get(name) is not None:
            raise MetaphraseError(f"`{name}` has rows of a batch, which are no texts. Call `model.generate()` with it.")
    check_options(options)
    return options


def target_limits(model: Any, options: Mapping[str, Any], source_lengths: Iterable[int]) -> list[int | None]:
    """Return the `max_length` for each source; None for that of the options and the model.

    Sources of more tokens than the `usual_source_length` of a model have a limit that grows with them, as by `max_len_a` of
    fairseq. It is doubled, so that few limits divide the batches, and depends on no other source. A length among the options
    holds for all.
    """
    settings = resolve_settings(model, options)
    usual, most, length = map(settings.get, (*LONGER_SOURCES, "max_length"))
    if not (usual and length) or settings.get("max_new_tokens") or options.get("max_length"):
        return [None for _ in source_lengths]
    doubled = (length * 2 ** max(0, math.ceil(math.log2(max(1, tokens) / usual))) for tokens in source_lengths)
    return [limit if limit > length else None for limit in (min(limit, most or limit) for limit in doubled)]


def decode(
    model: PreTrainedModel | Engine,
    sources: Sequence[Sequence[int]],
    *,
    options: Mapping[str, Any] | None = None,
    return_scores: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    show_progress: bool | None = False,
    on_batch: OnBatch = None,
    partners: Sequence[Partner] = (),
    search: Callable | None = None,
    vocabulary_map: Any = None,
    **generation_kwargs,
) -> list[list[Hypothesis]]:
    """Run `model.generate()`, or an engine, over all sources.

    `force_words_ids` are phrases that each target contains. A length option overrides any length of the generation config.

    Args:
        model: Any encoder-decoder with a generation mixin, or an engine. It keeps its mode, training or evaluation.
        sources: Token ids of each source, with end of sequence.
        options: Arguments of `generate()` that a `Plan` has read, in place of `generation_kwargs`.
        batch_size: Most sources in a batch. It is 1 if tokens are drafted, or if an option looks at padded sources
            (`encoder_repetition_penalty`, `encoder_no_repeat_ngram_size`).
        partners: Other models that take part, each with its own ids of the sources.
        search: The search of all models: an `EnsembleSearch` or a `SpeculativeSearch`.
        vocabulary_map: Permits the tokens of a batch, for the fast loops. Other searches and engines do not read the map.

    Returns:
        For each source, in order, its `num_return_sequences` hypotheses. Beam search ranks them, best first.
    """
    if options is None:
        options = read_options(generation_kwargs)
        if options.get("force_words_ids") is not None:
            options = needed_plugin("phrases", "force_words_ids")(model, options)
    results: list[list[Hypothesis] | None] = [None] * len(sources)
    sources_of_models = [sources, *(partner.sources for partner in partners)]
    lengths = [max(map(len, ids)) for ids in zip(*sources_of_models, strict=True)]
    with contextlib.ExitStack() as context:
        if isinstance(model, nn.Module):
            models = [model, *(partner.model for partner in partners)]
            settings = resolve_settings(model, options)
            takes_one = any(settings.get(name) not in (None, off) for name, off in _OPTIONS_OF_ONE_SOURCE.items())
            # A draft model takes one source, too.
            batch_size = 1 if takes_one else getattr(search, "batch_size", batch_size)
            make: Callable = functools.partial(_make_generate, models, search, vocabulary_map)
            context.enter_context(evaluating(models))
            context.enter_context(torch.inference_mode())
        else:
            make = model.make_generate
        bar = context.enter_context(progress_bar(len(sources), "sentence", show_progress))
        limits, batches = target_limits(model, options, map(len, sources)), []
        for batch in batches_by_length(lengths, batch_size, max_tokens_per_batch):
            batches += [(limit, [*part]) for limit, part in itertools.groupby(batch, limits.__getitem__)]
        changes = {limit: {} if limit is None else {"max_length": limit} for limit in (None, *limits)}
        functions = {limit: make({**options, **change}, return_scores) for limit, change in changes.items()}
        for limit, batch in batches:
            rows = functions[limit](*([ids[index] for index in batch] for ids in sources_of_models))
            for index, hypotheses in zip(batch, rows, strict=True):
                results[index] = hypotheses
            bar.update(len(batch))
            if on_batch is not None:
                on_batch(len(batch))
    return results


def _make_generate(
    models: Sequence[PreTrainedModel],
    search: Callable | None,
    vocabulary_map: Any,
    options: Mapping[str, Any],
    return_scores: bool,
) -> GenerateBatch:
    model, settings = models[0], resolve_settings(models[0], options)
    # With sharded weights, `generate()` would otherwise wait for the batches of other processes.
    options = {"synced_gpus": False, **options}
    if options.get("min_new_tokens") is not None and model.generation_config.min_length is not None:
        # `generate()` warns if both are set.
        options |= {"min_length": 1 + options["min_new_tokens"], "min_new_tokens": None}
    ends = settings.get("eos_token_id")
    ends = set() if ends is None else set(torch.as_tensor(ends).flatten().tolist())
    forced_index = None
    if settings.get("forced_eos_token_id") is not None:
        _, longest = length_limits(model, options)
        if longest is None:
            # The default of `generate()`.
            longest = GenerationConfig._get_default_generation_params()["max_length"] + 1
            longest = min(longest, getattr(model.config, "max_position_embeddings", None) or longest)
        forced_index = longest - 2
    loop = search
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)
    names = {name for name, value in options.items() if value is not None}
    # The fast loops know the options of the command line alone.
    is_plain = names <= {*GENERATION_OPTIONS, "bad_words_ids", "eos_token_id", "synced_gpus"}
    if loop is None and is_plain and model.generation_config.get_generation_mode() in modes:
        if vocabulary_map is not None:
            loop = needed_plugin("generate_loop", "vocabulary_map")
        elif return_scores:
            # transformers' loops store the scores of all tokens and steps.
            loop = plugin("generate_loop")
    if loop is not None:
        options |= {"custom_generate": loop, "return_scores": return_scores}
    else:
        options |= dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), return_scores)

    def generate_batch(*sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
        inputs, *partner_inputs = map(pad_sources, sources, models)
        additions = {}
        if search is not None:
            additions["partners"] = list(zip(models[1:], partner_inputs, strict=True))
        elif loop is not None and vocabulary_map is not None:
            additions["permitted"] = torch.from_numpy(vocabulary_map.permitted(sources[0]))
        # By transformers, or by the ring at the place `fast_decoder`.
        output = model.generate(**inputs, **options, **additions)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        rows = []
        for ids in sequences[:, 1:].tolist():
            end = next((index for index, token in enumerate(ids) if token in ends), None)
            rows.append((ids if end is None else ids[: end + 1], end not in (None, forced_index)))
        scores: list[float | None] = [None] * len(rows)
        if return_scores and getattr(output, "sequences_scores", None) is not None:
            scores = output.sequences_scores.tolist()
        elif return_scores:
            steps = output.logits if settings.get("do_sample") and output.logits is not None else output.scores
            scores = _sum_log_probs(steps, [ids for ids, _ in rows])
        hypotheses = [Hypothesis(ids, score, is_end) for (ids, is_end), score in zip(rows, scores, strict=True)]
        count = len(hypotheses) // len(sources[0])
        return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]

    return generate_batch


def pad_sources(sources: list[Sequence[int]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` `(batch, source)`, padded on the right."""
    batch = PairCollator(model.config.pad_token_id or 0)([{"input_ids": source} for source in sources])
    num_rows, ids = getattr(model.get_input_embeddings(), "num_embeddings", None), batch["input_ids"]
    # A tokenizer may have more entries than its model. On a GPU, torch's error would name no id.
    if num_rows is not None and ids.numel() and (largest := ids.max().item()) >= num_rows:
        raise MetaphraseError(f"Token ids must be rows of the model's embedding, below {num_rows}, got {largest}.")
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def _sum_log_probs(steps: Sequence[torch.Tensor] | None, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return the sum of log-probabilities of the ids of each row, from the scores (rows, V) of each step."""
    totals = torch.zeros(len(rows))
    for number, scores in enumerate(steps or ()):
        # Scores behind the end of a row, or of drafted tokens that were refused, do not count.
        open_rows = [index for index, ids in enumerate(rows) if number < len(ids)]
        tokens = torch.tensor([[rows[index][number]] for index in open_rows], device=scores.device, dtype=torch.long)
        totals[open_rows] += scores[open_rows].float().log_softmax(dim=-1).take_along_dim(tokens, dim=1)[:, 0].cpu()
    return totals.tolist()
