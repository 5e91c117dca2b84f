"""The projection of a decoder's output to logits, made ready for steps of one token."""

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from .module_record import ModuleRecord
from .shortlist import ShortlistProjection, can_shortlist
from .step_linear import LARGEST_SIZE, StepLinear
from .weight_record import WeightRecord, can_record

# There is one head, and it takes a good part of a step: it may be larger than a layer's weight and still be worth a copy.
_LARGEST_COPY = 2**26


class _ReadyHead:
    """A head, and what was made of its weights, as soon as it was asked for."""

    def __init__(self, head: nn.Module):
        self.head, self._can_copy = head, _can_copy(head)
        self._record = ModuleRecord(head)
        self._weights = WeightRecord(list(head.parameters()) if self._can_copy else [])

    @functools.cached_property
    def linear(self) -> StepLinear:
        return StepLinear([self.head], self._can_copy, _LARGEST_COPY, LARGEST_SIZE)

    @functools.cached_property
    def shortlist(self) -> ShortlistProjection | None:
        return ShortlistProjection(self.head) if self._can_copy and can_shortlist(self.head) else None

    def is_current(self, head: nn.Module) -> bool:
        """Whether the head is the same, with the same weights."""
        return self._can_copy == _can_copy(head) and self._record.is_current(head) and self._weights.is_current()


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


def _can_copy(head: nn.Module) -> bool:
    return can_record(head) and head.weight.device.type == "cpu"


def forget_head(decoder: nn.Module) -> None:
    """Frees the copies of the weights behind a decoder."""
    _ready.pop(decoder, None)
