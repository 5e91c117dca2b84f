"""Search states: what a search needs of a model, the same for Metaphrase models and for any other encoder-decoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.modeling_outputs import ModelOutput, Seq2SeqLMOutput

from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.fast_generation import is_metaphrase, obstacle, prepared_projection
from metaphrase.decoding.supported_processors import unknown_criteria, unknown_processors
from metaphrase.modeling.compat import CACHE_NAME, CACHE_NAMES

# Arguments of the network that a search gives itself, or that change nothing of what it computes.
_KNOWN = {"attention_mask", "encoder_outputs", "logits_to_keep", "use_cache", *CACHE_NAMES}
# What `generate()` can report of each step, and a search here does not keep.
_OF_EACH_STEP = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class SearchState(Protocol):
    """What the decoder keeps from token to token. `BeamState` is one."""

    def step(self, input_ids: torch.Tensor) -> Any:
        """Reads one token of each row, `(rows)`."""

    def spread(self, copies: int) -> None:
        """Gives each source so many targets, which are the same so far."""

    def reorder(self, rows: torch.Tensor) -> None:
        """Lets each row go on from another one of the same source, `(rows)`."""

    def select_sources(self, sources: torch.Tensor) -> None:
        """Goes on with these sources alone, `(sources)`, and their targets."""


class CachedState:
    """The state of any encoder-decoder of transformers, in its own cache; a step is its own forward pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        output_class: type[ModelOutput],
        memory: torch.Tensor,
        memory_mask: torch.Tensor | None,
        with_hidden_states: bool = False,
    ):
        """Starts with an empty cache.

        Args:
            model: Whose forward pass takes a cache.
            output_class: What the encoder's output is: that of a mixture of experts has parts that a model looks for.
            memory: What the encoder made of the sources, `(sources, source, hidden)`.
            memory_mask: 1 for a token, 0 for padding, `(sources, source)`.
            with_hidden_states: Whether steps also give the decoder's output.
        """
        self._model, self._output_class, self._memory, self._mask = model, output_class, memory, memory_mask
        self._with_hidden_states = with_hidden_states
        self._cache = EncoderDecoderCache(
            DynamicCache(config=model.config.get_text_config(decoder=True)), DynamicCache()
        )
        self._copies = 1

    def step(self, input_ids: torch.Tensor) -> Seq2SeqLMOutput:
        return self._model(
            encoder_outputs=self._output_class(last_hidden_state=self._memory),
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
            self._memory = self._memory.repeat_interleave(copies, dim=0)
            self._mask = None if self._mask is None else self._mask.repeat_interleave(copies, dim=0)
            self._copies *= copies

    def reorder(self, rows: torch.Tensor) -> None:
        # Rows of one source share its keys and values, so these stay.
        self._cache.self_attention_cache.reorder_cache(rows)

    def select_sources(self, sources: torch.Tensor) -> None:
        rows = (self._copies * sources[:, None] + torch.arange(self._copies, device=sources.device)).flatten()
        self._cache.batch_select_indices(rows)
        self._memory = self._memory.index_select(0, rows)
        self._mask = None if self._mask is None else self._mask.index_select(0, rows)


@dataclass(frozen=True)
class SearchInputs:
    """What a search starts from.

    Attributes:
        project: From what a step gives, and optionally the rows that are wanted, to logits `(rows, vocab)`.
        hidden_of: From what a step gives to the decoder's output `(rows, hidden)`.
        state: Of the sources, before the prompt.
        prompt: What each target begins with, `(sources, length)`.
    """

    project: Callable[..., torch.Tensor]
    hidden_of: Callable[[Any], torch.Tensor]
    state: SearchState
    prompt: torch.Tensor


def search_inputs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    with_hidden_states: bool = False,
) -> SearchInputs:
    """Makes of what `generate()` has prepared what a search starts from.

    Args:
        model: An encoder-decoder.
        input_ids: What the targets begin with, `(sources * copies, length)`.
        processors: Of `generate()`.
        criteria: Of `generate()`.
        config: As `generate()` prepared it.
        model_kwargs: Likewise, the arguments of the network.
        with_hidden_states: Whether `hidden_of` will be asked.

    Raises:
        ValueError: If something is asked for that these searches cannot do.
    """
    _check(model, processors, criteria, config, model_kwargs)
    copies = max(config.num_beams, config.num_return_sequences)
    prompt = input_ids[::copies]
    memory, mask = model_kwargs["encoder_outputs"].last_hidden_state, model_kwargs.get("attention_mask")
    if len(memory) != len(prompt):
        # Others than Metaphrase models repeat a source for each of its targets.
        memory, mask = memory[::copies], None if mask is None else mask[::copies]
    if len(memory) != len(prompt):
        raise ValueError(
            f"`decoder_input_ids` must have a row for each source in this search, got {len(prompt)} and {len(memory)}."
        )
    if is_metaphrase(model) and not obstacle(model, input_ids, processors, criteria, config, **model_kwargs):
        to_logits = prepared_projection(model)

        def project(hidden_states: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
            return to_logits(hidden_states if rows is None else hidden_states[rows])

        return SearchInputs(project, lambda step: step, BeamState(model.get_decoder(), memory, mask), prompt)

    def project(step: Seq2SeqLMOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        return step.logits[:, -1] if rows is None else step.logits[rows, -1]

    state = CachedState(model, type(model_kwargs["encoder_outputs"]), memory, mask, with_hidden_states)
    return SearchInputs(project, lambda step: step.decoder_hidden_states[-1][:, -1], state, prompt)


def search_output(
    ids: torch.Tensor, scores: torch.Tensor, config: GenerationConfig
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """What `generate()` returns: the ids, or, with `return_dict_in_generate`, also their scores."""
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
    if config.do_sample:
        raise ValueError("`do_sample` must be False for this search, got True.")
    for name in _OF_EACH_STEP:
        if getattr(config, name):
            raise ValueError(f"`{name}` must be False for this search, which keeps nothing of its steps, got True.")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"`cache_implementation` must be None or 'dynamic' for this search, got {config.cache_implementation!r}."
        )
    cache = model_kwargs.get(CACHE_NAME)
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"`{CACHE_NAME}` must be empty for this search, got a cache of {cache.get_seq_length()} tokens."
        )
    # Sources leave the batch when they are done, so that a row's place says nothing.
    others = (
        ("logits_processor", unknown_processors(processors)),
        ("stopping_criteria", unknown_criteria(criteria, config)),
    )
    for name, unknown in others:
        if unknown:
            names = ", ".join(sorted({type(each).__name__ for each in unknown}))
            raise ValueError(
                f"`{name}` must look at each row by itself in this search, and follow from the options of generation, "
                f"as {names} may not do."
            )
    unknown = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN)
    if unknown:
        raise ValueError(f"`model_kwargs` must be among {sorted(_KNOWN)} in this search, got {unknown}.")
