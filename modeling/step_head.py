"""The projection of a decoder's output to logits, made ready for steps of one token."""

import functools
import operator
import weakref
from collections.abc import Callable

import torch
from torch import nn

from .shortlist import ShortlistProjection, can_shortlist
from .step_linear import StepLinear
from .weight_record import WeightRecord

# There is one head, and it takes a good part of a step: it may be larger than a layer's weight and still be worth a copy.
_LARGEST_COPY = 2**26


class _ReadyHead:
    """A head, and what was made of its weights, as soon as it was asked for."""

    def __init__(self, head: nn.Module):
        self.head, self._kind, self._weights = head, type(head), list(head.parameters())
        self._can_copy = self._kind is nn.Linear and not any(weight.is_inference() for weight in self._weights)
        self._can_copy = self._can_copy and head.weight.device.type == "cpu" and head.weight.is_contiguous()
        self._record = WeightRecord(self._weights if self._can_copy else [])

    @functools.cached_property
    def linear(self) -> StepLinear:
        return StepLinear([self.head], self._can_copy, largest=_LARGEST_COPY, largest_transposed=_LARGEST_COPY)

    @functools.cached_property
    def shortlist(self) -> ShortlistProjection | None:
        return ShortlistProjection(self.head) if self._can_copy and can_shortlist(self.head) else None

    def is_current(self, head: nn.Module) -> bool:
        """Whether the head is the same, with the same weights."""
        if head is not self.head or type(head) is not self._kind:
            return False
        weights = list(head.parameters())
        is_same = len(weights) == len(self._weights) and all(map(operator.is_, weights, self._weights))
        return is_same and self._record.is_current()


# What was made ready, for as long as the decoder is there; not in the decoder, which is copied and saved.
_ready: weakref.WeakKeyDictionary[nn.Module, _ReadyHead] = weakref.WeakKeyDictionary()


def step_head(decoder: nn.Module, head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The projection of a decoder's output to logits, `(..., hidden)` -> `(..., vocab)`, as its weights are now."""
    ready = _ready_head(decoder, head)
    return head if ready is None else ready.linear


def step_shortlist(decoder: nn.Module, head: nn.Module) -> ShortlistProjection | None:
    """What may be the most probable tokens, without all logits; `None` where these are made as fast."""
    ready = _ready_head(decoder, head)
    return None if ready is None else ready.shortlist


def _ready_head(decoder: nn.Module, head: nn.Module) -> _ReadyHead | None:
    """What was made before serves as long as the weights are the same; `None` for a head that must be called itself."""
    is_hooked = head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook")
    if is_hooked or torch.is_autocast_enabled(decoder.device.type):
        return None
    ready = _ready.get(decoder)
    if ready is None or not ready.is_current(head):
        ready = _ready[decoder] = _ReadyHead(head)
    return ready


def forget_head(decoder: nn.Module) -> None:
    """Frees the copies of the weights behind a decoder."""
    _ready.pop(decoder, None)
