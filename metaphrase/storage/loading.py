"""Loading of models: checks of the settings in a folder, then the model with all its weights, or an error."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from transformers import AutoModelForSeq2SeqLM, AutoModelForTextEncoding, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import read_fields
from metaphrase.storage.generation_options import check_options, use_floats
from metaphrase.storage.weight_files import ADAPTER_NAME, WeightFiles, check_finite, listed

_TOKENIZER_FILES = [
    f"{part}{name}" for part in ("", "target_tokenizer/") for name in ("tokenizer_config.json", "tokenizer.json")
]


def check_model_folder(folder: str | os.PathLike) -> None:
    """Refuse damaged files of settings, of which transformers names no file, and wrong options of `generate()`."""
    folder = Path(folder)
    for name in _TOKENIZER_FILES:
        read_fields(folder / name)
    for name in (CONFIG_NAME, GENERATION_CONFIG_NAME):
        check_options(read_fields(folder / name) or {}, f" in {str(folder / name)!r}")


def load_pretrained(name_or_path: str | os.PathLike, *, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    """Load a model that writes texts, or an encoder alone. `MetaphraseError` for damaged, missing or infinite weights.

    transformers only warns, and fills missing weights at random. Models of other families still load with that
    warning, since their classes may rebuild weights. The caller has checked the folder with `check_model_folder`.
    """
    folder, auto_class = Path(name_or_path), AutoModelForSeq2SeqLM
    name, *_ = (read_fields(folder / CONFIG_NAME) or {}).get("architectures") or [""]
    if name.endswith("EncoderModel"):
        auto_class = AutoModelForTextEncoding
    elif name.endswith(("Classification", "QuestionAnswering")):
        raise MetaphraseError(f"A model must write texts, got a {name} in {folder}. Load it by its Auto class.")
    if (folder / CONFIG_NAME).is_file() and not (folder / ADAPTER_NAME).is_file():
        with contextlib.ExitStack() as files:
            WeightFiles(folder, files)
    # transformers would open a pickle.
    options["use_safetensors"] = True
    # The shapes go into the error below, in place of transformers' table.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": trust_remote_code}
    model, info = auto_class.from_pretrained(name_or_path, **options)
    if mismatched := sorted(info["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise MetaphraseError(
            f"The weight `{name}` of {os.fspath(name_or_path)} must have the shape {tuple(expected)}, got {tuple(shape)}."
        )
    if model.config.model_type == MetaphraseConfig.model_type and (missing := sorted(info["missing_keys"])):
        raise MetaphraseError(
            f"A checkpoint must hold whole weights, got {os.fspath(name_or_path)}, where these are missing: {listed(missing)}."
        )
    for weight_name, weight in model.state_dict().items():
        check_finite(weight, weight_name, name_or_path)
    if getattr(model, "generation_config", None) is not None:
        use_floats(vars(model.generation_config))
    return model


def refuse_missing_folder(name_or_path: str | os.PathLike, field: str) -> None:
    """Refuse a missing path that can be no Hub id, and an id that cannot be loaded.

    transformers would ask the Hub for several files, and for each of them six times, which takes minutes without a network.
    """
    text, path = os.fspath(name_or_path), Path(name_or_path)
    if path.exists():
        return
    missing = f"`{field}` must be a folder that exists, or a name on the Hub, got {text!r}"
    if text.startswith((".", "/", "~")) or len(path.parts) > 2:
        raise FileNotFoundError(f"{missing}.")
    if constants.HF_HUB_OFFLINE or try_to_load_from_cache(text, CONFIG_NAME) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(text, CONFIG_NAME))
    except Exception as error:
        # Each version of huggingface_hub has its own errors for a missing network. With any other answer the Hub knows the
        # model, and transformers repeats a request that the Hub could not answer.
        if isinstance(error, RepositoryNotFoundError) or not isinstance(error, HfHubHTTPError):
            raise FileNotFoundError(f"{missing}: {error}") from error


@contextlib.contextmanager
def naming(name_or_path: str | os.PathLike, field: str) -> Iterator[None]:
    """Check a model's folder, and name the option and the model in errors of loading. See `refuse_missing_folder`."""
    refuse_missing_folder(name_or_path, field)
    check_model_folder(name_or_path)
    try:
        yield
    except OSError as error:
        if Path(name_or_path).exists():
            raise
        raise FileNotFoundError(f"`{field}` cannot be loaded, got {os.fspath(name_or_path)!r}: {error}") from error


def is_exported(name_or_path: str | os.PathLike) -> bool:
    """Return True for a folder of CTranslate2."""
    return Path(name_or_path, "model.bin").is_file()


def default_device() -> str | torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def check_device(name: str | torch.device) -> None:
    """Raise `MetaphraseError` for a device that torch cannot use here."""
    try:
        # The device `meta` holds no numbers.
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # CUDA's message may have many lines.
        reason = str(error).partition("\n")[0]
        raise MetaphraseError(f"`device` must be one that torch can use here, got {str(name)!r}: {reason}") from error
