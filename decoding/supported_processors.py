"""Logits processors and stopping criteria that the fast loops support."""

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process, stopping_criteria

# Processors that only remove tokens.
_REMOVERS = {
    getattr(logits_process, name, None)
    for name in (
        *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor"),
        *("MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
        *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
    )
}
# Processors that look at each row by itself, so that rows may leave the batch.
_ROW_PROCESSORS = _REMOVERS | {
    getattr(logits_process, name, None)
    for name in (
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "InfNanRemoveLogitsProcessor"),
        *("LogitNormalization", "MinPLogitsWarper", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor"),
        *("TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
    )
}


def unknown_processors(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """Return the processors that may need all rows of the batch."""
    return [
        processor
        for processor in processors
        # A `prompt_ignore_length` in a tensor has an entry for each row of the first batch.
        if type(processor) not in _ROW_PROCESSORS
        or isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    ]


def only_lower(processors: Sequence[LogitsProcessor]) -> bool:
    """Return True if the processors raise no logit, except of a token that they force.

    Then a token that has the largest logit before, and is not lowered, has the largest logit after.
    """
    return all(
        type(processor) in _REMOVERS
        or (type(processor) is logits_process.RepetitionPenaltyLogitsProcessor and processor.penalty >= 1)
        for processor in processors
    )


def unknown_criteria(criteria: Sequence[StoppingCriteria], config: GenerationConfig) -> list[StoppingCriteria]:
    """Return the criteria that differ from the limits of the configuration, such as a caller's own."""
    return [criterion for criterion in criteria if not _is_of_config(criterion, config)]


def _is_of_config(criterion: StoppingCriteria, config: GenerationConfig) -> bool:
    if type(criterion) is stopping_criteria.MaxLengthCriteria:
        return criterion.max_length == config.max_length
    ends = config._eos_token_tensor
    is_end = type(criterion) is stopping_criteria.EosTokenCriteria and ends is not None
    return is_end and (criterion.eos_token_id is ends or criterion.eos_token_id.tolist() == ends.tolist())


def process(processors: Sequence[LogitsProcessor], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores (rows, V) as the processors change them after ids (rows, length).

    `LogitsProcessorList` would inspect the signature of each processor at every step.
    """
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def process_permitted(
    processors: Sequence[LogitsProcessor], permitted: torch.Tensor, vocab_size: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a processor for the scores (rows, count) of permitted tokens (count,). The processors see those of all tokens."""

    def process_rows(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        whole = scores.new_full((len(scores), vocab_size), -torch.inf)
        whole[:, permitted] = scores
        return process(processors, ids, whole)[:, permitted]

    return process_rows


def are_ends(tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Return True for each token, in any shape, that is one of the end tokens (count,)."""
    if ends is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    # A comparison is many times faster than `isin`.
    return tokens == ends if len(ends) == 1 else torch.isin(tokens, ends)
