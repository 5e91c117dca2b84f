"""Joint search: what an ensemble and a draft model have in common. Several models read a source and write one target."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.fast_generation import (
    calls_are_plain,
    computing_dtype,
    is_metaphrase,
    obstacle,
    prepared_projection,
)
from metaphrase.tokenization import TokenizerPair

# From a decoder's output to logits.
Projection = Callable[[torch.Tensor], torch.Tensor]

# What a model has to say in the same way as another one, so that the ids of their targets mean the same.
_SHARED_FIELDS = ("decoder_vocab_size", "decoder_start_token_id", "eos_token_id")


@dataclass(frozen=True, eq=False)
class Partner:
    """Another model that takes part in a search.

    Attributes:
        model: A Metaphrase model, of the same target vocabulary as the first one.
        sources: The ids of each source as this model reads it, with its end of sequence.
    """

    model: PreTrainedModel
    sources: Sequence[Sequence[int]]


def check_partner(model: PreTrainedModel, other: PreTrainedModel, name: str) -> None:
    """Checks that two models can write a target together.

    Args:
        model: The first one, whose settings hold.
        other: The other one.
        name: What it was given as.

    Raises:
        ValueError: If one of them is no Metaphrase model, or they differ in special ids, vocabulary or device.
    """
    for each in (model, other):
        if not is_metaphrase(each):
            raise ValueError(
                f"`{name}` must be a Metaphrase model, and so must the model that it goes with, got {type(each).__name__}: "
                "`metaphrase convert` makes one of it."
            )
    for field in _SHARED_FIELDS:
        expected, given = getattr(model.config, field), getattr(other.config, field)
        if given != expected:
            raise ValueError(f"`{field}` of `{name}` must be that of the first model, {expected}, got {given}.")
    if other.device != model.device:
        raise ValueError(f"`{name}` must be on the device of the first model, {model.device}, got {other.device}.")


def check_target_vocabulary(tokenizers: TokenizerPair, others: TokenizerPair, name: str) -> None:
    """Checks that the ids of two models' targets mean the same.

    Raises:
        ValueError: If a token has another id, or none, on one of the two sides. The message names one.
    """
    expected, given = tokenizers.target.get_vocab(), others.target.get_vocab()
    different = [token for token in {**expected, **given} if expected.get(token) != given.get(token)]
    if different:
        token = min(different)
        raise ValueError(
            f"The target vocabulary of `{name}` must be that of the first model, got {len(different)} tokens that differ: "
            f"{token!r} is {given.get(token)} in place of {expected.get(token)}."
        )


class JointSearch(abc.ABC):
    """A search by several models, for `generate(custom_generate=...)` of the first one."""

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

        Args:
            model: The first model, whose `generate()` has read its sources already.
            input_ids: Prompts, `(sources * copies, length)`; the next three are from `generate()`, too.
            logits_processor: Change the scores.
            stopping_criteria: Those of length and end of sequence.
            generation_config: As `generate()` prepares it.
            partners: The other models, with `input_ids` and `attention_mask` of the same sources, `(sources, source)`.
            return_scores: Whether scores are wanted.
            **kwargs: From `generate()`, `encoder_outputs` among them.

        Returns:
            `sequences`, and in `sequences_scores` their scores, as a single model has them.

        Raises:
            ValueError: If something is asked for that only transformers' own loops can do, with one model.
        """
        states = self._open_states(
            model, input_ids, logits_processor, stopping_criteria, generation_config, partners, kwargs
        )
        projections = [prepared_projection(each) for each in (model, *(partner for partner, _ in partners))]
        ids, scores = self.search(projections, states, input_ids, logits_processor, generation_config, return_scores)
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)

    @abc.abstractmethod
    def state_class(self, config: GenerationConfig) -> type[DecoderState]:
        """What each decoder keeps."""

    @abc.abstractmethod
    def search(
        self,
        projections: Sequence[Projection],
        states: Sequence[DecoderState],
        prompt: torch.Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        return_scores: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids `(sources * copies, length)` and their scores `(sources * copies)`.

        Args:
            projections: Of each model.
            states: Likewise, before the prompt; a source has one row.
            prompt: What each target begins with, `(sources * copies, length)`.
            processors: Change the scores.
            config: As `generate()` prepares it.
            return_scores: Whether scores are wanted.

        Raises:
            ValueError: If this search cannot do what is asked for.
        """

    def _open_states(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        partners: Sequence[tuple[PreTrainedModel, dict[str, torch.Tensor]]],
        model_kwargs: dict,
    ) -> list[DecoderState]:
        """The states of all models before the prompt, that of the first one in front."""
        if obstacle(model, input_ids, processors, criteria, config, **model_kwargs):
            names = [type(part).__name__ for part in (*processors, *criteria)]
            raise ValueError(
                "A search over several models must be one that Metaphrase does itself (greedy, by beams or sampling; in float32 "
                "or bfloat16; a dynamic cache; without streamers, hooks or attention kernels for padding masks alone), "
                f"got {model.dtype}, {model.config._attn_implementation}, processors and criteria {names}, "
                f"num_beams={config.num_beams}, do_sample={config.do_sample}, use_cache={config.use_cache}."
            )
        memories = [(model, model_kwargs["encoder_outputs"].last_hidden_state, model_kwargs.get("attention_mask"))]
        for partner, inputs in partners:
            dtype, is_plain = computing_dtype(partner), calls_are_plain(partner)
            if dtype not in (torch.float32, torch.bfloat16) or partner.training or not is_plain:
                raise ValueError(
                    "All models of a search must be in float32 or bfloat16, not in training and without hooks, "
                    f"got one with dtype={dtype}, training={partner.training}, hooks={not is_plain}."
                )
            memories.append((partner, partner.get_encoder()(**inputs).last_hidden_state, inputs["attention_mask"]))
        state_class = self.state_class(config)
        return [state_class(each.get_decoder(), memory, mask) for each, memory, mask in memories]
