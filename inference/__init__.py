"""Inference: decode, score and align many texts."""

from metaphrase.decoding.quantization import quantize
from metaphrase.decoding.searches.constrained_beam_search import constrained_beam_search
from metaphrase.decoding.searches.joint_search import EnsembleSearch, Partner, SpeculativeSearch
from metaphrase.inference.alignment import (
    AttentionMap,
    alignment_error_rate,
    cross_attention,
    cross_attentions,
    format_pharaoh,
    word_alignment,
    word_weights,
)
from metaphrase.inference.batches import Hypothesis, decode
from metaphrase.inference.explanation import Explanation, explain
from metaphrase.inference.generator import ENGINES, Generator, ScoredText
from metaphrase.inference.generator_pool import GeneratorPool
from metaphrase.inference.minimum_bayes_risk import expected_utilities
from metaphrase.inference.pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline
from metaphrase.inference.scoring import ForcedScore
from metaphrase.inference.texts.plan import Terms
from metaphrase.inference.whole_texts import TextDecoder
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling

__all__ = ["ENGINES", "GENERATION_OPTIONS", "AttentionMap", "EnsembleSearch", "Explanation", "ForcedScore"]
__all__ += ["Generator", "GeneratorPool", "Hypothesis", "Partner", "ScoredText", "SpeculativeSearch"]
__all__ += ["SummarizationPipeline", "Terms", "Text2TextGenerationPipeline", "TextDecoder", "TranslationPipeline"]
__all__ += ["alignment_error_rate", "complete_sampling", "constrained_beam_search", "cross_attention"]
__all__ += ["cross_attentions", "decode", "expected_utilities", "explain", "format_pharaoh", "quantize"]
__all__ += ["word_alignment", "word_weights"]
