"""Joint search: several models read a source and write one target. Base of speculative decoding, and ensembles."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.beam_search import BeamState, beam_search
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.fast_generation import (
    encoded_sources,
    find_obstacle,
    find_obstacle_of_model,
    prepared_projections,
)
from metaphrase.decoding.sampling import sample


@dataclass(frozen=True, eq=False)
class Partner:
    """Another model of a search.

    Attributes:
        model: A Metaphrase model with the first model's target vocabulary.
        sources: Ids of each source for this model, with its end of sequence.
    """

    model: PreTrainedModel
    sources: Sequence[Sequence[int]]


def start_search(
    state_class: type[DecoderState],
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    partners: Sequence[tuple[PreTrainedModel, dict[str, torch.Tensor]]],
    **kwargs,
) -> tuple[list[Callable[[torch.Tensor], torch.Tensor]], list[DecoderState]]:
    """Return for each model a function from the decoder's output to logits, and its state before the prompt.

    Args:
        state_class: Class of the states, which have one row per source.
        model: The first model. `generate()` calls a search with it, and with the next four arguments and `kwargs`.
        partners: The other models, with `input_ids` and `attention_mask` (sources, S) of the same sources.

    Raises:
        ValueError: If an option needs transformers' own loops, which know one model.
    """
    models = [model, *(partner for partner, _ in partners)]
    obstacle = find_obstacle(model, input_ids, logits_processor, stopping_criteria, config, **kwargs)
    if obstacle := next(filter(None, [obstacle, *map(find_obstacle_of_model, models[1:])]), None):
        raise ValueError(
            "A search with several models must be greedy, by beams or sampling, in float32 or bfloat16, with a dynamic "
            f"cache, and without streamers and hooks. Not supported here: {obstacle}."
        )
    encoded = [encoded_sources(kwargs, max(config.num_beams, config.num_return_sequences))]
    for partner, inputs in partners:
        encoded.append((partner.get_encoder()(**inputs).last_hidden_state, inputs["attention_mask"]))
    states = [state_class(item.get_decoder(), *source) for item, source in zip(models, encoded, strict=True)]
    return [prepared_projections(item)[0] for item in models], states


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


class EnsembleSearch:
    """Greedy search, sampling and beam search over the mean probability, for `generate(custom_generate=...)`.

    Source: Sutskever et al. 2014, arXiv 1409.3215.
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
        """Search with the model and its partners as `fast_generation.search` does. Errors are those of `start_search`."""
        config, processors = generation_config, logits_processor
        arguments = (model, input_ids, processors, stopping_criteria, config, partners)
        projections, states = start_search(BeamState if config.num_beams > 1 else DecoderState, *arguments, **kwargs)

        def project(hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
            logits = torch.stack(
                [head(hidden) for head, hidden in zip(projections, hidden_states, strict=True)]
            ).float()
            mean = logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))
            if config.num_beams > 1 or not processors:
                # The processors of beam search read log-probabilities.
                return mean
            # Restore the size of logits, which matters for processors such as the repetition penalty.
            return mean + logits.logsumexp(dim=-1, keepdim=True).mean(dim=0)

        copies, state = len(input_ids) // states[0].rows, EnsembleState(states)
        if config.num_beams > 1:
            ids, scores = beam_search(project, state, input_ids[::copies], processors, config)
        else:
            ids, scores = sample(project, state, input_ids[::copies], copies, processors, config, return_scores)
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)
