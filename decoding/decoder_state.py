"""Attention to one source, made ready for many steps: keys take in what projects the queries, values what projects the output.

Of a head with queries x W, keys K and values V, and a part U of the output projection, scores x W K' are x (W K'), and outputs
p V U are p (V U). A step makes two products in place of four and, for a source much shorter than a head is wide, reads less.

Source: absorbing a projection into the next one is that of DeepSeek-AI 2024, section 2.1.2, arXiv 2405.04434.

The state of decoding: what the decoder keeps from token to token, and the step from one to the next.

The plain way is `MetaphraseDecoder.forward` with a cache. Here what does not change between steps is made once, what changes is
written in place, and attention of the one new token is two products of matrices. Both compute the same.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from metaphrase.decoding.kv_cache import KeyValueCache
from metaphrase.decoding.prepacked_weights import is_plain
from metaphrase.decoding.prepared_decoder import PreparedLayer, prepared_layers, prepared_norm
from metaphrase.modeling.attention import MetaphraseAttention, fold_copies, unfold_copies
from metaphrase.modeling.decoder import MetaphraseDecoder
from metaphrase.modeling.positions import LearnedPositionEmbedding, rotate

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


# Their angles depend on how long the sequence is so far.
_CHANGING_ROTATIONS = ("dynamic", "longrope")


class DecoderState:
    """Keys and values of all layers: of the sources, and of the tokens so far of their targets.

    At first each source has one target; `spread` makes several, which stay side by side. Rows are targets. Each goes on by
    itself; for targets that go on from one another see `BeamState`.

    Attributes:
        length: Tokens so far.
        copies: Targets of each source.
        token_copies: Targets that share the keys and values of their tokens.
    """

    token_copies = 1

    def __init__(self, decoder: MetaphraseDecoder, memory: torch.Tensor, memory_mask: torch.Tensor | None):
        """Projects the sources.

        Args:
            decoder: Without dropout, in float32 or bfloat16.
            memory: What the encoder made of the sources, `(sources, source, hidden)`.
            memory_mask: 1 for a token, 0 for padding, `(sources, source)`.
        """
        self.decoder, self.layers = decoder, prepared_layers(decoder)
        self._embedding_norm, self._norm = prepared_norm(decoder.embedding_norm), prepared_norm(decoder.norm)
        self.length, self.copies = 0, 1
        attention = decoder.layers[0].self_attn
        self.head_dim, self.groups = attention.head_dim, attention.num_key_value_groups
        self._memory = KeyValueCache.of(self._project_memory(layer, memory) for layer in self.layers)
        # Under autocast projections have another type than the memory.
        self.device, self.dtype = memory.device, self._memory.values.dtype
        self._memory_bias = None
        if memory_mask is not None and not bool(memory_mask.all()):
            bias = torch.zeros_like(memory_mask, dtype=self.dtype)
            bias.masked_fill_(memory_mask == 0, torch.finfo(self.dtype).min)
            # (sources, 1, 1, source)
            self._memory_bias = bias[:, None, None]
        self.key_value_heads = self._memory.keys.shape[2]
        self._memory_views = self._memory.views(memory.shape[1])
        self._absorbed = self._absorb()
        self._tokens = self._memory.emptied()
        self._biases: list[torch.Tensor | None] = []
        # Of the step: where each layer puts the new keys and values, what it attends to, and what it adds to the scores.
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._token_views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._token_biases: list[torch.Tensor | None] = [None] * len(self.layers)
        self._has_biases = False
        # So many places of a target have been prepared: (places, hidden), and cosine and sine (places, rotated).
        self.num_places = 0
        self._positions: torch.Tensor | None = None
        self._rotations: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rows(self) -> int:
        return self._tokens.rows

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Reads one token of each row, `(rows)`, and returns the decoder's output `(rows, hidden)`."""
        self._make_room(self.length + 1)
        self._open_step()
        hidden_states, rotation = self._enter(self.decoder.embed_tokens(input_ids))
        for index, layer in enumerate(self.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.length += 1
        return self._norm(hidden_states)

    def spread(self, copies: int) -> None:
        """Gives each source so many targets, which are the same so far."""
        if copies > 1:
            rows = torch.arange(self.rows, device=self.device)
            self._tokens.keep_rows(rows.repeat_interleave(copies))
            self._spread_memory(copies)

    def keep(self, sources: torch.Tensor) -> None:
        """Goes on with these sources alone, `(sources)`, and their targets."""
        self._keep_memory(sources)
        targets = torch.arange(self.copies, device=sources.device)
        self._tokens.keep_rows((sources[:, None] * self.copies + targets).flatten())

    def _absorb(self) -> list[AbsorbedAttention] | None:
        """The attention of each layer to a source that is the only one; `None` where that is not worth while."""
        attentions = [layer.cross_attn for layer in self.decoder.layers]
        if self._memory.rows != 1 or self.dtype != torch.float32 or not all(map(can_absorb, attentions)):
            return None
        if not self._is_worth_absorbing():
            return None
        bias = None if self._memory_bias is None else self._memory_bias.flatten()
        views = zip(attentions, self._memory_views, strict=True)
        return [AbsorbedAttention(attention, keys, values, bias) for attention, (keys, values) in views]

    def _is_worth_absorbing(self) -> bool:
        attention = self.decoder.layers[0].cross_attn
        return is_worth_absorbing(attention, self._memory.capacity, self.copies)

    def _spread_memory(self, copies: int) -> None:
        self.copies *= copies
        if self._absorbed is not None and not self._is_worth_absorbing():
            self._absorbed = None

    def _keep_memory(self, sources: torch.Tensor) -> None:
        self._memory.keep_rows(sources)
        self._memory_views = self._memory.views(self._memory.capacity)
        if self._memory_bias is not None:
            self._memory_bias = self._memory_bias.index_select(0, sources)

    def _make_room(self, past: int) -> None:
        """Makes room for so many tokens in each row."""
        if past > self._tokens.capacity:
            self._tokens.grow(self.length, past)
            self._make_tables(self._tokens.capacity)

    def _make_tables(self, places: int) -> None:
        """What the decoder adds at each of so many places, and turns by."""
        self.num_places = places
        keys = torch.arange(places, device=self.device)[None]
        # Of the last query: that of an earlier one is its end, since only the distance counts. (heads, places)
        biases = {
            module: None if module is None else module(keys[:, -1:], keys)[0, :, 0].to(self.dtype)
            for module in dict.fromkeys(self.decoder._biases())
        }
        per_layer = [biases[module] for module in self.decoder._biases()]
        self._biases = per_layer * (len(self.layers) // len(per_layer))
        self._has_biases = any(bias is not None for bias in per_layer)
        self._make_positions(keys)

    def _open_step(self) -> None:
        """Says where the new token's keys and values go, what it attends to, and what is added to the scores."""
        past, keys, values = self.length + 1, self._tokens.keys, self._tokens.values
        self._slots = list(zip(keys[..., self.length].unbind(0), values[..., self.length, :].unbind(0), strict=True))
        self._token_views = self._tokens.views(past)
        if self._has_biases:
            self._token_biases = self._of_each_layer(
                lambda bias: None if bias is None else bias[None, :, -past:].unflatten(1, (-1, self.groups))
            )

    def _of_each_layer(self, make: Callable[[torch.Tensor | None], torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What is made of each layer's bias `(heads, places)`, once where layers share it: `(rows, heads, queries, keys)`."""
        made = {id(bias): bias for bias in self._biases}
        made = {key: make(bias) for key, bias in made.items()}
        return [made[id(bias)] for bias in self._biases]

    def _make_positions(self, places: torch.Tensor) -> None:
        """What the decoder adds and turns by at each place, `(1, capacity)`."""
        table, rotary = self.decoder.embed_positions, self.decoder.rotary_emb
        if table is not None:
            if isinstance(table, LearnedPositionEmbedding):
                places = places[:, : table.num_embeddings - table.offset]
            self._positions = table(places, places.shape[1])[0]
        if rotary is not None and rotary.rope_type not in _CHANGING_ROTATIONS:
            # (1, 1, capacity, rotated) -> (capacity, rotated)
            self._rotations = tuple(angles[0, 0] for angles in rotary(self._memory.values, places))

    def _enter(self, embeddings: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """What the first layer reads, `(rows, hidden)`, and the rotation of all layers, `(1, rotated)`."""
        decoder, place = self.decoder, self.length
        is_known = self._positions is None or place < len(self._positions)
        if is_known and (decoder.rotary_emb is None or self._rotations is not None):
            if self._positions is not None:
                embeddings = embeddings + self._positions[place].to(embeddings.dtype)
            rotation = None
            if self._rotations is not None:
                rotation = tuple(angles[place, None].to(embeddings.dtype) for angles in self._rotations)
            return self._embedding_norm(embeddings), rotation
        places = torch.tensor([[place]], device=embeddings.device)
        hidden_states, rotation = decoder._enter(embeddings[:, None], places, place + 1)
        return hidden_states[:, 0], None if rotation is None else tuple(angles[0, 0] for angles in rotation)

    def _pass_layer(
        self,
        index: int,
        layer: PreparedLayer,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        token_norm, memory_norm, mlp_norm = layer.norms
        if layer.is_pre_norm:
            hidden_states = hidden_states + self._attend_to_tokens(index, layer, token_norm(hidden_states), rotation)
            hidden_states = self._add_memory(index, layer, hidden_states, memory_norm(hidden_states))
            return hidden_states + layer.feed_forward(mlp_norm(hidden_states))
        hidden_states = token_norm(hidden_states + self._attend_to_tokens(index, layer, hidden_states, rotation))
        hidden_states = memory_norm(self._add_memory(index, layer, hidden_states, hidden_states))
        return mlp_norm(hidden_states + layer.feed_forward(hidden_states))

    def _project_tokens(
        self, layer: PreparedLayer, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(..., hidden) -> queries (..., heads, head_dim), keys and values (..., key_value_heads, head_dim)"""
        states = layer.self_qkv(hidden_states)
        states = states.view(*states.shape[:-1], -1, self.head_dim)
        sizes = (self.key_value_heads * self.groups, self.key_value_heads, self.key_value_heads)
        query, key, value = states.split_with_sizes(sizes, dim=-2)
        if layer.self_head_norms is not None:
            query_norm, key_norm = layer.self_head_norms
            query, key = query_norm(query), key_norm(key)
        return query, key, value

    def _project_memory(self, layer: PreparedLayer, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sources, source, hidden) -> keys and values (sources, key_value_heads, source, head_dim)"""
        states = layer.cross_key_value(memory).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        keys, values = states.chunk(2, dim=1)
        return keys if layer.cross_head_norms is None else layer.cross_head_norms[1](keys), values

    def _project_memory_query(self, layer: PreparedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., heads, head_dim)"""
        query = layer.cross_query(hidden_states)
        query = query.view(*query.shape[:-1], -1, self.head_dim)
        return query if layer.cross_head_norms is None else layer.cross_head_norms[0](query)

    def _attend_to_tokens(
        self,
        index: int,
        layer: PreparedLayer,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        query, key, value = self._project_tokens(layer, hidden_states)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        keys, values = self._slots[index]
        if self.token_copies > 1:
            key, value = key.view(keys.shape), value.view(values.shape)
        keys.copy_(key)
        values.copy_(value)
        views, bias = self._token_views[index], self._token_biases[index]
        return layer.self_output(self._ask(query, views, bias, layer.self_scaling, self.token_copies))

    def _add_memory(
        self, index: int, layer: PreparedLayer, residual: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """What the layer finds in the source, added to the residual, both `(rows, ..., hidden)`."""
        if self._absorbed is None:
            return residual + self._attend_to_memory(index, layer, hidden_states)
        if residual.ndim == 2:
            return self._absorbed[index].add_to(residual, hidden_states)
        flat = residual.flatten(0, -2), hidden_states.flatten(0, -2)
        return self._absorbed[index].add_to(*flat).view(residual.shape)

    def _attend_to_memory(self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        query, views = self._project_memory_query(layer, hidden_states), self._memory_views[index]
        return layer.cross_output(self._ask(query, views, self._memory_bias, layer.cross_scaling, self.copies))

    def _ask(
        self,
        query: torch.Tensor,
        views: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        scaling: float,
        copies: int,
    ) -> torch.Tensor:
        """Attention of one query of each row.

        Args:
            query: `(rows, heads, head_dim)`.
            views: Keys `(rows / copies * key_value_heads, head_dim, keys)` and values `(rows / copies * key_value_heads, keys,
                head_dim)`.
            bias: Added to the scores, `(1 or rows / copies, 1 or key_value_heads, 1 or copies * groups, keys)`.
            scaling: Factor of the scores.
            copies: Rows that share keys and values.

        Returns:
            `(rows, heads * head_dim)`.
        """
        rows = query.shape[0]
        if copies > 1:
            # (rows, heads, head_dim) -> (rows / copies, key_value_heads, copies * groups, head_dim) and back
            query = fold_copies(query.view(rows, self.key_value_heads, self.groups, self.head_dim), copies)
        # (rows / copies * key_value_heads, copies * groups, head_dim)
        query = query.reshape(rows // copies * self.key_value_heads, -1, self.head_dim)
        output = attend_rows(query, *views, bias, scaling, rows // copies)
        if copies > 1:
            output = unfold_copies(output.unflatten(0, (rows // copies, -1)), copies)
        return output.reshape(rows, -1)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of few queries.

    Args:
        query: `(batch, heads, query, head_dim)`.
        keys: In columns, `(batch, heads, head_dim, key)`.
        values: `(batch, heads, key, head_dim)`.
        bias: Added to the scores, `(1 or batch, 1 or heads, 1 or query, key)`.
        scaling: Factor of the scores.

    Returns:
        `(batch, heads, query, head_dim)`.
    """
    batch, heads = query.shape[:2]
    rows = (query.reshape(batch * heads, -1, query.shape[-1]), keys.flatten(0, 1), values.flatten(0, 1))
    return attend_rows(*rows, bias, scaling, batch).unflatten(0, (batch, heads))


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float, batch: int
) -> torch.Tensor:
    """Attention of few queries, heads side by side.

    Args:
        query: `(batch * heads, query, head_dim)`.
        keys: In columns, `(batch * heads, head_dim, key)`.
        values: `(batch * heads, key, head_dim)`.
        bias: Added to the scores, `(1 or batch, 1 or heads, 1 or query, key)`.
        scaling: Factor of the scores.
        batch: Rows, of so many heads each.

    Returns:
        `(batch * heads, query, head_dim)`.
    """
    if query.dtype != torch.float32:
        # Its scores are more precise than its operands.
        parts = (states.unflatten(0, (batch, -1)) for states in (query, keys.mT, values))
        return nn.functional.scaled_dot_product_attention(*parts, attn_mask=bias, scale=scaling).flatten(0, 1)
    # For one query this is several times as fast on a CPU. With a factor of 0 what stands first is not read.
    scores = torch.baddbmm(_unread(query.device), query, keys, beta=0, alpha=scaling)
    if bias is not None:
        scores = scores.unflatten(0, (batch, -1)).add_(bias).flatten(0, 1)
    return torch.bmm(scores.softmax(dim=-1), values)


@functools.cache
def _unread(device: torch.device) -> torch.Tensor:
    """What a kernel that adds wants to be given where nothing is to be added. To make one takes as long as a small product."""
    with torch.inference_mode(False):
        return torch.empty(1, dtype=torch.float32, device=device)
