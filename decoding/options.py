"""Options of `generate()`: those of command line and recipe, and one plain form for the arguments of a call."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from metaphrase.modeling.pipeline_support import generation_settings, override_lengths, use_floats


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options by name, those of a `generation_config` among them. Plain options stay as they are.

    Options of the call override those of the `generation_config`. A length replaces the same length in tokens of another kind
    (`max_length`, `max_new_tokens`). `num_return_sequences=None` becomes 1, and integers become floats where floats are needed.

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
    use_floats(options)
    for name, value in options.items():
        # `generate()` accepts tensors, too.
        if name.endswith("_token_id") and isinstance(value, torch.Tensor):
            options[name] = value.tolist()
    return options


# Options of the command line.
GENERATION_OPTIONS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "length_penalty"),
    *("early_stopping", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "top_h", "repetition_penalty", "no_repeat_ngram_size"),
    *("renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "num_return_sequences"),
)
# Options that turn sampling on.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def complete_sampling(options: dict) -> dict:
    """Set `do_sample` if an option needs it and the caller has set neither it nor a loop, and then one beam if none are set.

    A model may have beams of its own, and sampling within beams is another search.
    """
    chosen = {name for name, value in options.items() if value is not None}
    if not chosen & {"do_sample", "custom_generate"} and chosen.intersection(_SAMPLING):
        beams = {} if "num_beams" in chosen else {"num_beams": 1}
        return {**options, "do_sample": True, **beams}
    return options
