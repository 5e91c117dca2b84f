"""Options of `generate()`: those of command line and recipe, and one plain form for the arguments of a call."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.hf_argparser import string_to_bool

from metaphrase.modeling.pipeline_support import generation_settings, override_lengths


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options by name, those of a `generation_config` among them. Plain options stay as they are.

    Options of the call override those of the `generation_config`. A length replaces the same length in tokens of another kind
    (`max_length`, `max_new_tokens`). `num_return_sequences=None` becomes 1.

    Args:
        options: Arguments of `generate()`.

    Raises:
        ValueError: If `generation_config` is not a `GenerationConfig`.
    """
    options = override_lengths(options)
    config = options.pop("generation_config", None)
    if config is not None:
        if not isinstance(config, GenerationConfig):
            raise ValueError(f"`generation_config` must be a GenerationConfig, got {type(config).__name__}.")
        settings = {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}
        settings.pop("transformers_version", None)
        # A config may hold both lengths. As in `generate()`, new tokens override.
        for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if new_tokens in settings:
                settings.pop(length, None)
        # A caller's own search may read settings that transformers does not know.
        unknown = {name: settings.pop(name) for name in settings.keys() - generation_settings()}
        if unknown:
            options["generation_config"] = GenerationConfig(**unknown)
        options = override_lengths(settings) | options
    if options.get("num_return_sequences", 1) is None:
        options["num_return_sequences"] = 1
    for name, value in options.items():
        # `generate()` accepts tensors, too.
        if name.endswith("_token_id") and isinstance(value, torch.Tensor):
            options[name] = value.tolist()
    return options


def bool_or_never(word: str) -> bool | str:
    """Parse a value of `early_stopping`."""
    return word if word == "never" else string_to_bool(word)


# For each option of command line and recipe its type and its help text.
GENERATION_OPTIONS: dict[str, tuple[Callable, str]] = {
    "max_length": (int, "maximum tokens of a target"),
    "max_new_tokens": (int, "maximum tokens of a target, without the start token"),
    "min_length": (int, "minimum tokens of a target"),
    "min_new_tokens": (int, "minimum tokens of a target, without the start token"),
    "num_beams": (int, "beam size; 1 is greedy search or sampling"),
    "length_penalty": (float, "exponent of the length that divides the score of a beam"),
    "num_beam_groups": (int, "number of beam groups for diverse beam search"),
    "diversity_penalty": (float, "penalty of diverse beam search for a token that another group chose in this step"),
    "early_stopping": (
        bool_or_never,
        "stop a sentence at num_beams finished candidates; never: stop when no better candidate is possible",
    ),
    "do_sample": (bool, "sample instead of taking the most probable token"),
    "temperature": (float, "divide the logits by this value before sampling"),
    "top_k": (int, "sample from the k most probable tokens; number of candidates in contrastive search"),
    "top_p": (float, "sample from the most probable tokens with this total probability (nucleus sampling)"),
    "min_p": (float, "sample from tokens with at least this share of the highest probability"),
    "typical_p": (float, "sample from the most typical tokens with this total probability"),
    "epsilon_cutoff": (float, "sample from tokens with at least this probability"),
    "eta_cutoff": (float, "as epsilon_cutoff, with a lower threshold for a flat distribution"),
    "top_h": (float, "sample from the most probable tokens with at most this share of the entropy"),
    "penalty_alpha": (float, "weight of the degeneration penalty in contrastive search; needs top_k"),
    "repetition_penalty": (float, "divide the scores of earlier tokens by this value"),
    "no_repeat_ngram_size": (int, "forbid to repeat an n-gram of this size"),
    "renormalize_logits": (bool, "normalize the probabilities after the other options have changed them"),
    "forced_bos_token_id": (int, "id of the first token of every target, such as a language"),
    "forced_eos_token_id": (int, "id of the last token of a target at the length limit"),
    "num_return_sequences": (int, "number of targets for each source"),
}
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("num_beams", "num_return_sequences"), lambda value: value >= 1, "at least 1"),
    (("top_p", "typical_p"), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    (("epsilon_cutoff", "eta_cutoff"), lambda value: 0 <= value < 1, "at least 0 and below 1"),
)
# Options that turn sampling on. With `penalty_alpha`, `top_k` belongs to contrastive search.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def complete_sampling(options: dict) -> dict:
    """Set `do_sample` if an option needs it and the caller has set neither it nor a loop."""
    chosen = {name for name, value in options.items() if value is not None}
    names = [name for name in _SAMPLING if name != "top_k" or "penalty_alpha" not in chosen]
    if not chosen & {"do_sample", "custom_generate"} and chosen.intersection(names):
        return {**options, "do_sample": True}
    return options


def check_ranges(options: Mapping[str, Any]) -> None:
    """Check values that `generate()` would silently ignore, or reject late.

    Raises:
        ValueError: If a value is out of range.
    """
    for names, is_within, bounds in _RANGES:
        for name in names:
            if options.get(name) is not None and not is_within(options[name]):
                raise ValueError(f"`{name}` must be {bounds}, got {options[name]}.")
