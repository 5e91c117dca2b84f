"""Loading: the parts of a generator, from a folder or from the Hub."""

import os

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.inference.engine import Engine
from metaphrase.inference.quantization import quantization_of, quantize
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
    """A model in evaluation mode, or an engine, with its tokenizers; for arguments and errors see `Generator.from_pretrained`."""
    if engine == "ctranslate2":
        from metaphrase.inference.ctranslate2_engine import CTranslate2Engine  # An extra.

        model = CTranslate2Engine.from_pretrained(name_or_path, device=device, dtype=dtype)
    else:
        model = _load_model(name_or_path, default_device() if device is None else device, dtype, trust_remote_code)
    tokenizers = TokenizerPair.from_pretrained(name_or_path)
    model.generation_config.update(**set_languages(tokenizers, source_lang, target_lang))
    return model, tokenizers


def default_device() -> str | torch.device:
    """An accelerator, if there is one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def _load_model(
    name_or_path: str | os.PathLike, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    quantization = quantization_of(dtype, device)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        name_or_path, dtype="float32" if quantization else dtype, trust_remote_code=trust_remote_code
    )
    model = model.to(device).eval()
    if quantization is not None:
        quantize(model, quantization)
    return model
