"""Helpers of the pipelines and of `metaphrase.inference`: tasks, batches, options of generation, tokenizers and lengths."""

import contextlib
import copy
import math
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .compat import CACHE_NAMES

DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192

# Defaults of transformers 4's pipelines.
DEFAULT_NUM_BEAMS = 4
DEFAULT_MAX_NEW_TOKENS = 256
_OPTIONS_WITHOUT_BEAMS = {"assistant_model", "prompt_lookup_num_tokens", "streamer"}
# With these options the target of a text depends on the other texts of its batch, or on earlier random numbers.
_OPTIONS_OF_BATCHES = {"do_sample", "max_time", "prompt_lookup_num_tokens"}
# These options count the padding of a source, except with these values.
_OPTIONS_OF_PADDING = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}

# The folder of a separate target tokenizer, beside the source tokenizer, and its mark in the source tokenizer.
TARGET_SUBFOLDER = "target_tokenizer"
_POSITION_TABLES = {"position_embeddings", "wpe"}
# Classes of pipelines.py.
PIPELINE_CLASSES = {
    "translation": "TranslationPipeline",
    "summarization": "SummarizationPipeline",
    "text2text-generation": "Text2TextGenerationPipeline",
}
_TRANSLATION = re.compile(r"translation_(.+?)_to_(.+)")


def languages_of(task: str) -> tuple[str, str] | None:
    """Return source and target language of a task such as translation_en_to_de, or None for other tasks."""
    match = _TRANSLATION.fullmatch(task)
    return (match[1], match[2]) if match else None


def general_task(task: str) -> str:
    """Return the task without its languages, such as translation for translation_en_to_de."""
    return task if languages_of(task) is None else "translation"


class CustomPipelines(dict):
    """`custom_pipelines` of a configuration: the code of each task, for `pipeline()`.

    The dictionary contains translation_xx_to_yy, too. It does not contain tasks in `registered`, so that `pipeline()` takes the
    registered class and needs no `trust_remote_code`.

    Attributes:
        registered: Tasks that `import metaphrase.inference` registers.
    """

    registered: ClassVar[set[str]] = set()

    @classmethod
    def with_all_tasks(cls, entries: Mapping[str, Any] | None = None) -> "CustomPipelines":
        """Return the entries of all tasks, with the entries of a folder added or put in their place."""
        return cls({task: _entry(task) for task in PIPELINE_CLASSES} | dict(entries or {}))

    def __contains__(self, task: object) -> bool:
        name = general_task(task) if isinstance(task, str) else task
        return super().__contains__(name) and not (
            name in self.registered and self[name]["impl"] == _entry(name)["impl"]
        )

    def __getitem__(self, task: str) -> dict[str, Any]:
        # transformers writes classes into the entry, which cannot be saved.
        return copy.deepcopy(super().__getitem__(general_task(task)))


