"""Inference: generate and score many texts."""

from typing import Any

from metaphrase.inference.batches import Hypothesis, Partner, decode
from metaphrase.inference.generator import ENGINES, Generator, ScoredText
from metaphrase.inference.pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline
from metaphrase.plugins import PUBLIC_NAMES, import_name
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling

_NAMES_OF_RINGS = PUBLIC_NAMES["metaphrase.inference"]

__all__ = [
    "ENGINES",
    "GENERATION_OPTIONS",
    "Generator",
    "Hypothesis",
    "Partner",
    "ScoredText",
    "SummarizationPipeline",
]
__all__ += ["Text2TextGenerationPipeline", "TranslationPipeline", "complete_sampling", "decode"]
__all__ += _NAMES_OF_RINGS


def __getattr__(name: str) -> Any:
    if name not in _NAMES_OF_RINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(f"{_NAMES_OF_RINGS[name]}:{name}")
