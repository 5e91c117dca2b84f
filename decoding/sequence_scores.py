"""Sums of log-probabilities of the tokens that transformers' loops select, without storing the vocabulary of each step."""

import torch
from transformers import StoppingCriteria

from metaphrase.decoding.supported_processors import are_ends


class SequenceScores(StoppingCriteria):
    """A criterion that never stops. It reads the scores of each step when the tokens are selected, and then empties them.

    With `output_scores` transformers' loops store the scores of all tokens and steps. Without, they do not return the scores of
    beams, which they sum up themselves.
    """

    def __init__(self, empties: bool = True):
        """Args:
        empties: False leaves the scores in place, for other criteria that may read earlier steps.
        """
        self._empties = empties
        self._num_read = 0
        # One tensor (rows,) per step.
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor, ...], **kwargs) -> torch.BoolTensor:
        """Read the scores of the new tokens: one per step, or several in speculative decoding."""
        for column, step in zip(range(self._num_read - len(scores), 0), scores[self._num_read :], strict=True):
            # In beam search the scores have more rows than the hypotheses.
            if len(step) == len(input_ids):
                self._log_probs.append(_log_probs(step, input_ids[:, column]))
            if self._empties:
                step.set_()
        self._num_read = len(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def totals(self, sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None) -> torch.Tensor:
        """Return the sums of log-probabilities up to the end of each row, (rows,).

        Args:
            sequences: Output ids (rows, length). Steps behind them were undone.
            prompt_length: Tokens of the prompt.
            ends: Ids that end a target.
        """
        tokens = sequences[:, prompt_length:]
        if not self._log_probs or not tokens.shape[1]:
            return torch.zeros(len(tokens), device=tokens.device)
        # (rows, steps)
        per_token = torch.stack(self._log_probs[: tokens.shape[1]], dim=1)
        is_end = are_ends(tokens, ends).long()
        is_padding = is_end.cumsum(dim=1) > is_end
        return per_token.masked_fill(is_padding[:, : per_token.shape[1]].to(per_token.device), 0.0).sum(dim=1)


def totals_of_steps(
    scores: tuple[torch.Tensor, ...], sequences: torch.Tensor, prompt_length: int, ends: torch.Tensor | None
) -> torch.Tensor:
    """Return `SequenceScores.totals` from the scores (rows, V) of all steps."""
    chosen, steps = SequenceScores(), zip(scores, sequences[:, prompt_length:].unbind(1), strict=False)
    chosen._log_probs = [_log_probs(*step) for step in steps]
    return chosen.totals(sequences, prompt_length, ends)


def _log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    # The padding id may be outside of the vocabulary.
    tokens = tokens.clamp(0, scores.shape[-1] - 1)
    return scores.float().log_softmax(dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]
