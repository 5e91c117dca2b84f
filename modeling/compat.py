"""Names that differ between versions of torch and transformers, and private names of theirs that the network needs.

- `past_key_values` is called `cache` from transformers 5.24 on.
- `varlen_attn` takes `is_causal` before torch 2.13, and `window_size` from then on.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import BatchEncoding, PreTrainedTokenizerBase
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


@functools.cache
def varlen_causal() -> dict[str, bool | tuple[int, int]]:
    """Return the argument by which `varlen_attn` hides later tokens."""
    names = inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}


def is_hooked(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks, or a `forward` that somebody put in the place of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or nn.modules.module._has_any_global_hook()


def is_offloaded(module: nn.Module) -> bool:
    """Return True if accelerate brings the module's weights before each call."""
    return "_hf_hook" in vars(module)


def has_own_weight(module: nn.Module) -> bool:
    """Return True if `weight` is a parameter of the module itself, not one that a parametrization or an adapter computes."""
    return "weight" in module._parameters


def is_loaded(weight: torch.Tensor) -> bool:
    """Return True if a checkpoint filled the weight."""
    return getattr(weight, "_is_hf_initialized", False)


class Float32Buffers(nn.Module):
    """A module whose own buffers keep their dtype when the model is cast, as if it was loaded in that dtype."""

    def _apply(self, fn, recurse=True):
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != before[name].dtype:
                setattr(self, name, before[name].to(buffer.device))
        return self


def softmax_gradient(gradient: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return the gradient of scores, `(..., entries)`, from that of their softmax over the last axis."""
    return torch._softmax_backward_data(gradient, probabilities, -1, gradient.dtype)


def translation_inputs(tokenizer: PreTrainedTokenizerBase, text: str, **options) -> BatchEncoding:
    """Encode a text by a tokenizer of many languages, with the codes of `src_lang` and `tgt_lang`."""
    return tokenizer._build_translation_inputs(text, **options)
