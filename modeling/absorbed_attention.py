"""Attention to one source, made ready for many steps: keys take in what projects the queries, values what projects the output.

Of a head with queries x W, keys K and values V, and a part U of the output projection, scores x W K' are x (W K'), and outputs
p V U are p (V U). A step makes two products in place of four and, for a source much shorter than a head is wide, reads less.

Source: absorbing a projection into the next one is that of DeepSeek-AI 2024, section 2.1.2, arXiv 2405.04434.
"""

import torch

from .attention import MetaphraseAttention
from .packed_weight import is_plain

# With so few entries of a product, and rows, it is calls that count, not what is read or multiplied.
_FEW_ENTRIES, _FEW_ROWS = 2**17, 8


class AbsorbedAttention:
    """The cross-attention of a layer to one source."""

    def __init__(
        self, attention: MetaphraseAttention, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ):
        """Makes the products.

        Args:
            attention: For which `can_absorb` holds.
            keys: In columns, `(key_value_heads, head_dim, source)`.
            values: `(key_value_heads, source, head_dim)`.
            bias: Added to the scores, `(source)`.
        """
        query, output, groups = attention.q_proj, attention.o_proj, attention.num_key_value_groups
        # (heads, source, head_dim)
        keys, values = (
            states if groups == 1 else states.repeat_interleave(groups, dim=0) for states in (keys.mT, values)
        )
        heads, self._length, head_dim = keys.shape
        keys = keys * attention.scaling
        # (heads, head_dim, hidden)
        weight = query.weight.detach().view(heads, head_dim, -1)
        # (hidden, heads * source)
        self._keys = torch.bmm(keys, weight).flatten(0, 1).t()
        # (heads, source)
        bias = None if bias is None else bias.expand(heads, -1)
        if query.bias is not None:
            of_query = torch.bmm(keys, query.bias.detach().view(heads, head_dim, 1))[..., 0]
            bias = of_query if bias is None else of_query + bias
        self._bias = None if bias is None else bias.flatten()
        # (hidden, heads * head_dim) -> (heads, head_dim, hidden)
        weight = output.weight.detach().view(-1, heads, head_dim).permute(1, 2, 0)
        values = torch.bmm(values, weight)
        if output.bias is not None:
            # The weights of a head sum up to 1.
            values[0] += output.bias.detach()
        # (heads * source, hidden)
        self._values = values.flatten(0, 1)

    def add_to(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What comes of these states is added to the residual, both `(rows, hidden)`."""
        bias, keys = self._bias, self._keys
        scores = torch.mm(states, keys) if bias is None else torch.addmm(bias, states, keys)
        weights = scores.view(-1, self._length).softmax(dim=-1).view(scores.shape)
        return torch.addmm(residual, weights, self._values)


def can_absorb(attention: MetaphraseAttention) -> bool:
    """Whether a cross-attention is one of plain projections alone, in float32 on a CPU."""
    return not attention.config.qk_norm and all(map(is_plain, (attention.q_proj, attention.o_proj)))


def is_worth_absorbing(attention: MetaphraseAttention, length: int, rows: int) -> bool:
    """Whether steps gain by it, for a source of so many tokens and so many targets."""
    size = attention.q_proj.weight.numel()
    entries = length * size // attention.head_dim
    return entries <= size // 2 or (entries <= _FEW_ENTRIES and rows <= _FEW_ROWS)
