"""What transformers calls the keys and values so far: `past_key_values`, and `cache` from 5.24 on."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

from transformers.cache_utils import Cache
from transformers.modeling_outputs import Seq2SeqLMOutput

CACHE_NAMES = ("past_key_values", "cache")
_FIELDS = {field.name for field in dataclasses.fields(Seq2SeqLMOutput)}
# The name in its outputs, and in what its loops of generation hand on.
CACHE_NAME = next(name for name in reversed(CACHE_NAMES) if name in _FIELDS)


def takes_cache(forward: Callable) -> Callable:
    """Lets a forward pass with a parameter `past_key_values` have it by either name, whatever version it runs with.

    Raises:
        ValueError: When it gets both.
    """

    @functools.wraps(forward)
    def renamed(*args, **kwargs):
        if "cache" in kwargs:
            cache = kwargs.pop("cache")
            if cache is not None and kwargs.get("past_key_values") is not None:
                raise ValueError("`cache` must not be given beside `past_key_values`, which is the same, got both.")
            if cache is not None:
                kwargs["past_key_values"] = cache
        return forward(*args, **kwargs)

    # transformers looks there for what a model can be told.
    signature = inspect.signature(forward)
    *parameters, others = signature.parameters.values()
    named = inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Cache | None)
    renamed.__signature__ = signature.replace(parameters=[*parameters, named, others])
    return renamed
