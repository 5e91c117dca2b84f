"""Inference: many lines in, many lines out."""

from metaphrase.inference.alignment import AttentionMap, cross_attention
from metaphrase.inference.constrained_beam_search import constrained_beam_search
from metaphrase.inference.contrastive_search import contrastive_search
from metaphrase.inference.decoding import Hypothesis, decode
from metaphrase.inference.diverse_beam_search import diverse_beam_search
from metaphrase.inference.generation_options import GENERATION_OPTIONS, complete_sampling
from metaphrase.inference.generator import Generator, ScoredText

__all__ = [
    "GENERATION_OPTIONS",
    "AttentionMap",
    "Generator",
    "Hypothesis",
    "ScoredText",
    "complete_sampling",
    "constrained_beam_search",
    "contrastive_search",
    "cross_attention",
    "decode",
    "diverse_beam_search",
]
