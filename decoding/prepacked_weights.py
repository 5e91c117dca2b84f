"""Prepacked weights: copies of linear layers' weights in the layout of a CPU kernel, which else packs them at each product.

MKL packs them. On AMD processors oneDNN does, because there MKL's kernels are slower: by an eighth with 512 rows, by half with 4.
"""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from metaphrase.decoding.weight_copies import PreparedCopies, can_record

# The product of a larger matrix gains little, and its copy takes much memory.
LARGEST_SIZE = 2**22
# A smaller matrix stays in the processor's cache in any layout, and a narrower one gains nothing.
_LEAST_SIZE, _LEAST_WIDTH = 2**18, 256
# The kernels pack for a number of rows. What MKL packs for many rows is fast with few, but not the reverse.
_PACKED_ROWS = 512
_AMD = ("AuthenticAMD", "HygonGenuine")
# Row numbers that fill and that leave the blocks of the kernels.
_CHECKED_ROWS, _CHECKED_OUTPUTS = (2, 5, 16, 37, 130), 1024


@contextlib.contextmanager
def prepacked(stack: nn.Module) -> Iterator[None]:
    """Run the layers of a stack with prepacked weights, where they gain by it."""
    replaced = []
    for layer, packed in _stacks.get(stack, stack.layers) if _can_prepack_stack(stack) else []:
        # accelerate, for example, replaces `forward` to load the weights first.
        if isinstance(vars(layer).get("forward"), PrepackedWeight | None):
            # The instance attribute leaves the hooks of `nn.Module.__call__` in place.
            vars(layer)["forward"] = packed
            replaced.append(layer)
    try:
        yield
    finally:
        for layer in replaced:
            vars(layer).pop("forward", None)


def _prepack(layers: nn.Module) -> tuple[list[tuple[nn.Linear, "PrepackedWeight"]], list[torch.Tensor]]:
    """Return the linear layers that gain by prepacked weights with these weights, and the weights that were packed."""
    linears = [
        layer
        for layer in layers.modules()
        if is_plain(layer)
        and can_record(layer)
        and layer.weight.numel() <= LARGEST_SIZE
        and can_prepack(*layer.weight.shape)
    ]
    packed = [(layer, PrepackedWeight(layer.weight, layer.bias)) for layer in linears]
    return packed, [weight for layer in linears for weight in layer.parameters()]


_stacks = PreparedCopies(_prepack)


def _can_prepack_stack(stack: nn.Module) -> bool:
    if stack.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    # A compiled or traced graph must contain the layers themselves.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # `_stacks` would not look again at a stack that moves to a CPU later.
    parameter = next(stack.parameters())
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu"


class PrepackedWeight:
    """The product of a linear layer in float32 with a prepacked weight, bias included."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        """Args:
        weight: Weight (out_features, in_features) in float32 on a CPU, of a shape for which `can_prepack` is true.
        bias: Bias (out_features,).
        """
        weight, self._bias = weight.detach().contiguous(), bias
        self._is_onednn = prefers_onednn()
        if self._is_onednn:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
            return
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_ROWS)
        # The kernel reads only the shape of the original weight.
        self._shape = weight.new_empty(1).expand(weight.shape)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        if self._is_onednn:
            return torch.ops.mkldnn._linear_pointwise(states, self._packed, self._bias, "none", [], "")
        rows = states.numel() // states.shape[-1]
        return torch.ops.mkl._mkl_linear(states, self._packed, self._shape, self._bias, rows)


@functools.cache
def prefers_onednn() -> bool:
    """Return True on an AMD processor, if torch is built with oneDNN."""
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and any(name in _vendor() for name in _AMD)


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # Only Linux has the file.
        return platform.processor()
    return next((line for line in lines if line.startswith("vendor_id")), "")


def is_plain(layer: nn.Module) -> bool:
    """Return True if a layer is an `nn.Linear` with a weight in float32 on a CPU."""
    weight = getattr(layer, "weight", None)
    return (
        type(layer) is nn.Linear
        # torchao puts tensors of other classes into an `nn.Linear`.
        and type(weight.data) is torch.Tensor
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )


@functools.cache
def can_prepack(out_features: int, in_features: int) -> bool:
    """Return True if a weight of this shape gains by it, and the operators compute the right products here.

    The operators are private to torch, and may refuse other numbers of rows than the weight was packed for.
    """
    if out_features * in_features < _LEAST_SIZE or in_features < _LEAST_WIDTH:
        return False
    has_mkl = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    if not (has_mkl or prefers_onednn()):
        return False
    # A long weight has many equal blocks. One of them and the remainder are checked.
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
        # torch was built without the library behind the operators.
        return False
