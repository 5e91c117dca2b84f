"""Inference: generate and score many texts."""

from metaphrase.inference.batches import Hypothesis, Partner, decode
from metaphrase.inference.generator import ENGINES, Generator, ScoredText
from metaphrase.inference.pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline
from metaphrase.plugins import names_of_rings
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling

_NAMES_OF_RINGS, __getattr__ = names_of_rings(__name__)

__all__ = ["ENGINES", "GENERATION_OPTIONS", "Generator", "Hypothesis", "Partner", "ScoredText", "SummarizationPipeline"]
__all__ += ["Text2TextGenerationPipeline", "TranslationPipeline", "complete_sampling", "decode", *_NAMES_OF_RINGS]
