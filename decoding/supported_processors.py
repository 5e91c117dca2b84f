"""Rules of a search: what changes the probabilities of the next token, and which tokens end a target."""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process, stopping_criteria

# Those that look at each row by itself, so that rows may leave the batch.
_ROW_PROCESSORS = {
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

# Those that take away tokens.
_REMOVERS = {
    getattr(logits_process, name, None)
    for name in (
        *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor"),
        *("MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
        *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
    )
}


def unknown_processors(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """Those that may need more than one row at a time, or whose rows may not leave the batch."""
    return [
        processor
        for processor in processors
        # One length for each row of the batch as it was at first.
        if type(processor) not in _ROW_PROCESSORS
        or isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    ]


def only_lower(processors: Sequence[LogitsProcessor]) -> bool:
    """Whether they leave no token's logit higher than it was, but for tokens that they force.

    So of some tokens one that still has the highest logit of all has it among all that the processors leave.
    """
    return all(
        type(processor) in _REMOVERS
        or (type(processor) is logits_process.RepetitionPenaltyLogitsProcessor and processor.penalty >= 1)
        for processor in processors
    )


def unknown_criteria(criteria: Sequence[StoppingCriteria], config: GenerationConfig) -> list[StoppingCriteria]:
    """Those that do not follow from the configuration: a caller's own take the place of those that do."""
    return [criterion for criterion in criteria if not _is_of_config(criterion, config)]


def _is_of_config(criterion: StoppingCriteria, config: GenerationConfig) -> bool:
    if type(criterion) is stopping_criteria.MaxLengthCriteria:
        return criterion.max_length == config.max_length
    ends = config._eos_token_tensor
    is_end = type(criterion) is stopping_criteria.EosTokenCriteria and ends is not None
    return is_end and (criterion.eos_token_id is ends or criterion.eos_token_id.tolist() == ends.tolist())


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
