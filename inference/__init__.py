"""Inference: many lines in, many lines out."""

from metaphrase.inference.alignment import AttentionMap, cross_attention
from metaphrase.inference.decoding import Hypothesis, decode
from metaphrase.inference.generation_options import GENERATION_OPTIONS, complete_sampling
from metaphrase.inference.generator import Generator, ScoredText
from metaphrase.inference.pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

__all__ = [
    "GENERATION_OPTIONS",
    "AttentionMap",
    "Generator",
    "Hypothesis",
    "ScoredText",
    "SummarizationPipeline",
    "Text2TextGenerationPipeline",
    "TranslationPipeline",
    "complete_sampling",
    "cross_attention",
    "decode",
]
