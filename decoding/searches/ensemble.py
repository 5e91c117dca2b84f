"""Ensembles: several models write one target, each token by the mean of what they predict."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from metaphrase.decoding.beam_search import beam_search
from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.sampling import sample
from metaphrase.decoding.searches.joint_search import JointSearch, Projection

ENSEMBLE_MEANS = ("linear", "log_linear")


class EnsembleState:
    """The states of several models that read the same targets."""

    def __init__(self, states: Sequence[DecoderState]):
        self.states = list(states)

    def step(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Each decoder's output, `(rows, hidden)`, for one token of each row, `(rows)`."""
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
    """One distribution of several.

    Args:
        logits: Of each model, `(..., vocab)`.
        mean: `linear`, the logarithm of the mean of the probabilities; `log_linear`, the mean of the log-probabilities, shifted
            so that probabilities add up to 1 again.

    Returns:
        Log-probabilities in float32, `(..., vocab)`.
    """
    log_probs = torch.stack([nn.functional.log_softmax(each.float(), dim=-1) for each in logits])
    if mean == "linear":
        return log_probs.logsumexp(dim=0) - math.log(len(logits))
    return nn.functional.log_softmax(log_probs.mean(dim=0), dim=-1)


class EnsembleSearch(JointSearch):
    """Greedy search, sampling and beam search over the mean, for `generate(custom_generate=...)` of the first model.

    Source: Sutskever et al. 2014, arXiv 1409.3215. The linear mean is that of fairseq.
    """

    def __init__(self, ensemble_mean: str = "linear"):
        """Chooses the mean, as for `mean_log_probs`.

        Raises:
            ValueError: If it is unknown.
        """
        if ensemble_mean not in ENSEMBLE_MEANS:
            raise ValueError(f"`ensemble_mean` must be one of {', '.join(ENSEMBLE_MEANS)}, got {ensemble_mean!r}.")
        self.mean = ensemble_mean

    def state_class(self, config: GenerationConfig) -> type[DecoderState]:
        return BeamState if config.num_beams > 1 else DecoderState

    def search(
        self,
        projections: Sequence[Projection],
        states: Sequence[DecoderState],
        prompt: torch.Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        return_scores: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `JointSearch`."""
        # Of beams they have log-probabilities.
        takes_logits = bool(processors) and config.num_beams == 1

        def project(hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
            logits = [head(hidden) for head, hidden in zip(projections, hidden_states, strict=True)]
            mean = mean_log_probs(logits, self.mean)
            if not takes_logits:
                return mean
            # As large as logits are: some processors, such as a penalty of repetitions, go by more than differences.
            return mean + torch.stack([each.float().logsumexp(dim=-1, keepdim=True) for each in logits]).mean(dim=0)

        copies = len(prompt) // states[0].rows
        arguments = (project, EnsembleState(states), prompt[::copies])
        if config.num_beams > 1:
            return beam_search(*arguments, processors, config)
        return sample(*arguments, copies, processors, config, return_scores)
