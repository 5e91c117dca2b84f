"""Helpers of all conversions: find a checkpoint, copy its files, and compare its weights with those of a network."""

import fnmatch
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import convert_file_size_to_int

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import refuse_outer_links
from metaphrase.storage.weight_files import listed, weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER

OURS = MetaphraseConfig.model_type
DEFAULT_SHARD_SIZE = "5GB"
PROVENANCE_NAME = "conversion.json"
TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*vocab*", "merges.txt", "*.spm", "*.model"),
    *("spiece.*", "chat_template*", "dict.txt", "bpe.codes"),
)
_LICENCES = ("LICENSE*", "NOTICE*")


def find_folder(source: str | os.PathLike, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, which is downloaded if it is a name on the Hub."""
    name = os.fspath(source)
    if os.path.isdir(name):
        return Path(name)
    files = ["*.json", "*.safetensors", *TOKENIZER_FILES, *_LICENCES, f"{TARGET_SUBFOLDER}/*"]

    def download(patterns: Sequence[str]) -> Path:
        # Folders hold a run's checkpoints or other formats. A star also matches a slash.
        ignored = ["*/*.safetensors", "*/*.bin"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))

    try:
        folder = download(files)
        # Many models have their weights in both formats.
        return folder if weight_names(folder) else download([*files, "pytorch_model*.bin"])
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"`source` must be a folder that exists, or a name on the Hub, got {name!r}: {error}"
        ) from error


def shard_bytes(size: int | str) -> int:
    """Return a limit of a weight file in bytes, such as 500MB."""
    return int(size) if str(size).isdecimal() else convert_file_size_to_int(size)


def copy_licences(folder: Path, output: Path) -> None:
    """Copy licences and notices of a checkpoint."""
    copy_files(folder, output, _LICENCES)


def copy_files(folder: Path, output: Path, patterns: Sequence[str], name: str = "") -> None:
    """Copy the files of a folder, or of its folder `name`, whose names match a pattern."""
    for path in sorted((folder / name).iterdir()) if (folder / name).is_dir() else ():
        if path.is_file() and matches_any(path.name, patterns):
            refuse_outer_links(folder, [path], "source")
            (output / name).mkdir(exist_ok=True)
            shutil.copyfile(path, output / name / path.name)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches a pattern, in which a star stands for any characters."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with names and shapes of weights, but without memory for them."""
    with torch.device("meta"):
        return model_class(config)


def stored_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights in a model's checkpoint. Tied weights are stored once."""
    ignored = model._keys_to_ignore_on_save or ()
    tied = model.all_tied_weights_keys
    return [
        name
        for name in model.state_dict()
        if name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by name."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a weight of another shape."""
    if shape != expected:
        raise ValueError(f"The weight `{name}` must have the shape {expected}, got {shape}.")


def refuse_weights(problem: str, names: list[str]) -> None:
    """Refuse weights, if there are any."""
    if names:
        raise ValueError(f"Weights {problem}: {listed(names)}.")