def _entry(task: str) -> dict[str, Any]:
    return {"impl": f"pipelines.{PIPELINE_CLASSES[task]}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}


def task_settings(config: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of each task in a configuration such as T5's: its `prefix` and options of generation."""
    return {
        task: dict(settings or {}) for task, settings in (getattr(config, "task_specific_params", None) or {}).items()
    }


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


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Group sources of similar length, longest first, so that a batch that does not fit into memory fails at once.

    Args:
        lengths: Tokens of each source.
        batch_size: Most sources in a batch.
        max_tokens_per_batch: Most tokens in a batch, padding counted. A longer source has a separate batch.

    Returns:
        The indices of the sources of each batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # A source alone counts as a pair with an empty target.
    return cut_into_batches(longest_first, [(lengths[i], 0) for i in longest_first], max_tokens_per_batch, batch_size)


def cut_into_batches(
    order: Sequence[int],
    lengths: Sequence[Sequence[int]],
    max_tokens_per_batch: int,
    batch_size: float = math.inf,
) -> list[list[int]]:
    """Cut an order of pairs into consecutive batches, each as large as the bounds allow.

    Args:
        order: Indices of pairs.
        lengths: Tokens of source and target of each of them.
        max_tokens_per_batch: Most tokens of both sides of a batch, padding counted. A longer pair has a separate batch.
        batch_size: Most pairs in a batch.
    """
    batches: list[list[int]] = []
    longest_source = longest_target = 0
    for index, (source, target) in zip(order, lengths, strict=True):
        longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        width = longest_source + longest_target
        if batches and len(batches[-1]) < batch_size and (len(batches[-1]) + 1) * width <= max_tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest_source, longest_target = source, target
    return batches


def generation_settings() -> set[str]:
    """Return the names of all settings of a `GenerationConfig`."""
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def generation_arguments(
    model: PreTrainedModel, defaults: Mapping[str, Any], options: Mapping[str, Any], pad_token_id: int | None
) -> dict[str, Any]:
    """Return the arguments of `generate()` in a pipeline.

    An option of the call comes first, then an option of the pipeline, a setting of the task, the model's generation config, and a
    default. A `generation_config` of the call replaces all of these except the other options of the call.

    Args:
        model: The model with a generation config.
        defaults: Options of the pipeline and settings of the task.
        options: Options of the call.
        pad_token_id: Id of the padding token, for a model without.
    """
    options = override_lengths(options)
    if options.get("generation_config") is None:
        options.pop("generation_config", None)
        options = override_lengths(defaults) | options
    use_floats(options)
    config = options.pop("generation_config", None)
    if config is not None:
        # transformers takes a config or single settings, not both.
        config = copy.deepcopy(config)
        rest = config.update(**options)
        prompt = options.get("decoder_input_ids")
        _match_lengths(config, model.generation_config, 1 if prompt is None else prompt.shape[1])
        return {"generation_config": config, **rest}
    model_settings = model.generation_config.to_diff_dict()
    names = {name for name, value in model_settings.items() if value is not None} | set(options)
    missing: dict[str, Any] = {}
    if not names & {"max_length", "max_new_tokens"}:
        missing["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
    if "num_beams" not in names and not names & _OPTIONS_WITHOUT_BEAMS:
        missing["num_beams"] = max(DEFAULT_NUM_BEAMS, options.get("num_return_sequences") or 1)
    if "pad_token_id" not in names and pad_token_id is not None:
        missing["pad_token_id"] = pad_token_id
    return missing | options


def override_lengths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Set the new tokens to None if only the length is given, and the other way round, to override the model's settings.

    Without this, `generate()` prefers new tokens in any setting, and warns in each batch.
    """
    options = dict(options)
    for names in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        for name, counterpart in (names, names[::-1]):
            if options.get(name) is not None:
                options.setdefault(counterpart, None)
    return options


def use_floats(settings: MutableMapping[str, Any]) -> None:
    """Turn integers into floats where transformers refuses integers, such as a temperature of 2."""
    for name in ("temperature", "repetition_penalty", "encoder_repetition_penalty"):
        if type(settings.get(name)) is int:
            settings[name] = float(settings[name])


def _match_lengths(config: GenerationConfig, model_config: GenerationConfig, prompt_length: int) -> None:
    """Turn a length into new tokens if the model's settings have new tokens, which `generate()` would prefer."""
    for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value = getattr(config, length)
        if value is not None and getattr(config, new_tokens) is None and getattr(model_config, new_tokens) is not None:
            setattr(config, new_tokens, max(0, value - prompt_length))
            setattr(config, length, None)


def length_limits(
    model: PreTrainedModel, arguments: Mapping[str, Any], prompt_length: int = 1
) -> tuple[int, int | None]:
    """Return the least and most tokens of a target, with the prompt, by the arguments of `generate()`."""
    settings = resolve_settings(model, arguments)
    limits = []
    for length, new_tokens in (("min_length", "min_new_tokens"), ("max_length", "max_new_tokens")):
        new = settings.get(new_tokens)
        limits.append(settings.get(length) if new is None else new + prompt_length)
    return limits[0] or 0, limits[1]


def is_independent_of_batch(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Return True if the targets do not depend on the batches, by the arguments of `generate()`."""
    settings = resolve_settings(model, arguments)
    is_known = arguments.keys() <= generation_settings() | {"generation_config"}
    return is_known and not any(settings.get(name) for name in _OPTIONS_OF_BATCHES) and not depends_on_padding(settings)


def depends_on_padding(settings: Mapping[str, Any]) -> bool:
    """Return True if settings of generation count the padding of a source."""
    return any(settings.get(name) not in (None, neutral) for name, neutral in _OPTIONS_OF_PADDING.items())


def pad_after_end(
    ids: torch.Tensor, model: PreTrainedModel, arguments: Mapping[str, Any], pad_token_id: int | None
) -> torch.Tensor:
    """Replace all ids after the end of sequence by padding, `(rows, target)`.

    With a padding id of 0, transformers' beam search fills with ends of sequence instead.
    """
    ends = resolve_settings(model, arguments).get("eos_token_id")
    if ends is None or pad_token_id is None:
        return ids
    is_end = torch.isin(ids, torch.as_tensor(ends, device=ids.device))
    # The prompt may contain an end, such as the start token.
    prompt = arguments.get("decoder_input_ids")
    is_end[:, : 1 if prompt is None else prompt.shape[1]] = False
    return ids.masked_fill(is_end.cumsum(dim=1) > is_end.long(), pad_token_id)


def resolve_settings(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `generate()`: the arguments, then their generation config, then the model's."""
    config = arguments.get("generation_config")
    return model.generation_config.to_dict() | ({} if config is None else config.to_diff_dict()) | dict(arguments)


def find_target_tokenizer(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase | str | os.PathLike | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the targets: `target`, the tokenizer saved beside `source`, or `source`.

    Raises:
        ValueError: If the separate target tokenizer is missing.
    """
    if target is not None:
        return AutoTokenizer.from_pretrained(target) if isinstance(target, str | os.PathLike) else target
    folder = source.name_or_path
    # A name on the Hub has no folder, but the source tokenizer has the mark.
    is_marked = TARGET_SUBFOLDER in source.init_kwargs
    if not is_marked and not (folder and os.path.isdir(os.path.join(folder, TARGET_SUBFOLDER))):
        return source
    try:
        return AutoTokenizer.from_pretrained(folder, subfolder=TARGET_SUBFOLDER)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`target_tokenizer` must be given if the tokenizer of the targets is not in `{TARGET_SUBFOLDER}/` beside that of "
            f"the sources, got None, and {folder!r} has none."
        ) from error


def save_tokenizers(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, folder: str | os.PathLike, **kwargs: Any
) -> None:
    """Save the source tokenizer, and a separate target tokenizer in a subfolder."""
    # Only the saved copy has the mark, since the tokenizer may be saved again without the target tokenizer.
    source_copy = copy.copy(source)
    source_copy.init_kwargs = {name: value for name, value in source.init_kwargs.items() if name != TARGET_SUBFOLDER}
    if target is not source:
        source_copy.init_kwargs[TARGET_SUBFOLDER] = TARGET_SUBFOLDER
        target.save_pretrained(os.path.join(folder, TARGET_SUBFOLDER))
    source_copy.save_pretrained(folder, **kwargs)


def has_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer marks sources with their language."""
    return hasattr(tokenizer, "_build_translation_inputs")


def language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    """Return the id of the token of a language.

    Args:
        tokenizer: A multilingual tokenizer.
        field: Name of the code in error messages.
        code: Code of the language in the tokenizer's class.

    Raises:
        ValueError: If the code is None or unknown.
    """
    name = type(tokenizer).__name__
    if code is None:
        raise ValueError(f"`{field}` must be given for a {name}, which has many languages, got None.")
    m2m_tokens = getattr(tokenizer, "lang_code_to_token", None)
    if m2m_tokens is not None:
        token = m2m_tokens.get(code)
    else:
        # Only special tokens count: a part of a word may look like a code.
        tokens = {
            *tokenizer.all_special_tokens,
            *tokenizer.get_added_vocab(),
            *getattr(tokenizer, "lang_code_to_id", {}),
        }
        token = next((spelling for spelling in (code, f"__{code}__") if spelling in tokens), None)
    index = None if token is None else tokenizer.convert_tokens_to_ids(token)
    if index is None or index == tokenizer.unk_token_id:
        raise ValueError(f"`{field}` must be a language that the {name} knows, got {code!r}.")
    return index


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a source or target of a Metaphrase model, or None if the model has no limit."""
    return None if config.position_embedding_type == "relative" else config.max_position_embeddings


def longest_source(model: Any) -> int | None:
    """Return the most tokens of a source, with the end of sequence, or None if the model has no limit."""
    return _num_positions(model, model.get_encoder()) if hasattr(model, "get_encoder") else None


def longest_target(model: Any) -> int | None:
    """Return the most tokens of the decoder's input, with the start token, or None if the model has no limit."""
    return _num_positions(model, model.get_decoder()) if hasattr(model, "get_decoder") else None


@contextlib.contextmanager
def checking_targets(model: Any) -> Iterator[None]:
    """Check the length of targets at each decoding step, for model families other than Metaphrase, which do not check.

    Raises:
        ValueError: If the decoder reads more tokens than it has positions.
    """
    limit = None if model.config.model_type == "metaphrase" else longest_target(model)
    if limit is None:
        yield
        return

    def check(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        length = 0 if ids is None else ids.shape[1] + (0 if cache is None else int(cache.get_seq_length()))
        if length > limit:
            raise ValueError(
                f"`max_new_tokens` must not let a target have more tokens than the decoder has positions, {limit}, "
                f"got a target of {length} tokens without an end."
            )

    handle = model.get_decoder().register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _num_positions(model: Any, stack: nn.Module) -> int | None:
    if model.config.model_type == "metaphrase":
        return position_limit(model.config)
    table = getattr(stack, "embed_positions", None)
    if table is None:
        # BERT and GPT-2 may be parts of an encoder-decoder.
        modules = ((name.rpartition(".")[2], module) for name, module in stack.named_modules())
        table = next((m for name, m in modules if name in _POSITION_TABLES and type(m) is nn.Embedding), None)
    # FSMT's table, with `make_weight`, grows.
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):
        return None
    # RoBERTa's positions begin after the padding index.
    first = 0 if type(table) is not nn.Embedding or table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - getattr(table, "offset", first)
