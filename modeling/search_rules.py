"""Rules of a search: what changes the probabilities of the next token, and which tokens end a target."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process, stopping_criteria

# Those that look at each row by itself, so that rows may leave the batch.
ROW_PROCESSORS = {
    getattr(logits_process, name, None)
    for name in (
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor"),
        *("ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper"),
        *("NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
        *("SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
        *("TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
    )
}
ROW_CRITERIA = {stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria}


def process(processors: Sequence[LogitsProcessor], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores `(rows, vocab)` as the processors leave them, after the ids `(rows, length)`.

    transformers' list asks each processor for the names of its arguments first, at every step.
    """
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def are_ends(tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Whether each token is one of the ends `(count)`: a boolean for each, in any shape."""
    if ends is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    # For one end, which is the rule, a comparison is many times as fast.
    return tokens == ends if len(ends) == 1 else torch.isin(tokens, ends)
