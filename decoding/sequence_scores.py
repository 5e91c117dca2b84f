"""Chosen scores: what transformers' loops gave the tokens that they chose, without a whole vocabulary kept for each step."""

import torch
from transformers import StoppingCriteria

from metaphrase.decoding.supported_processors import are_ends


class SequenceScores(StoppingCriteria):
    """Reads the scores of each step as soon as its tokens are chosen, and then empties them. It never stops anything.

    With `output_scores` transformers' loops keep the scores of all tokens for each step. Without it they say nothing of what
    beams scored either; what beams scored they add up themselves.
    """

    def __init__(self, empties: bool = True):
        """Begins a call.

        Args:
            empties: Whether scores may be emptied: not where other criteria may look back at them.
        """
        self._empties = empties
        self._num_read = 0
        # Of each step, (rows).
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor, ...], **kwargs) -> torch.BoolTensor:
        """See `StoppingCriteria`; drafted tokens come several at a time."""
        for place, step in zip(range(self._num_read - len(scores), 0), scores[self._num_read :], strict=True):
            # Candidates of beams are more than the rows that they continue.
            if len(step) == len(input_ids):
                self._log_probs.append(_log_probs(step, input_ids[:, place]))
            if self._empties:
                step.set_()
        self._num_read = len(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def totals(self, sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None) -> torch.Tensor:
        """Sums of the log-probabilities up to each row's end, `(rows)`.

        Args:
            sequences: What has come out, `(rows, length)`; steps behind it were undone.
            prompt_length: Tokens of it that were given.
            ends: Ids that end a target.
        """
        return _totals(self._log_probs, sequences[:, prompt_length:], ends)


def totals_of_steps(
    scores: tuple[torch.Tensor, ...], sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None
) -> torch.Tensor:
    """As `SequenceScores.totals`, of the scores that a loop has kept, `(rows, vocab)` each."""
    tokens = sequences[:, prompt_length:]
    return _totals([_log_probs(*step) for step in zip(scores, tokens.unbind(1), strict=False)], tokens, ends)


def _log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    # What stands behind an end may be no token of the vocabulary.
    tokens = tokens.clamp(0, scores.shape[-1] - 1)
    return scores.float().log_softmax(dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]


def _totals(log_probs: list[torch.Tensor], tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    if not log_probs or not tokens.shape[1]:
        return torch.zeros(len(tokens), device=tokens.device)
    # (rows, steps)
    per_token = torch.stack(log_probs[: tokens.shape[1]], dim=1)
    is_end = are_ends(tokens, ends).long()
    # What stands behind the end of sequence is padding and was never chosen.
    is_behind = is_end.cumsum(dim=1) > is_end
    return per_token.masked_fill(is_behind[:, : per_token.shape[1]].to(per_token.device), 0.0).sum(dim=1)
