"""Decoding settings: how the model of a run decodes, from its recipe and from what a base model brings along."""

import logging
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)

# Settings that apply to one way to decode alone, each with the value that says nothing.
_OF_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
_OF_SAMPLING |= {"eta_cutoff": 0.0, "min_p": None, "top_h": None}
_OF_BEAMS = {"length_penalty": 1.0, "early_stopping": False, "num_beam_groups": 1, "diversity_penalty": 0.0}
_OF_DETAILED_RESULTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")


def settle_decoding(model: PreTrainedModel, recipe: Recipe, max_length: int, languages: Mapping[str, int]) -> None:
    """Gives a model the settings that it decodes by, so that no checkpoint can fail for them.

    transformers saves no settings that contradict each other. Those of a base model that do not apply any more, such as the
    `length_penalty` of a summarizer that is to search greedily, are left out, and a warning names them.

    Args:
        model: Whose generation config is changed.
        recipe: Its own settings go over those of the model.
        max_length: Most tokens that decoding writes, the start token included.
        languages: What `set_languages` said.

    Raises:
        ValueError: If a setting of the recipe is one of beams and the model decodes without, or what is left is not valid.
    """
    config, own = model.generation_config, recipe.generation_options()
    if recipe.generation_max_length is not None:
        # It would go over `max_length`.
        config.max_new_tokens = None
    for name, value in {"max_length": max_length, **own, **languages}.items():
        setattr(config, name, value)
    if own.get("length_penalty", 1.0) != 1.0 and (config.num_beams or 1) == 1:
        raise ValueError(
            f"`length_penalty` must come with `num_beams` above 1, got {own['length_penalty']} and {config.num_beams or 1}."
        )
    _leave_out_what_says_nothing(config)
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"The generation settings of {recipe.model_name_or_path or 'the model'} must be such that transformers saves them. "
            f"It says: {error}"
        ) from error


def _leave_out_what_says_nothing(config: GenerationConfig) -> None:
    dropped = {}
    for name, silent in _without_effect(config).items():
        value = getattr(config, name, None)
        if value is not None and value != silent:
            dropped[name] = value
            setattr(config, name, None)
    if dropped:
        logger.warning(
            "Of the base model's generation settings these are left out, since they say nothing beside the others: %s.",
            ", ".join(f"{name} {value}" for name, value in dropped.items()),
        )


def _without_effect(config: GenerationConfig) -> dict[str, Any]:
    """Names of settings that the others leave without effect, each with its silent value."""
    beams, samples = config.num_beams or 1, config.do_sample is True
    silent: dict[str, Any] = {}
    if not samples:
        # Contrastive search has a `top_k` too, but transformers does not save that.
        silent |= {**_OF_SAMPLING, "penalty_alpha": None}
    if beams == 1:
        silent |= _OF_BEAMS
    if (config.num_return_sequences or 1) > beams and not (samples and beams == 1):
        silent["num_return_sequences"] = 1
    if config.use_cache is False:
        silent |= {"cache_implementation": None, "cache_config": None}
    if config.return_dict_in_generate is not True:
        silent |= dict.fromkeys(_OF_DETAILED_RESULTS, False)
    return silent


def length_limit(config: GenerationConfig) -> int | None:
    """The most tokens that decoding writes: those of `max_new_tokens`, or else of `max_length` with the start token."""
    return config.max_length if config.max_new_tokens is None else config.max_new_tokens
