"""Compiled steps of a search whose loop, in transformers, calls the model as it is: beam search.

transformers compiles the steps of greedy search and sampling by itself, with a cache of fixed shape.
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

# With the options of each, for as long as the model is there; not in the model, which is copied and saved.
_kept: weakref.WeakKeyDictionary[nn.Module, tuple[dict, Callable]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def compiled_steps(model: GenerationMixin, config: GenerationConfig, model_kwargs: dict) -> Iterator[None]:
    """Lets the calls of a model that read one token more be compiled ones meanwhile, where transformers would compile such steps.

    That is on an accelerator, or wherever a `compile_config` says so, with a static cache.

    Args:
        model: Whose loop runs meanwhile.
        config: Of the search, with `compile_config` and `disable_compile`.
        model_kwargs: Of the loop, with the cache.
    """
    # What is compiled already is called so, and greedy search and sampling see to it.
    is_elsewhere = config.num_beams == 1 or model._compiled_call_impl is not None
    if is_elsewhere or not model._valid_auto_compile_criteria(model_kwargs, config):
        yield
        return
    step = _compiled_step(model, config.compile_config or CompileConfig())

    def call(*args, **kwargs):
        cache = kwargs.get(CACHE_NAME)
        # The first call reads the prompt and the source: it is as long as these.
        is_step = isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values())
        return (step if is_step else nn.Module._call_impl)(model, *args, **kwargs)

    model._compiled_call_impl = call
    try:
        yield
    finally:
        # Another thread may have let go of it.
        vars(model).pop("_compiled_call_impl", None)


def _compiled_step(model: nn.Module, config: CompileConfig) -> Callable:
    """A call of a module, compiled, which takes the module first."""
    options, (kept_options, step) = config.to_dict(), _kept.get(model, (None, None))
    if kept_options != options:
        step = torch.compile(nn.Module._call_impl, **options)
        _kept[model] = options, step
    return step


def reorder_in_place(cache: Cache, rows: torch.Tensor) -> None:
    """Lets rows of a cache go on from others, `(rows)`; tensors of fixed shape stay where compiled code has them.

    Args:
        cache: Of the tokens so far.
        rows: Which one each of its rows goes on from.
    """
    for layer in cache.layers:
        if not layer.is_compileable:
            layer.reorder_cache(rows)
        elif layer.is_initialized:
            for states in (layer.keys, layer.values):
                states.copy_(states.index_select(0, rows.to(states.device)))
