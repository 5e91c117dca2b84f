"""Inference: many lines in, many lines out."""

from metaphrase.inference.alignment import AttentionMap, cross_attention
from metaphrase.inference.decoding import Engine, Hypothesis, decode
from metaphrase.inference.generation_options import GENERATION_OPTIONS, complete_sampling
from metaphrase.inference.generator import ENGINES, Generator, ScoredText

__all__ = [
    "ENGINES",
    "GENERATION_OPTIONS",
    "AttentionMap",
    "Engine",
    "Generator",
    "Hypothesis",
    "ScoredText",
    "complete_sampling",
    "cross_attention",
    "decode",
]
