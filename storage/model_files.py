"""Checks of the settings in a model folder before a library reads them: fields have types and ranges, sizes fit the weights."""

import contextlib
import copy
import itertools
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.modeling.configuration_metaphrase import MAX_SIZE
from metaphrase.storage.folders import read_fields
from metaphrase.storage.weight_files import WeightFiles, weight_names

_TOKENIZER_FOLDERS = ("", "target_tokenizer")
# Tables of positions, which a checkpoint need not hold.
_MAX_LACKING_ENTRIES = 2**28


class Rule(NamedTuple):
    """Values that a field may have. None is allowed too."""

    text: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any, low: int = -MAX_SIZE, high: int = MAX_SIZE) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int = MAX_SIZE) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: _is_whole(value, low, high))


def _number(text: str = "", holds: Callable[[float], bool] = lambda value: True) -> Rule:
    def is_number(value: Any) -> bool:
        # A float, because the largest integers have no square root, product or tensor.
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(value) < 1e38 and holds(value)

    return Rule(f"a finite number{text}", is_number)


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _fields_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


def _is_dtype(value: Any) -> bool:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _is_decay(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and _is_whole(value[0], 0) and _number().holds(value[1]) and value[1] > 0


_FLAG = Rule("true or false", lambda value: isinstance(value, bool))
_TEXT = Rule("a text", lambda value: isinstance(value, str))
_FIELDS = Rule("fields with values", lambda value: isinstance(value, dict))
_NAMES = Rule("a list of names", _list_of(_TEXT.holds))
_ID_LIST = Rule("a list of token ids", _list_of(_is_whole))
_IDS = Rule("a token id or a list of token ids", lambda x: _is_whole(x) or (x != [] and _ID_LIST.holds(x)))
_ENTRY = Rule("a token", lambda value: isinstance(value, dict) and isinstance(value.get("content"), str))
_TOKEN = Rule("a token", lambda value: _TEXT.holds(value) or _ENTRY.holds(value))
_LAYERS = "encoder_layers decoder_layers num_layers num_decoder_layers num_hidden_layers"
# Each is a dimension of a weight, or divides one.
_SIZES = "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size hidden_size d_model d_kv d_ff head_dim num_heads"
_SIZES += " encoder_ffn_dim decoder_ffn_dim encoder_attention_heads decoder_attention_heads num_attention_heads"
_SIZES += " num_key_value_heads"
_INDEXING_IDS = "decoder_start_token_id forced_bos_token_id forced_eos_token_id"


def _table(*groups: tuple[Rule, str]) -> dict[str, Rule]:
    """Return a rule for each of the names, which spaces separate."""
    return {name: rule for rule, names in groups for name in names.split()}


_GENERATION_RULES = _table(
    # A larger length or beam would fill the memory.
    (_whole(0, 2**20), "max_length max_new_tokens min_length min_new_tokens"),
    (_whole(1, 10_000), "num_beams num_return_sequences"),
    (_whole(0), "top_k no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    # Beyond these bounds, scores of float32 overflow or become equal.
    (_number(" from 1e-9 to 1e9", lambda x: 1e-9 <= x <= 1e9), "temperature"),
    (_number(" from 0.001 to 1000", lambda x: 1e-3 <= x <= 1e3), "repetition_penalty encoder_repetition_penalty"),
    (_number(" from -10 to 10", lambda x: -10 <= x <= 10), "length_penalty"),
    (_number(" above 0 and at most 1", lambda x: 0 < x <= 1), "top_p typical_p"),
    (_number(" of at least 0 and below 1", lambda x: 0 <= x < 1), "epsilon_cutoff eta_cutoff"),
    (_number(" from 0 to 1", lambda x: 0 <= x <= 1), "min_p top_h"),
    (_number(), "guidance_scale max_time"),
    (_FLAG, "do_sample use_cache renormalize_logits remove_invalid_values is_encoder_decoder return_dict_in_generate"),
    (_FLAG, "output_scores output_logits output_attentions output_hidden_states"),
    (Rule("true, false or never", lambda value: isinstance(value, bool) or value == "never"), "early_stopping"),
    (Rule("a token id", _is_whole), "pad_token_id bos_token_id"),
    (_IDS, f"eos_token_id {_INDEXING_IDS}"),
    (_ID_LIST, "suppress_tokens begin_suppress_tokens"),
    (Rule("a list of lists of token ids", _list_of(_ID_LIST.holds)), "bad_words_ids"),
    (Rule("a length and a factor above 0", _is_decay), "exponential_decay_length_penalty"),
    (Rule("a text or a list of texts", lambda value: _TEXT.holds(value) or _NAMES.holds(value)), "stop_strings"),
    (_TEXT, "cache_implementation"),
)
_RULES: dict[str, dict[str, Rule]] = {
    CONFIG_NAME: _GENERATION_RULES
    | _table(
        (_TEXT, "model_type tokenizer_class prefix attn_implementation _attn_implementation"),
        (_FIELDS, "auto_map custom_pipelines quantization_config rope_parameters rope_scaling id2label label2id"),
        (_NAMES, "architectures"),
        (Rule("a floating-point type of torch, such as float32", _is_dtype), "dtype torch_dtype"),
        (_whole(1), f"{_LAYERS} {_SIZES} max_position_embeddings n_positions relative_attention_num_buckets"),
        (Rule("fields for each task", _fields_of(_FIELDS.holds)), "task_specific_params"),
    ),
    GENERATION_CONFIG_NAME: _GENERATION_RULES,
    "tokenizer_config.json": _table(
        (_TOKEN, "bos_token eos_token unk_token pad_token sep_token cls_token mask_token"),
        (_TEXT, "tokenizer_class src_lang tgt_lang source_lang target_lang target_tokenizer"),
        (_FLAG, "split_special_tokens clean_up_tokenization_spaces add_prefix_space"),
        (Rule("left or right", lambda value: value in ("left", "right")), "padding_side truncation_side"),
        # transformers writes 1e30 for no limit.
        (_number(" above 0", lambda x: x > 0), "model_max_length"),
        (_NAMES, "model_input_names"),
        (Rule("tokens by id", _fields_of(_TOKEN.holds)), "added_tokens_decoder"),
        (Rule("a list of tokens", _list_of(_TOKEN.holds)), "additional_special_tokens"),
        (Rule("tokens", lambda x: _list_of(_TOKEN.holds)(x) or _fields_of(_TOKEN.holds)(x)), "extra_special_tokens"),
    ),
    "tokenizer.json": _table(
        (_FIELDS, "model normalizer pre_tokenizer post_processor decoder truncation padding"),
        (Rule("a list of tokens", _list_of(_ENTRY.holds)), "added_tokens"),
    ),
    "special_tokens_map.json": {},
    "added_tokens.json": {},
}


def check_model_folder(folder: str | os.PathLike) -> None:
    """Check that a model can be made of its settings, and that they fit the weights. A name on the Hub is not checked.

    Args:
        folder: Folder of a model, an adapter, a tokenizer or an export. Files that it lacks are not checked.

    Raises:
        ValueError: Naming the file, the field, the rule and the value.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    check_settings(folder)
    fields = read_fields(folder / CONFIG_NAME) or {}
    config = _make_config(folder / CONFIG_NAME, fields)
    generation = read_fields(folder / GENERATION_CONFIG_NAME) or {}
    with _naming_file(folder / GENERATION_CONFIG_NAME, "generation settings"):
        GenerationConfig.from_dict(copy.deepcopy(generation))
    if config is not None:
        # A family's default may be too large for the vocabulary.
        used = {name: getattr(config, name, None) for name in ("pad_token_id", "decoder_start_token_id")}
        for name, settings in ((CONFIG_NAME, fields | used), (GENERATION_CONFIG_NAME, generation)):
            _check_ids(folder / name, settings, config)
        _check_sizes(folder, fields, config)


def check_settings(folder: Path) -> None:
    """Check the types and ranges in the settings of a model and its tokenizers.

    Raises:
        ValueError: Naming the file, the field, the rule and the value.
    """
    for name, rules in _RULES.items():
        for part in _TOKENIZER_FOLDERS if "token" in name else ("",):
            check_fields(folder / part / name, rules)


def check_options(options: Mapping[str, Any], shown_name: str | None = None) -> None:
    """Check the numbers among the options of `generate()`, which may silently ignore them or fail late.

    Args:
        options: Options by name. Those that take no number are not checked.
        shown_name: Name in the error, if the option has another one for the caller.

    Raises:
        ValueError: Naming the option, the rule and the value.
    """
    for name, value in options.items():
        rule = _GENERATION_RULES.get(name)
        if isinstance(value, numbers.Real) and rule is not None and not rule.holds(value):
            raise ValueError(f"`{shown_name or name}` must be {rule.text}, got {value}.")


def check_fields(path: Path, rules: Mapping[str, Rule]) -> None:
    """Check the fields of a file, if it exists.

    Raises:
        ValueError: If it cannot be read, or a field breaks its rule.
    """
    _check_values(read_fields(path) or {}, rules, repr(str(path)))


def check_config_fields(fields: Mapping[str, Any], field_name: str) -> None:
    """Check fields of a configuration that is made of another file, such as a recipe.

    Args:
        fields: The fields by name.
        field_name: Field of the other file that holds them.

    Raises:
        ValueError: If a field breaks its rule.
    """
    _check_values(fields, _RULES[CONFIG_NAME], f"`{field_name}`")


def _check_values(fields: Mapping[str, Any], rules: Mapping[str, Rule], owner: str) -> None:
    for name, value in fields.items():
        if value is not None and name in rules and not rules[name].holds(value):
            _refuse(owner, name, rules[name].text, value)


def _refuse(owner: str, name: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"`{name}` in {owner} must be {rule}, got {reprlib.repr(value)}.")


@contextlib.contextmanager
def _naming_file(path: Path, content: str) -> Iterator[None]:
    """Name the file in each error of a class that is made from its fields."""
    try:
        yield
    except StrictDataclassFieldValidationError:
        raise
    except Exception as error:
        # These classes check little, and raise all kinds of errors for values of another type.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        raise ValueError(f"{str(path)!r} must hold usable {content}: {kind}{text}") from error


def _make_config(path: Path, fields: dict[str, Any]) -> PreTrainedConfig | None:
    """Return the configuration of a family that transformers knows; None for others, whose code may not run."""
    if (model_type := fields.get("model_type")) not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model_type]
    try:
        with _naming_file(path, f"fields of {config_class.__name__}"):
            return config_class.from_dict(copy.deepcopy(fields))
    except StrictDataclassFieldValidationError as error:
        name = str(error).split("'")[1]
        kind = config_class.__dataclass_fields__[name].type
        rule = f"of the type {getattr(kind, '__name__', kind)}"
    _refuse(repr(str(path)), name, rule, fields.get(name))


def _check_ids(path: Path, settings: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse ids that are no rows of the target embedding. With such an end of sequence, no target would end."""
    names = ("decoder_vocab_size", "tgt_vocab_size", "vocab_size")
    size = next((size for name in names if _is_whole(size := getattr(config, name, None))), MAX_SIZE)
    for name in ("pad_token_id", "eos_token_id", *_INDEXING_IDS.split()):
        ids = settings.get(name)
        if not all(0 <= index < size for index in (ids if isinstance(ids, list) else [ids] if ids is not None else [])):
            _refuse(repr(str(path)), name, f"an id of the vocabulary, from 0 to {size - 1}", ids)


def _check_sizes(folder: Path, fields: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Compare sizes with the weights, before memory is taken for them and hours for their layers."""
    if not weight_names(folder) or fields.get("quantization_config"):
        return
    with contextlib.ExitStack() as files:
        kinds = WeightFiles(folder, files).kinds
    largest = max(max(kind.shape, default=0) for kind in kinds.values()) if kinds else 0
    for names, limit, text in (
        (_LAYERS, len(kinds), "the number of weights"),
        (_SIZES, largest, "the largest dimension of a weight"),
    ):
        for name in names.split():
            if (fields.get(name) or 0) > limit:
                _refuse(repr(str(folder / CONFIG_NAME)), name, f"at most {limit}, {text}", fields[name])
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return
    with _naming_file(folder / CONFIG_NAME, "sizes"), torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    # transformers joins the experts of a layer into one tensor.
    most = max(_MAX_LACKING_ENTRIES, sum(math.prod(kind.shape) for kind in kinds.values()))
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        shape = tuple(tensor.shape)
        if name in kinds and kinds[name].shape != shape:
            refuse_shape(folder, name, kinds[name].shape, shape)
        if name not in kinds and tensor.numel() > most:
            raise ValueError(
                f"{str(folder / CONFIG_NAME)!r} must fit the weights, which have no `{name}` of shape {shape}."
            )


def refuse_shape(folder: str | os.PathLike, name: str, shape: Sequence[int], expected: Sequence[int]) -> NoReturn:
    """Raise a `ValueError` for a weight of another shape than its configuration has."""
    raise ValueError(
        f"The weight `{name}` of {os.fspath(folder)} must have the shape {tuple(expected)}, got {tuple(shape)}."
    )
