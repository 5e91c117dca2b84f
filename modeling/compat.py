"""The switch between versions of transformers: 5.24 renames `past_key_values` to `cache`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

from transformers.cache_utils import Cache
from transformers.modeling_outputs import Seq2SeqLMOutput

CACHE_NAMES = ("past_key_values", "cache")
_FIELDS = {field.name for field in dataclasses.fields(Seq2SeqLMOutput)}
# The name in the outputs and generation loops of this version.
CACHE_NAME = next(name for name in reversed(CACHE_NAMES) if name in _FIELDS)


def takes_cache(forward: Callable) -> Callable:
    """Let a forward method take its parameter `past_key_values` by the name `cache`, too."""

    @functools.wraps(forward)
    def forward_with_either_name(*args, **kwargs):
        if "cache" in kwargs:
            cache = kwargs.pop("cache")
            if cache is not None:
                kwargs["past_key_values"] = cache
        return forward(*args, **kwargs)

    # transformers reads the signature to select arguments.
    signature = inspect.signature(forward)
    *parameters, kwargs_parameter = signature.parameters.values()
    cache = inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Cache | None)
    forward_with_either_name.__signature__ = signature.replace(parameters=[*parameters, cache, kwargs_parameter])
    return forward_with_either_name
