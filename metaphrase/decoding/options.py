"""Logits processors of `generate()`: which of them the fast loops support, and how they are applied."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process


def _classes_of(*names: str) -> set[type | None]:
    # An older or newer transformers may lack a class.
    return {getattr(logits_process, name, None) for name in names}


# Processors that only remove tokens.
_REMOVERS = _classes_of(
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor"),
    *("MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
)
# Processors that look at each row by itself, so that rows may leave the batch.
ROW_PROCESSORS = _REMOVERS | _classes_of(
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "InfNanRemoveLogitsProcessor"),
    *("LogitNormalization", "MinPLogitsWarper", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
)


def only_lower(processors: Sequence[LogitsProcessor]) -> bool:
    """Return True if the processors raise no logit, except of a token that they force.

    Then a token that has the largest logit before, and is not lowered, has the largest logit after.
    """
    return all(
        type(processor) in _REMOVERS
        or (type(processor) is logits_process.RepetitionPenaltyLogitsProcessor and processor.penalty >= 1)
        for processor in processors
    )


def process(processors: Sequence[LogitsProcessor], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores (rows, V) as the processors change them after ids (rows, length).

    `LogitsProcessorList` would inspect the signature of each processor at every step.
    """
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def are_ends(tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Return True for each token, in any shape, that is one of the end tokens (count,)."""
    if ends is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    # A comparison is many times faster than `isin`.
    return tokens == ends if len(ends) == 1 else torch.isin(tokens, ends)
