"""Inference: many lines in, many lines out."""

from metaphrase.inference.alignment import AttentionMap, cross_attention
from metaphrase.inference.decoding import Hypothesis, decode
from metaphrase.inference.ensemble import EnsembleSearch
from metaphrase.inference.generation_options import GENERATION_OPTIONS, complete_sampling
from metaphrase.inference.generator import Generator, ScoredText
from metaphrase.inference.joint_search import Partner
from metaphrase.inference.minimum_bayes_risk import expected_utilities
from metaphrase.inference.speculative_decoding import SpeculativeSearch

__all__ = [
    "GENERATION_OPTIONS",
    "AttentionMap",
    "EnsembleSearch",
    "Generator",
    "Hypothesis",
    "Partner",
    "ScoredText",
    "SpeculativeSearch",
    "complete_sampling",
    "cross_attention",
    "decode",
    "expected_utilities",
]
