"""Quantization of linear layers to int8 or float16, for decoding on a CPU."""

import logging
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.decoding.int8 import (
    has_int8_kernels,
    multiply_int8,
    operator_of,
    pack_int8,
    round_weight,
    unpack_int8,
)

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("int8", "float16")
# A smaller matrix stays in the processor's cache, and quantization costs more than it saves.
_LEAST_SIZE = 2**17


class _PackedLinear(nn.Module):
    """A linear layer for inference that holds only weights prepacked for FBGEMM."""

    # Some families read the dtype of a layer's weight.
    weight = None

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def join(cls, layers: Sequence["_PackedLinear"]) -> "_PackedLinear":
        """Return one layer with the outputs of several layers of one input."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def train(self, mode: bool = True) -> "_PackedLinear":
        if mode:
            raise ValueError("A quantized model must stay in evaluation mode: it has no trainable weights.")
        return super().train(mode)

    def _save_to_state_dict(self, *args) -> None:
        raise ValueError("A quantized model must not be saved: its weights are packed. Save the original model.")


class Int8Linear(_PackedLinear):
    """Weights in 8 bits with a scale per output, inputs in 7 or 8 bits with a scale per row.

    With a scale per row, the result of a sentence does not depend on its batch.

    Source: Jacob et al. 2018, section 2, arXiv 1712.05877; Dettmers et al. 2022, section 3, arXiv 2208.07339.
    """

    def __init__(self, linear: nn.Linear):
        bias = None if linear.bias is None else linear.bias.detach().float()
        self._set(*round_weight(linear.weight.detach().float()), bias)

    def _set(self, levels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(levels.shape[1], levels.shape[0])
        self._packed, self._bias = pack_int8(levels, scale, bias), bias

    @classmethod
    def join(cls, layers: Sequence["Int8Linear"]) -> "Int8Linear":
        levels, scales, _ = zip(*(unpack_int8(layer._packed) for layer in layers), strict=True)
        joined = cls.__new__(cls)
        joined._set(torch.cat(levels), torch.cat(scales), _join_biases(layers))
        return joined.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        if states.dim() == 2:
            return multiply_int8(states, self._packed, self._bias)
        output = multiply_int8(states.reshape(-1, self.in_features), self._packed, self._bias)
        return output.view(*states.shape[:-1], self.out_features)


class Float16Linear(_PackedLinear):
    """Weights in 16 bits; inputs, sums and outputs in 32 bits."""

    def __init__(self, linear: nn.Linear):
        self._set(linear.weight.detach().float(), None if linear.bias is None else linear.bias.detach().float())

    def _set(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self._packed, self._bias = torch.ops.quantized.linear_prepack_fp16(weight, bias), bias

    @classmethod
    def join(cls, layers: Sequence["Float16Linear"]) -> "Float16Linear":
        weights = [torch.ops.quantized.linear_unpack_fp16(layer._packed)[0] for layer in layers]
        joined = cls.__new__(cls)
        joined._set(torch.cat(weights).float(), _join_biases(layers))
        return joined.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        return operator_of("linear_dynamic_fp16")(states, self._packed)


def _join_biases(layers: Sequence[_PackedLinear]) -> torch.Tensor | None:
    return None if layers[0]._bias is None else torch.cat([layer._bias for layer in layers])


_LAYERS = {"int8": Int8Linear, "float16": Float16Linear}


def quantization_of(dtype: str | torch.dtype, device: str | torch.device) -> str | None:
    """Return the quantization for a dtype on a device, or None if torch itself computes in that dtype.

    On a CPU float16 is a quantization, since torch computes in float16 many times more slowly than in float32.

    Raises:
        ValueError: If the dtype is int8 and the device is no CPU.
    """
    name = str(dtype).removeprefix("torch.")
    is_cpu = torch.device(device).type == "cpu"
    if name == "int8" and not is_cpu:
        raise ValueError(f"`dtype` int8 needs the device cpu, got {device}.")
    return name if name in QUANTIZATIONS and is_cpu else None


def quantize(model: PreTrainedModel, quantization: str) -> int:
    """Replace all but small linear layers of a model by quantized layers. Embeddings stay as they are.

    Args:
        model: Any model in float32 on a CPU. Afterwards it can no longer be trained or saved.
        quantization: `int8` or `float16`, the type of the weights. All other values stay in float32.

    Returns:
        The number of replaced layers: 0, with a warning, if torch or the processor lacks the kernels.

    Raises:
        ValueError: If the quantization is unknown, or the model is not in float32 on a CPU.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}.")
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise ValueError(
            f"`model` must be on a CPU in float32 to be quantized, got {model.dtype} on {model.device.type}."
        )
    model.eval()
    if not has_kernels():
        logger.warning("%s weights need a torch with FBGEMM, which this one lacks: they stay in float32.", quantization)
        return 0
    large = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child.weight.numel() >= _LEAST_SIZE
    ]
    # A shared layer stays shared.
    packed = {child: None for _, _, child in large}
    for child in packed:
        packed[child] = _LAYERS[quantization](child).eval()
    for module, name, child in large:
        setattr(module, name, packed[child])
    return len(packed)


def has_kernels() -> bool:
    """Return True if torch has kernels for packed weights on this processor."""
    return has_int8_kernels() and hasattr(torch.ops.quantized, "linear_prepack_fp16")
