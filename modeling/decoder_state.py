"""The state of decoding: what the decoder keeps from token to token, and the step from one to the next.

The plain way is `MetaphraseDecoder.forward` with a cache. Here what does not change between steps is made once, what changes is
written in place, and attention of the one new token is two products of matrices. Both compute the same.
"""

import torch
from torch import nn

from .attention import MetaphraseAttention, fold_copies, unfold_copies
from .layers import MetaphraseDecoderLayer
from .positions import rotate
from .stacks import MetaphraseDecoder

_FIRST_CAPACITY = 16


class DecoderState:
    """Keys and values of all layers: of the sources, and of the tokens so far of their targets.

    At first each source has one target; `spread` makes several, which stay side by side. Rows are targets.

    Attributes:
        length: Tokens so far.
        copies: Targets of each source.
    """

    def __init__(self, decoder: MetaphraseDecoder, memory: torch.Tensor, memory_mask: torch.Tensor | None):
        """Projects the sources.

        Args:
            decoder: Without dropout, in float32 or bfloat16.
            memory: What the encoder made of the sources, `(sources, source, hidden)`.
            memory_mask: 1 for a token, 0 for padding, `(sources, source)`.
        """
        self.decoder = decoder
        self.length, self.copies = 0, 1
        attention = decoder.layers[0].self_attn
        self.head_dim, self.groups = attention.head_dim, attention.num_key_value_groups
        # (layers, keys and values, sources, heads, source, head_dim)
        self._memory = torch.stack(
            [torch.stack(layer.cross_attn._keys_and_values(memory, rotation=None)) for layer in decoder.layers]
        )
        self._memory_bias = None
        if memory_mask is not None and not bool(memory_mask.all()):
            # Under autocast projections have another type than the memory.
            bias = torch.zeros_like(memory_mask, dtype=self._memory.dtype)
            bias.masked_fill_(memory_mask == 0, torch.finfo(bias.dtype).min)
            # (sources, 1, 1, source)
            self._memory_bias = bias[:, None, None]
        layers, _, sources, heads, _, _ = self._memory.shape
        # (layers, keys and values, rows, heads, capacity, head_dim)
        self._tokens = self._memory.new_empty(layers, 2, sources, heads, 0, self.head_dim)
        self._biases: list[torch.Tensor | None] = []

    @property
    def rows(self) -> int:
        return self._tokens.shape[2]

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Reads one token of each row, `(rows)`, and returns the decoder's output `(rows, hidden)`."""
        if self.length == self._tokens.shape[4]:
            self._make_room(max(_FIRST_CAPACITY, 2 * self.length))
        decoder = self.decoder
        place = torch.tensor([[self.length]], device=input_ids.device)
        # (rows, hidden) -> (rows, 1, hidden), as all below `_enter` expects.
        hidden_states, rotation = decoder._enter(decoder.embed_tokens(input_ids)[:, None], place, self.length + 1)
        hidden_states = hidden_states[:, 0]
        if rotation is not None:
            # (1, 1, 1, rotated) -> (1, rotated)
            rotation = tuple(angles[0, 0] for angles in rotation)
        for index, layer in enumerate(decoder.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.length += 1
        return decoder.norm(hidden_states)

    def spread(self, copies: int) -> None:
        """Gives each source so many targets, which are the same so far."""
        if copies > 1:
            self._tokens = self._tokens.repeat_interleave(copies, dim=2)
            self.copies *= copies

    def reorder(self, rows: torch.Tensor, unchanged: int = 0) -> None:
        """Lets each row go on from another one of the same source, `(rows)`, which has the same first `unchanged` tokens."""
        filled = self._tokens[:, :, :, :, unchanged : self.length]
        moved = (rows != torch.arange(self.rows, device=rows.device)).nonzero()[:, 0]
        if 2 * len(moved) < self.rows:
            filled[:, :, moved] = filled[:, :, rows[moved]]
        else:
            filled.copy_(filled.index_select(2, rows))

    def keep(self, sources: torch.Tensor) -> None:
        """Goes on with these sources alone, `(sources)`, and their targets."""
        self._memory = self._memory.index_select(2, sources)
        if self._memory_bias is not None:
            self._memory_bias = self._memory_bias.index_select(0, sources)
        self._tokens = self._tokens.unflatten(2, (-1, self.copies)).index_select(2, sources).flatten(2, 3)

    def _make_room(self, capacity: int) -> None:
        grown = self._tokens.new_empty((*self._tokens.shape[:4], capacity, self.head_dim))
        grown[:, :, :, :, : self.length] = self._tokens[:, :, :, :, : self.length]
        self._tokens = grown
        keys = torch.arange(capacity, device=grown.device)[None]
        # Of the last query: that of an earlier one is its end, since only the distance counts. (heads, capacity)
        biases = {
            module: None if module is None else module(keys[:, -1:], keys)[0, :, 0].to(grown.dtype)
            for module in dict.fromkeys(self.decoder._biases())
        }
        per_layer = [biases[module] for module in self.decoder._biases()]
        self._biases = per_layer * (len(self.decoder.layers) // len(per_layer))

    def _pass_layer(
        self,
        index: int,
        layer: MetaphraseDecoderLayer,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        output = self._attend_to_tokens(
            index, layer.self_attn, layer._enter(hidden_states, layer.self_attn_norm), rotation
        )
        hidden_states = layer._leave(hidden_states, output, layer.self_attn_norm)
        output = self._attend_to_memory(index, layer.cross_attn, layer._enter(hidden_states, layer.cross_attn_norm))
        hidden_states = layer._leave(hidden_states, output, layer.cross_attn_norm)
        output = layer.mlp(layer._enter(hidden_states, layer.mlp_norm))
        return layer._leave(hidden_states, output, layer.mlp_norm)

    def _query(self, attention: MetaphraseAttention, hidden_states: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, heads, head_dim)"""
        query = attention.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        return attention.q_norm(query) if attention.config.qk_norm else query

    def _attend_to_tokens(
        self,
        index: int,
        attention: MetaphraseAttention,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        rows, past = hidden_states.shape[0], self.length + 1
        query = self._query(attention, hidden_states)
        key = attention.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        if attention.config.qk_norm:
            key = attention.k_norm(key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        tokens = self._tokens[index]
        tokens[0, :, :, self.length] = key
        tokens[1, :, :, self.length] = attention.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        bias = self._biases[index]
        if bias is not None:
            # (heads, past) -> (1, key_value_heads, groups, past)
            bias = bias[None, :, -past:].unflatten(1, (-1, self.groups))
        keys, values = tokens[:, :, :, :past]
        output = _attend(query.unflatten(1, (-1, self.groups)), keys, values, bias, attention.scaling)
        return attention.o_proj(output.reshape(rows, -1))

    def _attend_to_memory(
        self, index: int, attention: MetaphraseAttention, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._memory[index]
        query = self._query(attention, hidden_states).unflatten(1, (-1, self.groups))
        # (rows, key_value_heads, groups, head_dim) -> (sources, key_value_heads, copies * groups, head_dim) and back
        output = _attend(fold_copies(query, self.copies), keys, values, self._memory_bias, attention.scaling)
        return attention.o_proj(unfold_copies(output, self.copies).reshape(len(query), -1))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of few queries.

    Args:
        query: `(batch, heads, query, head_dim)`.
        keys: `(batch, heads, key, head_dim)`.
        values: `(batch, heads, key, head_dim)`.
        bias: Added to the scores, `(1 or batch, 1 or heads, 1 or query, key)`.
        scaling: Factor of the scores.

    Returns:
        `(batch, heads, query, head_dim)`.
    """
    if query.dtype != torch.float32:
        # Its scores are more precise than its operands.
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    # For one query this is several times as fast on a CPU.
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).unflatten(0, query.shape[:2])
    scores *= scaling
    if bias is not None:
        scores += bias
    weights = nn.functional.softmax(scores, dim=-1)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).unflatten(0, query.shape[:2])
