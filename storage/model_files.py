"""Checks of the settings in a model folder before weights are read: fields have types and ranges, ids are in the vocabulary."""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.storage.folders import read_fields
from metaphrase.storage.generation_options import check_options

_TOKENIZER_FILES = [
    f"{part}{name}" for part in ("", "target_tokenizer/") for name in ("tokenizer_config.json", "tokenizer.json")
]
_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


def check_model_folder(folder: str | os.PathLike) -> None:
    """Check that a configuration can be made of a model's settings. A name on the Hub is not checked.

    Args:
        folder: Folder of a model, an adapter, a tokenizer or an export. Files that it lacks are not checked.

    Raises:
        ValueError: Naming the file, the field and the value.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    path, generation_path = folder / CONFIG_NAME, folder / GENERATION_CONFIG_NAME
    fields, generation = read_fields(path) or {}, read_fields(generation_path) or {}
    for file, settings in ((path, fields), (generation_path, generation)):
        check_options(settings, f" in {str(file)!r}")
    for name in _TOKENIZER_FILES:
        # transformers names no file in its error.
        read_fields(folder / name)
    config = None
    try:
        file = path
        # The code of other families may not run.
        if fields.get("model_type") in CONFIG_MAPPING:
            config = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
        file = generation_path
        GenerationConfig.from_dict(copy.deepcopy(generation))
    except Exception as error:
        # These classes raise all kinds of errors for values of another type, some with several lines.
        text = " ".join(str(error).split())
        raise ValueError(f"{str(file)!r} must hold usable fields: {type(error).__name__}: {text}") from error
    if config is not None:
        _check_ids(path, {name: getattr(config, name, None) for name in _IDS}, config)
        _check_ids(generation_path, generation, config)


def _check_ids(path: Path, settings: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse ids that are no rows of the target embedding. With such an end of sequence, no target would end."""
    names = ("decoder_vocab_size", "tgt_vocab_size", "vocab_size")
    size = next((size for name in names if (size := getattr(config, name, None)) is not None), 2**31)
    for name in _IDS:
        ids = settings.get(name)
        for index in ids if isinstance(ids, list) else [ids] if ids is not None else []:
            if not isinstance(index, int) or not 0 <= index < size:
                raise ValueError(
                    f"`{name}` in {str(path)!r} must be an id of the vocabulary, from 0 to {size - 1}, got {ids!r}."
                )


def refuse_shape(folder: str | os.PathLike, name: str, shape: Sequence[int], expected: Sequence[int]) -> NoReturn:
    """Raise a `ValueError` for a weight of another shape than its configuration has."""
    raise ValueError(
        f"The weight `{name}` of {os.fspath(folder)} must have the shape {tuple(expected)}, got {tuple(shape)}."
    )
