"""The layers of an encoder with packed weights, for inference on a CPU."""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from .module_record import ModuleRecord
from .packed_weight import PackedWeight, can_pack, is_plain
from .patience import Patience
from .step_linear import LARGEST_SIZE
from .weight_record import WeightRecord, can_record

# What is run but a few times need not be held twice.
_PATIENCE = 8


class _Ready:
    """The linear layers of a stack that gain by it, and their packed weights as soon as these have been asked for often."""

    def __init__(self, layers: nn.Module):
        self._linears = [layer for layer in layers.modules() if _gains(layer)]
        self._record = ModuleRecord(layers)
        self._weights = WeightRecord([part for layer in self._linears for part in layer.parameters()])
        self._packed: list[PackedWeight] = []
        self._patience = Patience(_PATIENCE)

    def is_current(self, layers: nn.Module) -> bool:
        return self._record.is_current(layers) and self._weights.is_current()

    def lend(self) -> list[nn.Linear]:
        """Lets the layers multiply by packed weights, and returns them."""
        if not self._packed:
            if not self._patience.is_over():
                return []
            self._packed = [PackedWeight(layer.weight, layer.bias) for layer in self._linears]
        lent = []
        for layer, packed in zip(self._linears, self._packed, strict=True):
            if not _is_replaced(layer):
                # Past `nn.Module`, whose hooks go on to be called around it.
                vars(layer)["forward"] = packed
                lent.append(layer)
        return lent


# What was made ready, for as long as the stack is there; not in the stack, which is copied and saved.
_ready: weakref.WeakKeyDictionary[nn.Module, _Ready] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def packed_weights(stack: nn.Module) -> Iterator[None]:
    """Lets the layers of a stack multiply by packed weights meanwhile, where they gain by it."""
    lent = _ready_layers(stack).lend() if _may_pack(stack) else []
    try:
        yield
    finally:
        for layer in lent:
            vars(layer).pop("forward", None)


def _ready_layers(stack: nn.Module) -> _Ready:
    ready = _ready.get(stack)
    if ready is None or not ready.is_current(stack.layers):
        ready = _ready[stack] = _Ready(stack.layers)
    return ready


def _may_pack(stack: nn.Module) -> bool:
    if stack.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    # What is recorded is to have the layers as they are.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # No layer gains elsewhere, and none that is moved here later would be looked at again.
    place = next(stack.parameters())
    return place.dtype == torch.float32 and place.device.type == "cpu"


def _gains(layer: nn.Module) -> bool:
    if not (is_plain(layer) and can_record(layer)):
        return False
    return layer.weight.numel() <= LARGEST_SIZE and can_pack(*layer.weight.shape)


def _is_replaced(layer: nn.Module) -> bool:
    """Whether somebody put something in the place of what a layer does, as accelerate does to load its weights first."""
    return not isinstance(vars(layer).get("forward"), PackedWeight | None)


def forget_packed(stack: nn.Module) -> None:
    """Frees the packed weights of a stack."""
    _ready.pop(stack, None)
