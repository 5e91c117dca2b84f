"""Copies of weights for the kernels of a CPU, and the encoder that runs with them and without padding.

A CPU kernel packs a weight at each product unless the weight has its layout already. MKL packs, and on AMD processors oneDNN,
because there MKL's kernels are slower: by an eighth with 512 rows, by half with 4. Copies are made again when a module or a
weight has changed.
"""

import functools
import operator
import platform
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from metaphrase.modeling.stacks import MetaphraseEncoder, Stack, is_padding_mask
from metaphrase.ops import packed_stacks
from metaphrase.ops.packed_rows import PackedSequences

# The product of a larger matrix gains little, and its copy takes much memory.
LARGEST_SIZE = 2**22
# A smaller matrix stays in the processor's cache in any layout, and a narrower one gains nothing. On one core of Zen 4, a
# weight of 384 x 512 gains 2 to 30 % with 4 rows or more.
_LEAST_SIZE, _LEAST_WIDTH = 3 * 2**16, 128
# The kernels pack for a number of rows. What MKL packs for many rows is fast with few, but not the reverse.
_PACKED_ROWS = 512
_AMD = ("AuthenticAMD", "HygonGenuine")
# Row numbers that fill and that leave the blocks of the kernels.
_CHECKED_ROWS, _CHECKED_OUTPUTS = (2, 5, 16, 37, 130), 1024
# Reading an entry takes as long as a hundred additions, and each record reads so many entries of a weight.
_SAMPLED_ENTRIES = 64
# With less padding, or in a smaller model, moving the tokens takes as long as computing the padding.
LEAST_PADDING, LEAST_HIDDEN_SIZE = 0.1, 256

# By owner and by the function that made them. Not stored in the owner, which may be copied or saved.
_copies: weakref.WeakKeyDictionary[nn.Module, dict[Callable, tuple[Any, "WeightRecord"]]] = weakref.WeakKeyDictionary()


def prepared_copies(
    owner: nn.Module, module: nn.Module, prepare: Callable[[nn.Module], tuple[Any, Sequence[torch.Tensor]]]
) -> Any:
    """Return copies of a module's current weights, which live as long as their owner, the stack of the module.

    `prepare` makes the copies, and returns them with the weights on which they depend; see `WeightRecord`.
    """
    of_owner = _copies.setdefault(owner, {})
    if prepare not in of_owner or not of_owner[prepare][1].is_current(module):
        # The memory of the old copies is free before new copies are made.
        of_owner.pop(prepare, None)
        copies, weights = prepare(module)
        of_owner[prepare] = copies, WeightRecord(module, weights)
    return of_owner[prepare][0]


