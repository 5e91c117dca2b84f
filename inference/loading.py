"""Load a model or an engine with its tokenizers, from a folder or from the Hub."""

import os

import torch
from transformers import PreTrainedModel

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.decoding.quantization import quantization_of, quantize
from metaphrase.inference.engine import Engine, default_device, find_device
from metaphrase.storage.loading import load_whole, naming
from metaphrase.tokenization import TokenizerPair, set_languages

ENGINES = ("torch", "ctranslate2")


def load_parts(
    name_or_path: str | os.PathLike,
    *,
    engine: str = "torch",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> tuple[PreTrainedModel | Engine, TokenizerPair]:
    """Load a model in evaluation mode, or an engine, with its tokenizers. See `Generator.from_pretrained`."""
    with naming(name_or_path, "name_or_path"):
        if engine == "ctranslate2":
            from metaphrase.inference.ctranslate2.engine import CTranslate2Engine  # Needs an extra.

            model = CTranslate2Engine.from_pretrained(name_or_path, device=device, dtype=dtype)
        else:
            model = _load_model(name_or_path, default_device() if device is None else device, dtype, trust_remote_code)
        tokenizers = TokenizerPair.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    model.generation_config.update(**set_languages(tokenizers, source_lang, target_lang))
    return model, tokenizers


def _load_model(
    name_or_path: str | os.PathLike, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    _check_device(device)
    quantization = quantization_of(dtype, device)
    model = load_whole(
        name_or_path,
        dtype=torch.float32 if quantization else _find_dtype(dtype),
        trust_remote_code=trust_remote_code,
    )
    model = model.to(device).eval()
    if quantization is not None:
        quantize(model, quantization)
    return model


def _check_device(name: str | torch.device) -> None:
    try:
        torch.empty(0, device=find_device(name))
    except (RuntimeError, AssertionError) as error:
        # CUDA's message may have many lines.
        reason = str(error).partition("\n")[0]
        raise ValueError(f"`device` must be one that torch can use here, got {str(name)!r}: {reason}") from error


def _find_dtype(name: str | torch.dtype) -> str | torch.dtype:
    """Return torch's type for a name. `auto` stays as it is."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if name != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(
            f"`dtype` must be auto, int8 or one of torch's, such as float32, bfloat16 or float16, got {str(name)!r}."
        )
    return name if dtype is None else dtype
