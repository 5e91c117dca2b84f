"""Ensembles: several models write one target, each token by the mean of what they predict."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.inference.joint_search import open_states
from metaphrase.modeling.beam_search import beam_search
from metaphrase.modeling.decoder_state import DecoderState
from metaphrase.modeling.sampling import sample

ENSEMBLE_MEANS = ("linear", "log_linear")

Projection = Callable[[torch.Tensor], torch.Tensor]


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

    def keep(self, sources: torch.Tensor) -> None:
        for state in self.states:
            state.keep(sources)


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


class EnsembleSearch:
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

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        partners: Sequence[tuple[PreTrainedModel, dict[str, torch.Tensor]]] = (),
        return_scores: bool = True,
        **kwargs,
    ) -> GenerateBeamEncoderDecoderOutput:
        """Searches.

        Returns:
            `sequences`, and their scores as a single model has them.

        Raises:
            ValueError: If something is asked for that only transformers' own loops can do.
        """
        config, processors = generation_config, logits_processor
        states = open_states(DecoderState, model, input_ids, processors, stopping_criteria, config, partners, kwargs)
        heads: list[Projection] = [model.project, *(partner.project for partner, _ in partners)]

        def project(hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
            return mean_log_probs([head(hidden) for head, hidden in zip(heads, hidden_states, strict=True)], self.mean)

        copies = len(input_ids) // len(kwargs["encoder_outputs"].last_hidden_state)
        arguments = (project, EnsembleState(states), input_ids[::copies])
        if config.num_beams > 1:
            ids, scores = beam_search(*arguments, processors, config)
        else:
            ids, scores = sample(*arguments, copies, processors, config, return_scores)
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)
