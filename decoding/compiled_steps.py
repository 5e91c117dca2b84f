"""Compiled decoding steps for transformers' beam search. transformers itself compiles greedy search and sampling only.

They are meant for accelerators, where the gain has not been measured.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import CompileConfig, GenerationMixin

from metaphrase.modeling.compat import CACHE_NAME

# Compile options and compiled call of each model. A model does not store them, because it is copied and saved.
_compiled: weakref.WeakKeyDictionary[nn.Module, tuple[dict, Callable]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def compiled_steps(model: GenerationMixin, config: GenerationConfig, model_kwargs: dict) -> Iterator[None]:
    """Compile the decoding steps of a model where transformers would compile the steps of greedy search.

    This is the case with a static cache, on an accelerator or with a `compile_config` that says so.

    Args:
        model: The model whose loop runs in the context.
        config: Configuration of the search.
        model_kwargs: Arguments of the loop, with the cache.
    """
    # transformers uses `_compiled_call_impl` for greedy search and sampling, and `torch.compile(model)` sets it.
    is_compiled = config.num_beams == 1 or model._compiled_call_impl is not None
    if is_compiled or not model._valid_auto_compile_criteria(model_kwargs, config):
        yield
        return
    step = _compiled_step(model, config.compile_config or CompileConfig())

    def call(*args, **kwargs):
        cache = kwargs.get(CACHE_NAME)
        # The prefill has the lengths of prompt and source, and is not compiled.
        is_step = isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values())
        return (step if is_step else nn.Module._call_impl)(model, *args, **kwargs)

    model._compiled_call_impl = call
    try:
        yield
    finally:
        # Another thread may have removed the attribute.
        vars(model).pop("_compiled_call_impl", None)


def _compiled_step(model: nn.Module, config: CompileConfig) -> Callable:
    """Return the compiled call of a model, whose first argument is the model."""
    options = config.to_dict()
    compiled_options, step = _compiled.get(model, (None, None))
    if compiled_options != options:
        step = torch.compile(nn.Module._call_impl, **options)
        _compiled[model] = options, step
    return step


def reorder_in_place(cache: Cache, rows: torch.Tensor) -> None:
    """Replace the rows of a cache by the rows with these indices, (rows,). Static tensors keep their addresses.

    Compiled code refers to the addresses.
    """
    for layer in cache.layers:
        if not layer.is_compileable:
            layer.reorder_cache(rows)
        elif layer.is_initialized:
            for states in (layer.keys, layer.values):
                states.copy_(states.index_select(0, rows.to(states.device)))
