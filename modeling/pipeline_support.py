"""Evaluation mode, for as long as something is decoded.

Batches of texts of like length, which cost little padding.

Options of generation in a pipeline: who decides each of them, and which are of all texts of a batch at once.

The tokenizers of a pipeline: that of the targets beside that of the sources, ends of sequence, and codes of languages.

Position limits: how many tokens a model with tables of positions can read and write.
"""

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .compat import CACHE_NAMES


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode; the modes that were there before are put back, those of parts too, such as a frozen encoder's."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # Modules come before their parts, which then are set right. A decoder has more to do than to note its mode.
        for module, was_training in modes:
            if module.training != was_training:
                module.train(was_training)


DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Groups indices of like length, longest first, so that a batch that does not fit fails at once.

    Args:
        lengths: Tokens of each source.
        batch_size: Most sources in a batch.
        max_tokens_per_batch: Most tokens in a batch, padding counted; a longer source has a batch of its own.

    Returns:
        Lists of indices; each index stands in exactly one.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        batch = batches[-1] if batches else None
        # Sorted from the longest on, the first of a batch says how wide it is.
        if (
            batch is not None
            and len(batch) < batch_size
            and (len(batch) + 1) * lengths[batch[0]] <= max_tokens_per_batch
        ):
            batch.append(index)
        else:
            batches.append([index])
    return batches


# What transformers 4 generated with where nobody had decided.
DEFAULT_NUM_BEAMS = 4
DEFAULT_MAX_NEW_TOKENS = 256
# These do not go with beams.
_WITHOUT_BEAMS = {"assistant_model", "prompt_lookup_num_tokens", "streamer"}
# Settings of generation by which a text's result depends on what stands beside it, or on what was drawn before it.
_OF_A_BATCH = {"do_sample", "max_time", "prompt_lookup_num_tokens"}
# These look at a source with its padding; with such a value they do nothing.
_OF_PADDING = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}