class WeightRecord:
    """The submodules and parameters of a module, and the addresses, versions and a sample of the entries of some weights.

    The record shows replaced submodules and parameters, as by adapters or quantization. Writing into `weight.data`, or into an
    array that shares the memory, does not change the version of a weight. The sample shows such a write if it changes a good
    share of the weight; a write of a single row may stay unseen.
    """

    def __init__(self, module: nn.Module, weights: Sequence[torch.Tensor]):
        self._module, self._modules, self._weights = module, [*module.modules()], weights
        # Views show the current entries as long as the addresses are the same. An odd step meets many columns.
        steps = [max(1, weight.numel() // _SAMPLED_ENTRIES) | 1 for weight in weights]
        self._views = [weight.detach().flatten()[::step] for weight, step in zip(weights, steps, strict=True)]
        self._objects, self._versions, self._entries = self._read()

    def is_current(self, module: nn.Module) -> bool:
        """Return True if this is the module, all objects in it are the same, and no write to the weights can be seen."""
        objects, versions, entries = self._read()
        return (
            module is self._module
            and len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and versions == self._versions
            and torch.equal(entries, self._entries)
        )

    def _read(self) -> tuple[list[Any], list[tuple[int, int]], torch.Tensor]:
        objects: list[Any] = []
        for module in self._modules:
            # A parametrization changes the class. Reading the dictionaries is many times faster than looking up each name.
            objects += (type(module), *module._modules.values(), *module._parameters.values())
        versions = [(weight.data_ptr(), weight._version) for weight in self._weights]
        return objects, versions, torch.cat(self._views) if self._views else torch.empty(0)


def can_record(layer: nn.Module) -> bool:
    """Return True if a layer is an `nn.Linear` whose changes a `WeightRecord` can show."""
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous():
        return False
    # A tensor that was made in inference mode has no version.
    return not any(parameter.is_inference() for parameter in layer.parameters())


def _prepack(layers: nn.Module) -> tuple[list[tuple[nn.Linear, "PrepackedWeight"]], list[torch.Tensor]]:
    linears = [layer for layer in layers.modules() if is_plain(layer) and can_record(layer)]
    linears = [layer for layer in linears if layer.weight.numel() <= LARGEST_SIZE and can_prepack(*layer.weight.shape)]
    packed = [(layer, PrepackedWeight(layer.weight, layer.bias)) for layer in linears]
    return packed, [weight for layer in linears for weight in layer.parameters()]


class PrepackedWeight:
    """The product of a linear layer in float32 with a prepacked weight, bias included."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        """Pack a weight (out_features, in_features) in float32 on a CPU, of a shape for which `can_prepack` is true."""
        weight, self._bias = weight.detach().contiguous(), bias
        self._is_onednn = prefers_onednn()
        pack = torch.ops.mkldnn._reorder_linear_weight if self._is_onednn else torch.ops.mkl._mkl_reorder_linear_weight
        self._packed = pack(weight, _PACKED_ROWS)
        # MKL's kernel reads only the shape of the original weight.
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
    # Only Linux has the file.
    path = Path("/proc/cpuinfo")
    vendor = path.read_text(encoding="utf-8", errors="replace") if path.exists() else platform.processor()
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and any(name in vendor for name in _AMD)


def is_plain(layer: nn.Module) -> bool:
    """Return True if a layer is an `nn.Linear` with a weight in float32 on a CPU."""
    if type(layer) is not nn.Linear:
        return False
    weight = layer.weight
    # torchao puts tensors of other classes into an `nn.Linear`.
    return type(weight.data) is torch.Tensor and weight.dtype == torch.float32 and weight.device.type == "cpu"


@functools.cache
def can_prepack(out_features: int, in_features: int) -> bool:
    """Return True if a weight of this shape gains by it, and torch's private operators compute the right products here."""
    if out_features * in_features < _LEAST_SIZE or in_features < _LEAST_WIDTH:
        return False
    # A long weight has many equal blocks. One of them and the remainder are checked.
    outputs = out_features % _CHECKED_OUTPUTS + (_CHECKED_OUTPUTS if out_features >= _CHECKED_OUTPUTS else 0)
    options = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    weight, states = (torch.randn(rows, in_features, **options) for rows in (outputs, max(_CHECKED_ROWS)))
    try:
        packed = PrepackedWeight(weight, None)
        return all(
            torch.allclose(packed(states[:rows]), nn.functional.linear(states[:rows], weight), atol=1e-3, rtol=1e-4)
            for rows in _CHECKED_ROWS
        )
    except (RuntimeError, AttributeError):
        # torch was built without the library behind the operators, or has none of these operators.
        return False


def plug_in() -> None:
    """Let encoders run with prepacked weights and without padding, and free the copies of stacks that start to train."""
    plain_encode, plain_train = MetaphraseEncoder.encode, Stack.train

    def encode(encoder, embeddings, attention_mask, position_ids, **kwargs):
        # A compiled or traced graph must contain the layers themselves.
        is_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if is_graph or encoder.training or torch.is_grad_enabled():
            return plain_encode(encoder, embeddings, attention_mask, position_ids, **kwargs)
        parameter, replaced, copies = next(encoder.parameters()), [], []
        is_plain_dtype = parameter.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if is_plain_dtype and parameter.device.type == "cpu":
            copies = prepared_copies(encoder, encoder.layers, _prepack)
        for layer, packed in copies:
            # accelerate, for example, replaces `forward` to load the weights first.
            if isinstance(vars(layer).get("forward"), PrepackedWeight | None):
                # The instance attribute leaves the hooks of `nn.Module.__call__` in place.
                vars(layer)["forward"] = packed
                replaced.append(layer)
        try:
            is_batch = position_ids is None and kwargs.get("source_lengths") is None
            output = encode_without_padding(encoder, embeddings, attention_mask, **kwargs) if is_batch else None
            return output or plain_encode(encoder, embeddings, attention_mask, position_ids, **kwargs)
        finally:
            for layer in replaced:
                vars(layer).pop("forward", None)

    def train(stack, mode=True):
        if mode:
            # Free the copies: training needs the memory and changes the weights.
            _copies.pop(stack, None)
        return plain_train(stack, mode)

    MetaphraseEncoder.encode, Stack.train = encode, train


def encode_without_padding(
    encoder: MetaphraseEncoder, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs
) -> BaseModelOutput | None:
    """Encode the tokens of a padded batch as one packed row, (B, S, D) -> (B, S, D), with 0 for padding.

    None means that packing would not be faster, or that hooks of the layers would see the packed row.
    """
    # In float16, only the padded kernels keep large scores finite.
    is_supported = embeddings.device.type == "cpu" and embeddings.dtype in (torch.float32, torch.bfloat16)
    has_mask = is_padding_mask(attention_mask) and attention_mask.shape == embeddings.shape[:2]
    is_narrow = embeddings.shape[2] < LEAST_HIDDEN_SIZE
    if not is_supported or not has_mask or is_narrow or packed_stacks.asks_for_reference(encoder):
        return None
    is_token = attention_mask != 0
    if bool(is_token.sum() > (1 - LEAST_PADDING) * is_token.numel()):
        return None
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in encoder.layers.modules())
    # Each row must have one stretch of tokens: a hole would change distances, and a segment must not be empty.
    starts = nn.functional.pad(is_token, (1, 0)).int().diff() > 0
    if has_hooks or not bool((starts.sum(dim=1) == 1).all()):
        return None
    tokens = embeddings[is_token]
    sequences = PackedSequences(is_token.sum(dim=1), len(tokens))
    tokens = packed_stacks.encode_packed(encoder, tokens[None], sequences, **kwargs).last_hidden_state[0]
    output = tokens.new_zeros(*is_token.shape, tokens.shape[-1])
    output[is_token] = tokens
    return BaseModelOutput(last_hidden_state=output)
