"""Joint search: several models read a source and write one target. Base of speculative decoding, and ensembles."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.beam_search import BeamState, beam_search
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.fast_generation import find_obstacle, find_obstacle_of_model, prepared_projections
from metaphrase.decoding.sampling import sample

ENSEMBLE_MEANS = ("linear", "log_linear")


@dataclass(frozen=True, eq=False)
class Partner:
    """Another model of a search.

    Attributes:
        model: A Metaphrase model with the first model's target vocabulary.
        sources: Ids of each source for this model, with its end of sequence.
    """

    model: PreTrainedModel
    sources: Sequence[Sequence[int]]


class JointSearch:
    """A search with several models, for `generate(custom_generate=...)` of the first model.

    Subclasses define `search`.
    """

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
        """Search with all models.

        Args:
            model: The first model.
            input_ids: Prompts (sources * copies, length), from `generate()` like the next three arguments and `kwargs`.
            logits_processor: Applied to the joint scores.
            stopping_criteria: Length and end of sequence only.
            generation_config: The prepared generation config.
            partners: The other models, with `input_ids` and `attention_mask` (sources, S) of the same sources.
            return_scores: True if scores are needed.
            **kwargs: Arguments of the network, `encoder_outputs` among them.

        Returns:
            `sequences`, and their `sequences_scores`, as for a single model.

        Raises:
            ValueError: If an option needs transformers' own loops, which know one model, or this search does not support it.
        """
        config, copies = generation_config, max(generation_config.num_beams, generation_config.num_return_sequences)
        models = [model, *(partner for partner, _ in partners)]
        obstacle = find_obstacle(model, input_ids, logits_processor, stopping_criteria, config, **kwargs)
        if obstacle := next(filter(None, [obstacle, *map(find_obstacle_of_model, models[1:])]), None):
            raise ValueError(
                "A search with several models must be greedy, by beams or sampling, in float32 or bfloat16, with a dynamic "
                f"cache, and without streamers and hooks. Not supported here: {obstacle}."
            )
        mask = kwargs.get("attention_mask")
        # `generate()` repeats a source for each of its hypotheses, which share it here.
        encoded = [(kwargs["encoder_outputs"][0][::copies].contiguous(), None if mask is None else mask[::copies])]
        for partner, inputs in partners:
            encoded.append((partner.get_encoder()(**inputs).last_hidden_state, inputs["attention_mask"]))
        state_class = self.state_class(config)
        states = [state_class(item.get_decoder(), *source) for item, source in zip(models, encoded, strict=True)]
        projections = [prepared_projections(item)[0] for item in models]
        ids, scores = self.search(projections, states, input_ids, logits_processor, config, return_scores)
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)

    def state_class(self, config: GenerationConfig) -> type[DecoderState]:
        """Return the class of the decoders' states."""
        return BeamState if config.num_beams > 1 else DecoderState

    def search(
        self,
        projections: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        states: Sequence[DecoderState],
        prompt: torch.Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        return_scores: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ids (sources * copies, length) and their scores (sources * copies,).

        Args:
            projections: For each model a function from the decoder's output to logits.
            states: State of each model before the prompt, with one row per source.
            prompt: First ids of each target, shape (sources * copies, length).
            processors: Applied to the joint scores.
            config: The prepared generation config.
            return_scores: True if scores are needed.
        """
        raise NotImplementedError


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