def generation_settings() -> set[str]:
    """The names of all settings that a `GenerationConfig` has."""
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def generation_arguments(
    model: PreTrainedModel, own: Mapping[str, Any], given: Mapping[str, Any], pad_token_id: int | None
) -> dict[str, Any]:
    """What `generate()` is called with.

    The call decides first, then the pipeline, the settings of the task, the model's generation config, and at last the
    defaults. A `generation_config` of the call stands in place of all but the call's other arguments.

    Args:
        model: Its generation config is read.
        own: The options of the pipeline and of its task.
        given: The options of the call.
        pad_token_id: The tokenizer's, for a model that knows none.
    """
    given = with_lengths(given)
    config = given.pop("generation_config", None)
    if config is None:
        given = with_lengths(own) | given
        config = given.pop("generation_config", None)
    if config is not None:
        # In a copy: transformers wants either a config or single settings.
        config = copy.deepcopy(config)
        rest = config.update(**given)
        prompt = given.get("decoder_input_ids")
        _fix_lengths(config, model.generation_config, 1 if prompt is None else prompt.shape[1])
        return {"generation_config": config, **rest}
    decided = {name for name, value in model.generation_config.to_diff_dict().items() if value is not None} | set(given)
    defaults: dict[str, Any] = {}
    if not decided & {"max_length", "max_new_tokens"}:
        defaults["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
    if "num_beams" not in decided and not decided & _WITHOUT_BEAMS:
        defaults["num_beams"] = max(DEFAULT_NUM_BEAMS, given.get("num_return_sequences") or 1)
    if "pad_token_id" not in decided and pad_token_id is not None:
        defaults["pad_token_id"] = pad_token_id
    return defaults | given


def with_lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    """A length that was given takes the place of the model's own of the other kind.

    Of the two kinds `generate()` prefers the new tokens, whoever has given them, and warns in every batch where it finds both.
    """
    given = dict(given)
    for kinds in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        for name, other in (kinds, kinds[::-1]):
            if given.get(name) is not None:
                given.setdefault(other, None)
    return given


def _fix_lengths(config: GenerationConfig, own: GenerationConfig, prompt_length: int) -> None:
    """Says a length of all tokens as one of new ones where the model has one of these, by which `generate()` would go."""
    for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        given = getattr(config, length)
        if given is not None and getattr(config, new_tokens) is None and getattr(own, new_tokens) is not None:
            setattr(config, new_tokens, max(0, given - prompt_length))
            setattr(config, length, None)


def length_limits(
    model: PreTrainedModel, arguments: Mapping[str, Any], prompt_length: int = 1
) -> tuple[int, int | None]:
    """Fewest and most tokens of a target, the start token counted, by the arguments of `generate()`."""
    settings = settings_of(model, arguments)
    limits = []
    for length, new_tokens in (("min_length", "min_new_tokens"), ("max_length", "max_new_tokens")):
        new = settings.get(new_tokens)
        limits.append(settings.get(length) if new is None else new + prompt_length)
    return limits[0] or 0, limits[1]


def is_of_each_text(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether these arguments of `generate()` lead to the same targets however the texts are put into batches."""
    settings = settings_of(model, arguments)
    is_known = arguments.keys() <= generation_settings() | {"generation_config"}
    return is_known and not any(settings.get(name) for name in _OF_A_BATCH) and not looks_at_padding(settings)


def looks_at_padding(settings: Mapping[str, Any]) -> bool:
    """Whether settings of generation make something of the padding behind a source, of which there is none in a batch of one."""
    return any(settings.get(name) not in (None, neutral) for name, neutral in _OF_PADDING.items())


def pad_behind_ends(
    ids: torch.Tensor, model: PreTrainedModel, arguments: Mapping[str, Any], pad_token_id: int | None
) -> torch.Tensor:
    """Targets `(rows, target)` with padding behind their ends, as in every search but that by beams.

    transformers takes a padding of id 0 for none there, and fills up with ends, as many as the batch has room for.
    """
    ends = settings_of(model, arguments).get("eos_token_id")
    if ends is None or pad_token_id is None:
        return ids
    is_end = torch.isin(ids, torch.as_tensor(ends, device=ids.device))
    # What the decoder starts with may be one, too, and what was given.
    prompt = arguments.get("decoder_input_ids")
    is_end[:, : 1 if prompt is None else prompt.shape[1]] = False
    return ids.masked_fill(is_end.cumsum(dim=1) > is_end.long(), pad_token_id)


def settings_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate()` goes by: its arguments, a generation config among them, and the model's own."""
    config = arguments.get("generation_config")
    return model.generation_config.to_dict() | ({} if config is None else config.to_diff_dict()) | dict(arguments)


# Where a model with two vocabularies keeps the tokenizer of its targets, and the mark of that in the one of its sources.
TARGET_SUBFOLDER = "target_tokenizer"


def find_target_tokenizer(
    source: PreTrainedTokenizerBase, given: PreTrainedTokenizerBase | str | os.PathLike | None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the targets: what was given, what was saved with that of the sources, or this itself.

    Raises:
        ValueError: If a separate tokenizer belongs to it, but is not there.
    """
    if given is not None:
        return AutoTokenizer.from_pretrained(given) if isinstance(given, str | os.PathLike) else given
    place = source.name_or_path
    # On the Hub there is no folder to look into: the mark tells that there is another tokenizer.
    is_apart = TARGET_SUBFOLDER in source.init_kwargs
    if not is_apart and not (place and os.path.isdir(os.path.join(place, TARGET_SUBFOLDER))):
        return source
    try:
        return AutoTokenizer.from_pretrained(place, subfolder=TARGET_SUBFOLDER)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`target_tokenizer` must be given where the tokenizer of the targets is not in `{TARGET_SUBFOLDER}/` beside that of "
            f"the sources, got None, and there is none in {place!r}."
        ) from error


def save_tokenizers(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, folder: str | os.PathLike, **kwargs: Any
) -> None:
    """Saves the tokenizer of the sources, and below it a separate one of the targets."""
    # A copy carries the mark: the tokenizer by itself must not ask for another.
    source_copy = copy.copy(source)
    source_copy.init_kwargs = {name: value for name, value in source.init_kwargs.items() if name != TARGET_SUBFOLDER}
    if target is not source:
        source_copy.init_kwargs[TARGET_SUBFOLDER] = TARGET_SUBFOLDER
        target.save_pretrained(os.path.join(folder, TARGET_SUBFOLDER))
    source_copy.save_pretrained(folder, **kwargs)


def lacks_end_of_sequence(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer leaves out the end of sequence, which Metaphrase then puts behind every source itself."""
    is_ours = model.config.model_type == "metaphrase" and tokenizer.eos_token_id is not None
    return is_ours and tokenizer.eos_token_id not in tokenizer("a")["input_ids"]


def has_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer marks sources with their language and knows the code of the one to write."""
    return hasattr(tokenizer, "_build_translation_inputs")


def language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    """The id of the token that marks a language.

    Args:
        tokenizer: Of many languages.
        field: How the user calls the code.
        code: Of the language, as the tokenizer's class has it.

    Raises:
        ValueError: If the code is missing or unknown, for which the tokenizer would write its unknown token.
    """
    name = type(tokenizer).__name__
    if code is None:
        raise ValueError(f"`{field}` must be given for a {name}, which has many languages, got None.")
    marked = getattr(tokenizer, "lang_code_to_token", None)
    if marked is not None:
        # M2M100's, which fails for all but these.
        token = marked.get(code)
    else:
        # A piece of a word may look like a code: it must be one of the tokens that stand outside texts.
        known = {
            *tokenizer.all_special_tokens,
            *tokenizer.get_added_vocab(),
            *getattr(tokenizer, "lang_code_to_id", {}),
        }
        # Some write their codes with underscores around them.
        token = next((each for each in (code, f"__{code}__") if each in known), None)
    index = None if token is None else tokenizer.convert_tokens_to_ids(token)
    if index is None or index == tokenizer.unk_token_id:
        raise ValueError(f"`{field}` must be a language that the {name} knows, got {code!r}.")
    return index


_PLAIN_TABLES = {"position_embeddings", "wpe"}


def longest_source(model: Any) -> int | None:
    """Most tokens of a source, the end of sequence counted; `None` where the model itself sets no limit, or is an engine."""
    return _rows(model.get_encoder() if hasattr(model, "get_encoder") else None)


def longest_target(model: Any) -> int | None:
    """Likewise, of what the decoder reads: the start token and the target but for its last token."""
    return _rows(model.get_decoder() if hasattr(model, "get_decoder") else None)


def check_length(model: Any, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """Checks a text that a pipeline has encoded.

    Raises:
        ValueError: If the model cannot read so many tokens.
    """
    limit = longest_source(model)
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"A text must not have more tokens than the model has positions, {limit}, got {num_tokens}: `truncation=True` cuts "
            f"it at the tokenizer's `model_max_length`, which is {tokenizer.model_max_length}."
        )


@contextlib.contextmanager
def checking_targets(model: Any) -> Iterator[None]:
    """Refuses a target that grows past the table of a family that does not look: Metaphrase models do so themselves.

    Raises:
        ValueError: If the decoder would read more tokens than it has positions.
    """
    limit = None if model.config.model_type == "metaphrase" else longest_target(model)
    if limit is None:
        yield
        return

    def check(decoder: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        ids = named.get("input_ids")
        past = next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
        length = 0 if ids is None else ids.shape[1] + (0 if past is None else int(past.get_seq_length()))
        if length > limit:
            raise ValueError(
                f"`max_new_tokens` must not let a target have more tokens than the decoder has positions, {limit}, "
                f"got a target of {length} that goes on."
            )

    handle = model.get_decoder().register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _rows(stack: nn.Module | None) -> int | None:
    table = getattr(stack, "embed_positions", None)
    if table is None and stack is not None:
        # As BERT and GPT-2 have it, which may be joined to an encoder-decoder.
        named = ((name.rpartition(".")[2], module) for name, module in stack.named_modules())
        table = next((m for name, m in named if name in _PLAIN_TABLES and type(m) is nn.Embedding), None)
    # FSMT's table grows when it must.
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):
        return None
    # RoBERTa's positions begin behind that of padding.
    first = 0 if type(table) is not nn.Embedding or table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - getattr(table, "offset", first)
