"""Products in int8 on a CPU, by the kernels of FBGEMM: quantized linear layers, and shortlists of tokens."""

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import LogitsProcessor, PreTrainedModel

from metaphrase.decoding.options import process
from metaphrase.errors import MetaphraseError

logger = logging.getLogger(__name__)

# A smaller matrix stays in the processor's cache, and quantization costs more than it saves.
_LEAST_SIZE = 2**17
WEIGHT_LEVELS = 127
# Levels of an activation on either side of zero: of 8 bits, and of 7 bits, of which two products fit into a sum of 16 bits.
_MOST_LEVELS, _FEW_LEVELS = 127, 63
# Smaller activations become zero, so that the reciprocal of a row's scale is finite.
_LEAST = 1e-30
# Shortlists gain 1 to 8 % of a step with a head of 512 x 10k, 20 to 40 % with 512 x 32k (one core). Many rows gain nothing.
LEAST_SHORTLIST_SIZE, _MOST_ROWS = 2**21, 32
# Rows of the weight that are rounded at a time, to need little memory.
_ROUNDED_ROWS = 4096
_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"


class PackedLinear(nn.Module):
    """A linear layer for inference, with prepacked weights in 8 bits: a scale per output, and for the inputs a scale per row.

    torch's dynamic kernel is faster, but has one scale for all rows. Here a sentence's result does not depend on the other
    sentences of its batch; only the last digit of the float32 scaling may differ.

    Source: Jacob et al. 2018, section 2, arXiv 1712.05877; Dettmers et al. 2022, section 3, arXiv 2208.07339.
    """

    # Some families read the dtype of a layer's weight.
    weight = None

    def __init__(self, *layers: "nn.Linear | PackedLinear"):
        """Pack layers with the same input side by side, all with a bias or none."""
        super().__init__()
        self.in_features, self.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach().float() for layer in layers])
        weights = [
            layer._unpack() if isinstance(layer, PackedLinear) else round_weight(layer.weight.detach().float())
            for layer in layers
        ]
        self._packed = pack_int8(*map(torch.cat, zip(*weights, strict=True)), self.bias)
        self.eval()

    def select_outputs(self, outputs: torch.Tensor) -> "PackedLinear":
        """Return the layer with only these outputs, (count,)."""
        if not hasattr(self, "_unpacked"):
            # Unpacking takes many times as long as packing a few outputs.
            self._unpacked = self._unpack()
        layer = copy.copy(self)
        layer.out_features, layer.bias = len(outputs), None if self.bias is None else self.bias[outputs]
        layer._packed = pack_int8(*(part.index_select(0, outputs) for part in self._unpacked), layer.bias)
        return layer

    def _unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight, _ = torch.ops.quantized.linear_unpack(self._packed)
        return weight.int_repr(), weight.q_per_channel_scales().float()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        if states.dim() != 2:
            return self.forward(states.reshape(-1, self.in_features)).view(*states.shape[:-1], self.out_features)
        if states.shape[0] == 1:
            # With one row, the kernel can also round and scale back.
            low, high = torch.aminmax(states)
            levels = activation_levels()
            step = max(-low.item(), high.item(), _LEAST) / levels
            return _multiply_operator()(states, step, levels + 1, self._packed)
        scaled, step = scale_rows(states)
        output = _multiply_operator()(scaled, 1.0, activation_levels() + 1, self._packed)
        # The kernel has added the bias to unscaled sums.
        return output.mul_(step) if self.bias is None else torch.lerp(self.bias, output, step)

    def train(self, mode: bool = True) -> "PackedLinear":
        if mode:
            raise MetaphraseError("A quantized model must stay in evaluation mode: it has no trainable weights.")
        return super().train(mode)

    def _save_to_state_dict(self, *args) -> None:
        raise MetaphraseError("A quantized model must not be saved: its weights are packed. Save the original model.")


def quantize(model: PreTrainedModel) -> int:
    """Replace all but small linear layers of a model by layers in int8. Embeddings stay as they are.

    Args:
        model: Any model in float32 on a CPU. Afterwards it can no longer be trained or saved.

    Returns:
        The number of replaced layers: 0, with a warning, if torch or the processor lacks the kernels.
    """
    model.eval()
    if not has_kernels():
        logger.warning("int8 weights need a torch with FBGEMM, which this one lacks: they stay in float32.")
        return 0
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and layer.weight.numel() >= _LEAST_SIZE]
    packed = {layer: PackedLinear(layer) for layer in layers}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in packed:
                setattr(module, name, packed[child])
    return len(packed)


