"""A shortlist of tokens: those which, out of a large vocabulary, may be the most probable one.

Rounded to 8 bits, the projection to logits reads a quarter of what it reads in float32, and errors have a bound. Where a state h
becomes h', and the weights w of a token become w', the logit w h differs from w' h' by at most |w| |h - h'| + |w - w'| |h'|, as
Cauchy and Schwarz have it. Tokens that may still be the best within these bounds are few, mostly one; their logits alone are
computed in float32. So what comes out is what all logits would say.
"""

import dataclasses

import torch
from torch import nn

from metaphrase.decoding.int8 import has_int8_kernels, multiply_levels, pack_int8, round_weight, scale_rows
from metaphrase.decoding.prepacked_weights import is_plain
from metaphrase.decoding.weight_copies import Patience

# With fewer entries of the projection, or with more rows, a shortlist costs what it saves.
LEAST_SIZE, _MOST_ROWS = 2**21, 32
# To pack the weights takes as long as so many steps gain at least.
_PATIENCE = 64
# Weights are rounded so many rows at a time, with little memory beside them.
_BLOCK = 4096


@dataclasses.dataclass
class Shortlist:
    """What may be the most probable token of some rows.

    Attributes:
        tokens: Of all rows together, in ascending order, `(count)`.
        logits: Theirs, `(rows, count)`.
        floor: What no logit of another token exceeds, `(rows)`.
        vocab_size: How many tokens there are in all.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    floor: torch.Tensor
    vocab_size: int


class ShortlistProjection:
    """Makes shortlists. Weights are packed once it has been asked often."""

    def __init__(self, head: nn.Linear, patience: int = _PATIENCE):
        """Args:
        head: For which `can_shortlist` holds, and whose weights will stay as they are.
        patience: How often all logits may be made before the weights are packed.
        """
        self._head, self._patience = head, Patience(patience)
        self._packed = self._bounds = None

    def __call__(self, states: torch.Tensor) -> Shortlist | None:
        """The shortlist of some rows `(rows, hidden)`; `None` where all logits are made as fast."""
        if len(states) > _MOST_ROWS:
            return None
        if self._packed is None:
            if not self._patience.is_over():
                return None
            self._pack()
        scaled, scale = scale_rows(states)
        kept = scaled.round()
        lost, kept, whole = torch.linalg.vector_norm(torch.stack((scaled - kept, kept, scaled)), dim=2)
        # The sums that make up a logit are rounded as well.
        lost = lost + whole * (states.shape[1] * torch.finfo(states.dtype).eps)
        factors, bounds, bias = torch.stack((lost, kept), dim=1), self._bounds, self._head.bias
        logits = multiply_levels(scaled, self._packed)
        if bias is not None:
            logits += bias / scale
        floor = torch.addmm(logits, factors, bounds, alpha=-1).amax(dim=1, keepdim=True)
        highest = logits.addmm_(factors, bounds)
        tokens = (highest.sub_(floor).amax(dim=0) >= 0).nonzero()[:, 0]
        # Nothing is above the floor of what is not a number.
        if not 0 < len(tokens) <= highest.shape[1] // 8:
            return None
        weight, bias = self._head.weight[tokens], None if bias is None else bias[tokens]
        exact = nn.functional.linear(states, weight, bias)
        return Shortlist(tokens, exact, (floor * scale)[:, 0], highest.shape[1])

    def _pack(self) -> None:
        weight = self._head.weight.detach()
        blocks, bounds = [], []
        for block in weight.split(_BLOCK):
            levels, scale = round_weight(block)
            difference = torch.addcmul(block, levels.to(block.dtype), scale[:, None], value=-1)
            bounds.append(torch.stack([torch.linalg.vector_norm(part, dim=1) for part in (block, difference)]))
            blocks.append((levels, scale))
        levels, scale = map(torch.cat, zip(*blocks, strict=True))
        # The packed weights last: by them another thread sees that all is there.
        self._bounds = torch.cat(bounds, dim=1)
        self._packed = pack_int8(levels, scale)


def can_shortlist(head: nn.Module) -> bool:
    """Whether a projection to logits is plain and large, in float32 on a CPU with the kernels for it."""
    return is_plain(head) and head.weight.numel() > LEAST_SIZE and has_int8_kernels()
