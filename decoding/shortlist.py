"""Shortlists: the few tokens of a large vocabulary that may have the largest logit.

A projection in 8 bits reads a quarter of the bytes of float32, and its errors have a bound. A state h is rounded to h', the
weights w of a token to w'. By the Cauchy-Schwarz inequality, the logit w h differs from w' h' by at most
|w| |h - h'| + |w - w'| |h'|. Few tokens, often one, may be the best within this bound. Only their logits are computed in float32,
and the token that is selected is the same.
"""

import dataclasses
import functools

import torch
from torch import nn

from metaphrase.decoding.prepacked_weights import is_plain
from metaphrase.decoding.quantization import has_kernels, multiply_levels, pack_int8, round_weight, scale_rows

# A projection of 512 x 10k gains 1 to 8 % of a step, one of 512 x 32k 20 to 40 % (one core). Many rows gain nothing.
LEAST_SIZE, _MOST_ROWS = 2**21, 32
# Rows of the weight that are rounded at a time, to need little memory.
_BLOCK = 4096


@dataclasses.dataclass
class Shortlist:
    """Tokens that may have the largest logit in some rows.

    Attributes:
        tokens: Tokens for all rows together, ascending, shape (count,).
        logits: Logits of these tokens, (rows, count).
        floor: A bound that no logit of another token exceeds, (rows,).
        vocab_size: Size of the vocabulary.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    floor: torch.Tensor
    vocab_size: int


class ShortlistProjection:
    """A projection from decoder output to shortlists."""

    def __init__(self, head: nn.Linear):
        """Take a projection to logits for which `can_shortlist` is true, and whose weights do not change."""
        self._head = head

    def __call__(self, states: torch.Tensor) -> Shortlist | None:
        """Return the shortlist of states (rows, H), or None if all logits are computed as fast."""
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
        logits = multiply_levels(scaled, packed)
        if bias is not None:
            logits += bias / scale
        floor = torch.addmm(logits, state_norms, weight_norms, alpha=-1).amax(dim=1, keepdim=True)
        highest = logits.addmm_(state_norms, weight_norms)
        tokens = (highest.sub_(floor).amax(dim=0) >= 0).nonzero()[:, 0]
        # With NaN in the states, no token reaches the floor.
        if not 0 < len(tokens) <= highest.shape[1] // 8:
            return None
        weight, bias = self._head.weight[tokens], None if bias is None else bias[tokens]
        exact = nn.functional.linear(states, weight, bias)
        return Shortlist(tokens, exact, (floor * scale)[:, 0], highest.shape[1])

    @functools.cached_property
    def _rounded(self) -> tuple[torch.ScriptObject, torch.Tensor]:
        """The packed weight in 8 bits, and the norms of each token's weights and of their rounding errors, (2, V)."""
        blocks, norms = [], []
        for block in self._head.weight.detach().split(_BLOCK):
            levels, scale = round_weight(block)
            error = torch.addcmul(block, levels.to(block.dtype), scale[:, None], value=-1)
            norms.append(torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in (block, error)]))
            blocks.append((levels, scale))
        return pack_int8(*map(torch.cat, zip(*blocks, strict=True))), torch.cat(norms, dim=1)


def can_shortlist(head: nn.Module) -> bool:
    """Return True if a projection to logits is plain and large, in float32 on a CPU that has int8 kernels."""
    return is_plain(head) and head.weight.numel() > LEAST_SIZE and has_kernels()
