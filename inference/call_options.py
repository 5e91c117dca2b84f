"""Call options: what `generate()` is asked for in a call, in one form, however it was said."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from metaphrase.modeling.pipeline_options import generation_settings, with_lengths


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting by its own name. What has this form already keeps it.

    The settings of a `generation_config` stand beside the others, which come first, as in `generate()`. A length takes the place
    of the other kind's, which the model or that config may have. No number of targets is one.

    Args:
        options: Arguments of `generate()`.

    Raises:
        ValueError: If `generation_config` is something else.
    """
    options = with_lengths(options)
    config = options.pop("generation_config", None)
    if config is not None:
        if not isinstance(config, GenerationConfig):
            raise ValueError(f"`generation_config` must be a GenerationConfig, got {type(config).__name__}.")
        settings = {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}
        settings.pop("transformers_version", None)
        # A copy of the model's own in which one of them was set holds both: new tokens come first, as in `generate()`.
        for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if new_tokens in settings:
                settings.pop(length, None)
        # What transformers does not know itself, a search of the caller's own may read.
        unknown = {name: settings.pop(name) for name in settings.keys() - generation_settings()}
        if unknown:
            options["generation_config"] = GenerationConfig(**unknown)
        options = with_lengths(settings) | options
    if options.get("num_return_sequences", 1) is None:
        options["num_return_sequences"] = 1
    for name, value in options.items():
        # `generate()` takes tensors, too.
        if name.endswith("_token_id") and isinstance(value, torch.Tensor):
            options[name] = value.tolist()
    return options
