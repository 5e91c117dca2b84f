"""A whole model: one that is loaded with all of its weights, or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.weight_files import listed, weight_names


def load_whole(name_or_path: str | os.PathLike, *, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    """As `AutoModelForSeq2SeqLM.from_pretrained`, which puts random weights where a checkpoint has none, with a note alone.

    Of other families it is left at that note, since their classes make some weights anew.

    Args:
        name_or_path: Folder or Hub id.
        trust_remote_code: Whether code that lies beside the weights may run.
        **options: Passed on.

    Raises:
        ValueError: If the weights are damaged or have another shape, or weights of a Metaphrase model are missing.
        OSError: If there is no such model.
    """
    # transformers fails over a damaged index with a KeyError.
    weight_names(Path(name_or_path))
    # It would tell of another shape in a table, and refuse to say more in its error.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, found = AutoModelForSeq2SeqLM.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, **options
        )
    except SafetensorError as error:
        raise ValueError(f"A checkpoint must hold whole weights, got {os.fspath(name_or_path)}: {error}.") from error
    if mismatched := sorted(found["mismatched_keys"]):
        name, given, expected = mismatched[0]
        raise ValueError(
            f"The weight `{name}` of {os.fspath(name_or_path)} must have the shape {tuple(expected)}, got {tuple(given)}."
        )
    if model.config.model_type == MetaphraseConfig.model_type and (missing := sorted(found["missing_keys"])):
        raise ValueError(
            f"A checkpoint must hold whole weights, got {os.fspath(name_or_path)}, where these are missing: {listed(missing)}."
        )
    return model


def refuse_missing_folder(name_or_path: str | os.PathLike, field: str) -> None:
    """Refuses a path without a folder that can be no name on the Hub: without a network, the Hub would be asked for a minute.

    Args:
        name_or_path: Of a model; `runs/model` can be a name.
        field: What it was given in, for the error.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    text, path = os.fspath(name_or_path), Path(name_or_path)
    if (text.startswith((".", "/", "~")) or len(path.parts) > 2) and not path.exists():
        raise FileNotFoundError(f"{_no_model(name_or_path, field)}.")


@contextlib.contextmanager
def naming(name_or_path: str | os.PathLike, field: str) -> Iterator[None]:
    """Says which model, given in which field, was to be loaded, where there is none. For arguments, see `refuse_missing_folder`.

    Raises:
        FileNotFoundError: If there is no such folder, and the Hub has no such model or cannot be reached.
    """
    refuse_missing_folder(name_or_path, field)
    try:
        yield
    except OSError as error:
        if Path(name_or_path).exists():
            raise
        raise FileNotFoundError(f"{_no_model(name_or_path, field)}: {error}") from error


def _no_model(name_or_path: str | os.PathLike, field: str) -> str:
    return f"`{field}` must be a folder that exists, or a name on the Hub, got {os.fspath(name_or_path)!r}"
