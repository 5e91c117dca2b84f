"""Products of one row, many of whose entries are zero, as weighted sums of a weight's rows: those for zeros are not read.

Linear layers for few rows, as in a decoder's step: one product for those that read the same input, over a packed weight.
"""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from metaphrase.decoding.prepacked_weights import LARGEST_SIZE, PrepackedWeight, can_prepack, is_plain
from metaphrase.decoding.weight_copies import can_record

# Fewer rows cost more to find than to read.
_LEAST_SIZE = 2**19
# Rows here and there are read more slowly than all of them in order.
_MOST_ENTRIES = 0.5
# Of a row, for each thread; less is not worth one.
_LEAST_WIDTH = 128


def gains_by_zeros(weight: torch.Tensor) -> bool:
    """Whether a weight in float32 is large enough, and torch has FBGEMM's kernels for such sums on this processor."""
    return weight.numel() >= _LEAST_SIZE and "fbgemm" in torch.backends.quantized.supported_engines


def sum_rows(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The product of a row with few entries, `(1, in_features)`, and a contiguous weight, `(in_features, out_features)`.

    Returns:
        `(1, out_features)`, through which no gradient passes; `None` where the row has so many entries that the whole
        product takes no longer.

    Source: how few entries a ReLU leaves in a trained Transformer is told by Li et al. 2023, arXiv 2210.06313.
    """
    in_features, out_features = weight.shape
    array = row.detach()[0].numpy()
    # NumPy finds them in a third of the time that torch takes.
    (found,) = (array != 0).nonzero()
    if len(found) > _MOST_ENTRIES * in_features:
        return None
    places, factors = torch.from_numpy(found), torch.from_numpy(array[found])
    # Each part of a row is a row to the kernel, so that threads share the work.
    parts = _parts(out_features)
    starts = torch.arange(parts)
    if parts > 1:
        places, factors = (places * parts + starts[:, None]).flatten(), factors.repeat(parts)
    rows = weight.view(in_features * parts, -1)
    return torch.embedding_bag(rows, places, starts * len(found), False, 0, False, factors)[0].view(1, -1)


def _parts(width: int) -> int:
    most = max(1, min(torch.get_num_threads(), width // _LEAST_WIDTH))
    return next(count for count in range(most, 0, -1) if width % count == 0)


# A larger one, of a layer by itself, is not worth a transposed copy, of which each layer of the decoder would need one.
_LARGEST_TRANSPOSED = 2**20
# A CPU multiplies so few rows by a transposed weight, which it reads in the order in which it lies, up to twice as fast.
_FEW_ROWS = 64


class PreparedLinear:
    """Some layers as one.

    Where they are plain and small their weights are copied, side by side and, for float32 on a CPU, in the order in which a
    product of one row, or of several, reads them; where they know how to be one, they are; others are called one by one.

    Attributes:
        layers: The layers, in order.
        copied: Weights and biases that are copied as soon as they are needed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        copies: bool = True,
        largest: int | None = None,
        largest_transposed: int = _LARGEST_TRANSPOSED,
        has_zeros: bool = False,
    ):
        """Looks what may be copied.

        Args:
            layers: Of one input width, all with a bias or none.
            copies: Whether weights may be copied.
            largest: Entries of the largest weight to be copied at all, if not of that of a layer.
            largest_transposed: Entries of the largest weight of a layer by itself to be transposed.
            has_zeros: Whether many entries of what is multiplied are likely to be zero.
        """
        self.layers, self.copied = list(layers), []
        # So many are multiplied by the transposed weight without another question: in a step these take as long as the product.
        self._most_rows = 0
        kind, self._product = type(layers[0]), None
        if copies and hasattr(kind, "join") and all(type(layer) is kind for layer in layers):
            # Packed already, in a way that only the layers know; the call of a module would take a tenth of such a product.
            self.layers = self.layers if len(layers) == 1 else [kind.join(layers)]
            self._product = self.layers[0].forward
        largest = LARGEST_SIZE if largest is None else largest
        self._is_one = copies and all(can_record(layer) and layer.weight.numel() <= largest for layer in layers)
        if not self._is_one:
            return
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        self._weights = weights
        is_single, is_plain_one = len(layers) == 1, all(map(is_plain, layers))
        shape = sum(len(weight) for weight in weights), weights[0].shape[1]
        self._is_packed = is_plain_one and can_prepack(*shape)
        self._has_zeros = has_zeros and is_single and is_plain_one and gains_by_zeros(weights[0])
        # A large copy pays where most of it is not read.
        is_large = weights[0].numel() > largest_transposed and not self._has_zeros
        self._is_transposed = is_plain_one and not (is_single and is_large)
        self._bias = biases[0]
        if not is_single and biases[0] is not None:
            self._bias = torch.cat([bias.detach() for bias in biases])
            self.copied += biases
        if not is_single or self._is_packed or self._is_transposed:
            self.copied += weights
        if self._is_transposed and not self._has_zeros:
            self._most_rows = 1 if self._is_packed else _FEW_ROWS

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features of all)"""
        if states.dim() == 2 and len(states) <= self._most_rows:
            return self._multiply(states)
        if self._product is not None:
            return self._product(states)
        if not self._is_one:
            outputs = [layer(states) for layer in self.layers]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        rows = states.numel() // states.shape[-1]
        if rows > 1 and self._is_packed:
            return self._packed(states)
        if rows > _FEW_ROWS or states.dim() > 2 or not self._is_transposed:
            return nn.functional.linear(states, self._weight, self._bias)
        if rows == 1 and self._has_zeros and (output := sum_rows(states, self._transposed)) is not None:
            return output if self._bias is None else output.add_(self._bias)
        return self._multiply(states)

    def _multiply(self, states: torch.Tensor) -> torch.Tensor:
        bias = self._bias
        return torch.mm(states, self._transposed) if bias is None else torch.addmm(bias, states, self._transposed)

    @functools.cached_property
    def _weight(self) -> torch.Tensor:
        """All weights as one, `(out_features, in_features)`; of several that are transposed one copy is enough."""
        if self._is_transposed and len(self.layers) > 1:
            return self._transposed.t()
        return self._side_by_side()

    @functools.cached_property
    def _transposed(self) -> torch.Tensor:
        return self._side_by_side().detach().t().contiguous()

    @functools.cached_property
    def _packed(self) -> PrepackedWeight:
        return PrepackedWeight(self._side_by_side(), self._bias)

    def _side_by_side(self) -> torch.Tensor:
        weights = self._weights
        # One by itself is the parameter, which may be moved to another place or precision.
        return weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
