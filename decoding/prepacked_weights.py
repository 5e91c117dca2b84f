"""The layers of an encoder with packed weights, for inference on a CPU.

A weight packed for products with several rows on a CPU: ahead of time, rather than anew at each product.

MKL does it, but on AMD's processors oneDNN: for these MKL has slower kernels (by an eighth with 512 rows, by half with 4).
"""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from metaphrase.decoding.weight_copies import ModuleRecord, Patience, PreparedCopies, WeightRecord, can_record

# A larger matrix takes so long that one call more does not count, and its copy would be much to hold.
LARGEST_SIZE = 2**22
# What is run but a few times need not be held twice.
_PATIENCE = 8


class _Ready:
    """The linear layers of a stack that gain by it, and their packed weights as soon as these have been asked for often."""

    def __init__(self, layers: nn.Module):
        self._linears = [layer for layer in layers.modules() if _gains(layer)]
        self._record = ModuleRecord(layers)
        self._weights = WeightRecord([part for layer in self._linears for part in layer.parameters()])
        self._packed: list[PrepackedWeight] = []
        self._patience = Patience(_PATIENCE)

    def is_current(self, layers: nn.Module) -> bool:
        return self._record.is_current(layers) and self._weights.is_current()

    def lend(self) -> list[nn.Linear]:
        """Lets the layers multiply by packed weights, and returns them."""
        if not self._packed:
            if not self._patience.is_over():
                return []
            self._packed = [PrepackedWeight(layer.weight, layer.bias) for layer in self._linears]
        lent = []
        for layer, packed in zip(self._linears, self._packed, strict=True):
            if not _is_replaced(layer):
                # Past `nn.Module`, whose hooks go on to be called around it.
                vars(layer)["forward"] = packed
                lent.append(layer)
        return lent


_stacks = PreparedCopies(_Ready)


@contextlib.contextmanager
def prepacked(stack: nn.Module) -> Iterator[None]:
    """Lets the layers of a stack multiply by packed weights meanwhile, where they gain by it."""
    lent = _stacks.get(stack, stack.layers).lend() if _may_pack(stack) else []
    try:
        yield
    finally:
        for layer in lent:
            vars(layer).pop("forward", None)


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
    return layer.weight.numel() <= LARGEST_SIZE and can_prepack(*layer.weight.shape)


def _is_replaced(layer: nn.Module) -> bool:
    """Whether somebody put something in the place of what a layer does, as accelerate does to load its weights first."""
    return not isinstance(vars(layer).get("forward"), PrepackedWeight | None)


def forget_prepacked(stack: nn.Module) -> None:
    """Frees the packed weights of a stack."""
    _stacks.forget(stack)


# Smaller ones stay in the processor's cache however they lie, and narrower ones gain nothing.
_LEAST_SIZE, _LEAST_WIDTH = 2**18, 256
# Either packs with a number of rows in mind. What MKL packs for many serves few as well; what it packs for few is slow with many.
_ROWS_IN_MIND = 512
_AMD = ("AuthenticAMD", "HygonGenuine")
# Of each kind of blocks that kernels work in, and what is left over from them.
_CHECKED_ROWS, _CHECKED_OUTPUTS = (2, 5, 16, 37, 130), 1024


class PrepackedWeight:
    """The product with a weight, and the sum with a bias, of a linear layer in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        """Args:
        weight: Of a shape for which `can_prepack` holds, `(out_features, in_features)`, in float32 on a CPU.
        bias: `(out_features)`.
        """
        weight, self._bias = weight.detach().contiguous(), bias
        self._is_onednn = prefers_onednn()
        if self._is_onednn:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_IN_MIND)
            return
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS_IN_MIND)
        # The kernel wants to know its shape, and nothing else.
        self._like = weight.new_empty(1).expand(weight.shape)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        if self._is_onednn:
            return torch.ops.mkldnn._linear_pointwise(states, self._packed, self._bias, "none", [], "")
        rows = states.numel() // states.shape[-1]
        return torch.ops.mkl._mkl_linear(states, self._packed, self._like, self._bias, rows)


@functools.cache
def prefers_onednn() -> bool:
    """Whether this is a processor of AMD's and a build of torch with oneDNN."""
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and any(name in _vendor() for name in _AMD)


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # Elsewhere than on Linux.
        return platform.processor()
    return next((line for line in lines if line.startswith("vendor_id")), "")


def _has_operators() -> bool:
    return prefers_onednn() or (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"))


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a linear one of torch's own, with a weight in float32 on a CPU."""
    weight = getattr(layer, "weight", None)
    return (
        type(layer) is nn.Linear
        # A quantized one may be in the place of a plain weight.
        and type(weight.data) is torch.Tensor
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )


@functools.cache
def can_prepack(out_features: int, in_features: int) -> bool:
    """Whether a weight of this shape gains by it, and this build of torch and this processor can.

    Nobody promises that what was packed with one number of rows in mind multiplies others, so that it is tried once.
    """
    if out_features * in_features < _LEAST_SIZE or in_features < _LEAST_WIDTH:
        return False
    if not _has_operators():
        return False
    # The blocks of a long weight are alike, but for what is left over.
    outputs = out_features % _CHECKED_OUTPUTS + (_CHECKED_OUTPUTS if out_features >= _CHECKED_OUTPUTS else 0)
    generator = torch.Generator().manual_seed(0)
    make = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    weight, states = make(outputs, in_features), make(max(_CHECKED_ROWS), in_features)
    try:
        packed = PrepackedWeight(weight, None)
        return all(
            torch.allclose(packed(states[:rows]), nn.functional.linear(states[:rows], weight), atol=1e-3, rtol=1e-4)
            for rows in _CHECKED_ROWS
        )
    except RuntimeError:
        # Built without what the operators call.
        return False