def has_kernels() -> bool:
    """Return True if torch has kernels for packed weights on this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch.ops.quantized, _PRODUCT)


@functools.cache
def activation_levels() -> int:
    """Return the number of levels on either side of zero that the kernel can sum up on this processor.

    Kernels for VNNI sum up in 32 bits and allow activations of 8 bits. Older kernels sum up two products in 16 bits.
    """
    size = 64
    packed = pack_int8(torch.full((size, size), WEIGHT_LEVELS, dtype=torch.int8), torch.ones(size))
    largest = torch.full((2, size), float(_MOST_LEVELS))
    sums = _multiply_operator()(largest, 1.0, _MOST_LEVELS + 1, packed)
    return _MOST_LEVELS if bool((sums == size * WEIGHT_LEVELS * _MOST_LEVELS).all()) else _FEW_LEVELS


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to int8 levels (out_features, in_features), and return the scale of each row, (out_features,)."""
    # A row of zeros may have any scale but 0.
    scale = (weight.abs().amax(dim=1) / WEIGHT_LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def pack_int8(levels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.ScriptObject:
    """Pack the output of `round_weight`, and a bias (out_features,), for the kernel."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch announces that it will remove the functions; `has_kernels` checks for them.
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scale), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(weight, bias)
    finally:
        torch.backends.quantized.engine = engine


def scale_rows(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (rows, in_features) in units of their levels, and the unit of each row, (rows, 1)."""
    # One call of `vector_norm` for infinity takes many times as long with many rows.
    step = states.abs().amax(dim=1, keepdim=True).clamp_min_(_LEAST).div_(activation_levels())
    return states * step.reciprocal(), step


@functools.cache
def _multiply_operator() -> Callable[..., torch.Tensor]:
    # Without the Python dispatch of its packet.
    packet = getattr(torch.ops.quantized, _PRODUCT)
    return getattr(packet, "_op", packet)


class ShortlistProjection:
    """A projection from decoder output to the best tokens, for a plain head in float32 on a CPU that has int8 kernels.

    A shortlist holds the few tokens of a large vocabulary that may have the largest logit. A state h is rounded to h', the
    weights w of a token to w'. By the Cauchy-Schwarz inequality, the logit w h differs from w' h' by at most
    |w| |h - h'| + |w - w'| |h'|. Only logits of tokens that may be the best within this bound are computed in float32.
    """

    def __init__(self, head: nn.Linear):
        self._head = head

    def __call__(
        self, states: torch.Tensor, processors: Sequence[LogitsProcessor], ids: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the most probable tokens of states (rows, H), (rows,), or None if all logits are needed or computed as fast.

        The processors only lower logits. `ids` of the rows so far have shape (rows, length).
        """
        if len(states) > _MOST_ROWS:
            return None
        packed, weight_norms = self._rounded
        scaled, scale = scale_rows(states)
        rounded = scaled.round()
        error, rounded_norm, norm = torch.linalg.vector_norm(torch.stack((scaled - rounded, rounded, scaled)), dim=2)
        # The sum over H is rounded, too.
        error = error + norm * (states.shape[1] * torch.finfo(states.dtype).eps)
        # (rows, 2) x (2, vocab): the largest error of each logit.
        state_norms, bias = torch.stack((error, rounded_norm), dim=1), self._head.bias
        logits = _multiply_operator()(scaled, 1.0, activation_levels() + 1, packed)
        if bias is not None:
            logits += bias / scale
        floor = torch.addmm(logits, state_norms, weight_norms, alpha=-1).amax(dim=1, keepdim=True)
        highest = logits.addmm_(state_norms, weight_norms)
        tokens = (highest.sub_(floor).amax(dim=0) >= 0).nonzero()[:, 0]
        # With NaN in the states, no token reaches the floor.
        if not 0 < len(tokens) <= highest.shape[1] // 8:
            return None
        exact = nn.functional.linear(states, self._head.weight[tokens], None if bias is None else bias[tokens])
        if not processors:
            return tokens[exact.argmax(dim=1)]
        logits = torch.full_like(highest, -torch.inf)
        logits[:, tokens] = exact
        best, tokens = process(processors, ids, logits).max(dim=1)
        # A token outside the shortlist may be more probable.
        return tokens if bool((best >= (floor * scale)[:, 0]).all()) else None

    @functools.cached_property
    def _rounded(self) -> tuple[torch.ScriptObject, torch.Tensor]:
        """The packed weight in 8 bits, and the norms of each token's weights and of their rounding errors, (2, V)."""
        blocks, norms = [], []
        for block in self._head.weight.detach().split(_ROUNDED_ROWS):
            levels, scale = round_weight(block)
            error = torch.addcmul(block, levels.to(block.dtype), scale[:, None], value=-1)
            norms.append(torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in (block, error)]))
            blocks.append((levels, scale))
        return pack_int8(*map(torch.cat, zip(*blocks, strict=True))), torch.cat(norms, dim=1)
