"""Ensembles: several models predict each token by the mean of their distributions."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import GenerationConfig

from metaphrase.decoding.beam_search import beam_search
from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.sampling import sample
from metaphrase.decoding.searches.joint_search import JointSearch

ENSEMBLE_MEANS = ("linear", "log_linear")


class EnsembleState:
    """Decoder states of several models for the same targets."""

    def __init__(self, states: Sequence[DecoderState]):
        self.states = list(states)

    def step(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Return each decoder's output (rows, H) for one token of each row, shape (rows,)."""
        return [state.step(input_ids) for state in self.states]

    def spread(self, copies: int) -> None:
        for state in self.states:
            state.spread(copies)

    def reorder(self, rows: torch.Tensor) -> None:
        for state in self.states:
            state.reorder(rows)

    def select_sources(self, sources: torch.Tensor) -> None:
        for state in self.states:
            state.select_sources(sources)


def mean_log_probs(logits: Sequence[torch.Tensor], mean: str) -> torch.Tensor:
    """Return the mean of several distributions.

    Args:
        logits: Logits of each model, shape (..., V).
        mean: `linear` for the logarithm of the mean probability; `log_linear` for the normalized mean of log-probabilities.

    Returns:
        Log-probabilities in float32, shape (..., V).
    """
    log_probs = torch.stack([nn.functional.log_softmax(item.float(), dim=-1) for item in logits])
    if mean == "linear":
        return log_probs.logsumexp(dim=0) - math.log(len(logits))
    return nn.functional.log_softmax(log_probs.mean(dim=0), dim=-1)


class EnsembleSearch(JointSearch):
    """Greedy search, sampling and beam search over the mean, for `generate(custom_generate=...)` of the first model.

    Args:
        ensemble_mean: `linear`, fairseq's mean, or `log_linear`; see `mean_log_probs`.

    Raises:
        ValueError: If the mean is unknown.

    Source: Sutskever et al. 2014, arXiv 1409.3215.
    """

    def __init__(self, ensemble_mean: str = "linear"):
        if ensemble_mean not in ENSEMBLE_MEANS:
            raise ValueError(f"`ensemble_mean` must be one of {', '.join(ENSEMBLE_MEANS)}, got {ensemble_mean!r}.")
        self.mean = ensemble_mean

    def state_class(self, config: GenerationConfig) -> type[DecoderState]:
        return BeamState if config.num_beams > 1 else DecoderState

    def search(self, projections, states, prompt, processors, config, return_scores):
        """Search as in `JointSearch`."""
        # In beam search the processors get log-probabilities.
        takes_logits = bool(processors) and config.num_beams == 1

        def project(hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
            logits = [head(hidden) for head, hidden in zip(projections, hidden_states, strict=True)]
            mean = mean_log_probs(logits, self.mean)
            if not takes_logits:
                return mean
            # Restore the size of logits, which matters for processors such as the repetition penalty.
            return mean + torch.stack([item.float().logsumexp(dim=-1, keepdim=True) for item in logits]).mean(dim=0)

        copies = len(prompt) // states[0].rows
        arguments = (project, EnsembleState(states), prompt[::copies])
        if config.num_beams > 1:
            return beam_search(*arguments, processors, config)
        return sample(*arguments, copies, processors, config, return_scores)
