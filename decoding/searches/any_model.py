"""Inputs and state of a search, for Metaphrase models and for any other encoder-decoder of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.modeling_outputs import ModelOutput, Seq2SeqLMOutput

from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.fast_generation import SUPPORTED_ARGUMENTS, is_metaphrase, obstacle, prepared_projections
from metaphrase.decoding.supported_processors import unknown_criteria, unknown_processors
from metaphrase.modeling.compat import CACHE_NAME


class CachedState:
    """`BeamState` for any encoder-decoder of transformers. A step is a forward pass with transformers' cache.

    Args:
        model: Its forward pass takes a cache.
        output_class: Class of the encoder's output. A mixture of experts looks for extra fields.
        encoder_output: Shape (sources, S, H).
        encoder_mask: 1 for a token, 0 for padding, shape (sources, S).
        with_hidden_states: True if steps also return the decoder's output.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        output_class: type[ModelOutput],
        encoder_output: torch.Tensor,
        encoder_mask: torch.Tensor | None,
        with_hidden_states: bool = False,
    ):
        self._model, self._output_class, self._mask = model, output_class, encoder_mask
        self._encoder_output, self._with_hidden_states = encoder_output, with_hidden_states
        self._cache = EncoderDecoderCache(
            DynamicCache(config=model.config.get_text_config(decoder=True)), DynamicCache()
        )
        self._copies = 1

    def step(self, input_ids: torch.Tensor) -> Seq2SeqLMOutput:
        return self._model(
            encoder_outputs=self._output_class(last_hidden_state=self._encoder_output),
            attention_mask=self._mask,
            decoder_input_ids=input_ids[:, None],
            **{CACHE_NAME: self._cache},
            use_cache=True,
            output_hidden_states=self._with_hidden_states,
            return_dict=True,
        )

    def spread(self, copies: int) -> None:
        if copies > 1:
            self._cache.batch_repeat_interleave(copies)
            self._encoder_output = self._encoder_output.repeat_interleave(copies, dim=0)
            self._mask = None if self._mask is None else self._mask.repeat_interleave(copies, dim=0)
            self._copies *= copies

    def reorder(self, rows: torch.Tensor) -> None:
        # Rows of one source share its cross-attention cache.
        self._cache.self_attention_cache.reorder_cache(rows)

    def select_sources(self, sources: torch.Tensor) -> None:
        rows = (self._copies * sources[:, None] + torch.arange(self._copies, device=sources.device)).flatten()
        self._cache.batch_select_indices(rows)
        self._encoder_output = self._encoder_output.index_select(0, rows)
        self._mask = None if self._mask is None else self._mask.index_select(0, rows)


def search_inputs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    with_hidden_states: bool = False,
) -> tuple[BeamState | CachedState, Callable[..., torch.Tensor], Callable[[Any], torch.Tensor], torch.Tensor]:
    """Return a search's inputs from the arguments that `generate()` prepares.

    Args:
        model: An encoder-decoder.
        input_ids: First ids of the targets, shape (sources * copies, length).
        processors: The logits processors.
        criteria: The stopping criteria.
        config: The prepared generation config.
        model_kwargs: Arguments of the network.
        with_hidden_states: True if the search needs the decoder's output.

    Returns:
        state: State before the prompt.
        project: Maps a step's result, and optionally the wanted rows, to logits (rows, V).
        hidden_of: Maps a step's result to the decoder's output (rows, H).
        prompt: First ids of each target, (sources, length).

    Raises:
        ValueError: If these searches do not support an option.
    """
    _check(model, processors, criteria, config, model_kwargs)
    copies = max(config.num_beams, config.num_return_sequences)
    prompt = input_ids[::copies]
    encoder_output, mask = model_kwargs["encoder_outputs"].last_hidden_state, model_kwargs.get("attention_mask")
    if len(encoder_output) != len(prompt):
        # Only Metaphrase models do not repeat a source for each of its targets.
        encoder_output, mask = encoder_output[::copies], None if mask is None else mask[::copies]
    if len(encoder_output) != len(prompt):
        rows = f"{len(prompt)} and {len(encoder_output)}"
        raise ValueError(f"`decoder_input_ids` must have a row for each source in this search, got {rows}.")
    if is_metaphrase(model) and not obstacle(model, input_ids, processors, criteria, config, **model_kwargs):
        state, (to_logits, _) = BeamState(model.get_decoder(), encoder_output, mask), prepared_projections(model)
        return state, lambda step, rows=slice(None): to_logits(step[rows]), lambda step: step, prompt
    state = CachedState(model, type(model_kwargs["encoder_outputs"]), encoder_output, mask, with_hidden_states)
    return (
        state,
        lambda step, rows=slice(None): step.logits[rows, -1],
        lambda step: step.decoder_hidden_states[-1][:, -1],
        prompt,
    )


def search_output(
    ids: torch.Tensor, scores: torch.Tensor, config: GenerationConfig
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """Return the result of `generate()`: the ids, and with `return_dict_in_generate` also their scores."""
    if not config.return_dict_in_generate:
        return ids
    return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)


def _check(
    model: PreTrainedModel,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    if not model.config.is_encoder_decoder:
        raise ValueError(f"`model` must be an encoder-decoder, got {type(model).__name__}.")
    # These searches do not sample, and do not record decoding steps.
    for name in ("do_sample", "output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ValueError(f"`{name}` must be False for this search, got True.")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"`cache_implementation` must be None or 'dynamic' for this search, got {config.cache_implementation!r}."
        )
    cache = model_kwargs.get(CACHE_NAME)
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"`{CACHE_NAME}` must be empty for this search, got a cache of {cache.get_seq_length()} tokens."
        )
    # Finished sources leave the batch, so that a row's index changes.
    for name, unknown in (
        ("logits_processor", unknown_processors(processors)),
        ("stopping_criteria", unknown_criteria(criteria, config)),
    ):
        if unknown:
            names = ", ".join(sorted({type(item).__name__ for item in unknown}))
            raise ValueError(
                f"`{name}` must treat each row alone in this search and follow from generation options, got {names}."
            )
    names = {name for name, value in model_kwargs.items() if value is not None} - SUPPORTED_ARGUMENTS
    if names:
        known = sorted(SUPPORTED_ARGUMENTS)
        raise ValueError(f"`model_kwargs` must be among {known} in this search, got {sorted(names)}.")
