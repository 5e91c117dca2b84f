"""The state of decoding: what the decoder keeps from token to token, and the step from one to the next.

The plain way is `MetaphraseDecoder.forward` with a cache. Here what does not change between steps is made once, what changes is
written in place, and attention of the one new token is two products of matrices. Both compute the same.
"""

import torch
from torch import nn

from .attention import fold_copies, unfold_copies
from .decoder import MetaphraseDecoder
from .positions import LearnedPositionEmbedding, rotate
from .step_cache import StepCache, layer_views
from .step_layer import StepLayer, step_layers

# Their angles depend on how long the sequence is so far.
_CHANGING_ROTATIONS = ("dynamic", "longrope")


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
        self.decoder, self.layers = decoder, step_layers(decoder)
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
        layers, _, sources, self.key_value_heads, _, _ = self._memory.shape
        self._memory_views = layer_views(self._memory)
        self._tokens = StepCache(layers, sources, self.key_value_heads, self.head_dim, like=self._memory)
        self._biases: list[torch.Tensor | None] = []
        # Of the step: where each layer puts the new keys and values, what it attends to, and what it adds to the scores.
        self._slots: tuple[torch.Tensor, ...] = ()
        self._token_views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._token_biases: list[torch.Tensor | None] = []
        # Of each place in the cache: (capacity, hidden), and cosine and sine (capacity, rotated).
        self._positions: torch.Tensor | None = None
        self._rotations: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rows(self) -> int:
        return self._tokens.rows

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Reads one token of each row, `(rows)`, and returns the decoder's output `(rows, hidden)`."""
        past = self.length + 1
        self._make_room(past)
        states = self._tokens.states
        self._slots = states.select(4, self.length).unbind(0)
        self._token_views = layer_views(states[:, :, :, :, :past])
        # (heads, capacity) -> (1, key_value_heads, groups, past), once where layers share it
        biases = {
            id(bias): None if bias is None else bias[None, :, -past:].unflatten(1, (-1, self.groups))
            for bias in self._biases
        }
        self._token_biases = [biases[id(bias)] for bias in self._biases]
        hidden_states, rotation = self._enter(self.decoder.embed_tokens(input_ids))
        for index, layer in enumerate(self.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.length = past
        return self.decoder.norm(hidden_states)

    def spread(self, copies: int) -> None:
        """Gives each source so many targets, which are the same so far."""
        if copies > 1:
            rows = torch.arange(self.rows, device=self._memory.device)
            self._tokens.choose(rows.repeat_interleave(copies))
            self.copies *= copies

    def reorder(self, rows: torch.Tensor, unchanged: int = 0) -> None:
        """Lets each row go on from another one of the same source, `(rows)`, which has the same first `unchanged` tokens."""
        if unchanged:
            # That holds of the rows as they are now.
            self._tokens.settle(self.length)
        self._tokens.choose(rows)
        if unchanged:
            self._tokens.settle(self.length, unchanged)

    def keep(self, sources: torch.Tensor) -> None:
        """Goes on with these sources alone, `(sources)`, and their targets."""
        self._memory = self._memory.index_select(2, sources)
        self._memory_views = layer_views(self._memory)
        if self._memory_bias is not None:
            self._memory_bias = self._memory_bias.index_select(0, sources)
        targets = torch.arange(self.copies, device=sources.device)
        self._tokens.choose((sources[:, None] * self.copies + targets).flatten())

    def _make_room(self, past: int) -> None:
        """Lets rows take their places, with room for so many tokens in each."""
        self._tokens.settle(self.length)
        if past <= self._tokens.capacity:
            return
        self._tokens.grow(self.length, past)
        keys = torch.arange(self._tokens.capacity, device=self._memory.device)[None]
        # Of the last query: that of an earlier one is its end, since only the distance counts. (heads, capacity)
        biases = {
            module: None if module is None else module(keys[:, -1:], keys)[0, :, 0].to(self._memory.dtype)
            for module in dict.fromkeys(self.decoder._biases())
        }
        per_layer = [biases[module] for module in self.decoder._biases()]
        self._biases = per_layer * (len(self.layers) // len(per_layer))
        self._make_positions(keys)

    def _make_positions(self, places: torch.Tensor) -> None:
        """What the decoder adds and turns by at each place, `(1, capacity)`."""
        table, rotary = self.decoder.embed_positions, self.decoder.rotary_emb
        if table is not None:
            if isinstance(table, LearnedPositionEmbedding):
                places = places[:, : table.num_embeddings - table.offset]
            self._positions = table(places, places.shape[1])[0]
        if rotary is not None and rotary.rope_type not in _CHANGING_ROTATIONS:
            # (1, 1, capacity, rotated) -> (capacity, rotated)
            self._rotations = tuple(angles[0, 0] for angles in rotary(self._memory, places))

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
            return decoder.embedding_norm(embeddings), rotation
        places = torch.tensor([[place]], device=embeddings.device)
        hidden_states, rotation = decoder._enter(embeddings[:, None], places, place + 1)
        return hidden_states[:, 0], None if rotation is None else tuple(angles[0, 0] for angles in rotation)

    def _pass_layer(
        self,
        index: int,
        layer: StepLayer,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        token_norm, memory_norm, mlp_norm = layer.norms
        if layer.is_pre_norm:
            hidden_states = hidden_states + self._attend_to_tokens(index, layer, token_norm(hidden_states), rotation)
            hidden_states = hidden_states + self._attend_to_memory(index, layer, memory_norm(hidden_states))
            return hidden_states + layer.feed_forward(mlp_norm(hidden_states))
        hidden_states = token_norm(hidden_states + self._attend_to_tokens(index, layer, hidden_states, rotation))
        hidden_states = memory_norm(hidden_states + self._attend_to_memory(index, layer, hidden_states))
        return mlp_norm(hidden_states + layer.feed_forward(hidden_states))

    def _project_tokens(
        self, layer: StepLayer, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(..., hidden) -> queries (..., heads, head_dim), keys and values (..., key_value_heads, head_dim)"""
        states = layer.token_projection(hidden_states)
        states = states.view(*states.shape[:-1], -1, self.head_dim)
        sizes = (self.key_value_heads * self.groups, self.key_value_heads, self.key_value_heads)
        query, key, value = states.split_with_sizes(sizes, dim=-2)
        if layer.token_norms is not None:
            query_norm, key_norm = layer.token_norms
            query, key = query_norm(query), key_norm(key)
        return query, key, value

    def _project_memory_query(self, layer: StepLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., heads, head_dim)"""
        query = layer.memory_query(hidden_states)
        query = query.view(*query.shape[:-1], -1, self.head_dim)
        return query if layer.memory_norms is None else layer.memory_norms[0](query)

    def _attend_to_tokens(
        self,
        index: int,
        layer: StepLayer,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        rows = hidden_states.shape[0]
        query, key, value = self._project_tokens(layer, hidden_states)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        keys, values = self._slots[index].unbind(0)
        keys.copy_(key)
        values.copy_(value)
        # (rows, heads, head_dim) -> (rows * key_value_heads, groups, head_dim)
        query = query.reshape(-1, self.groups, self.head_dim)
        output = attend_rows(query, *self._token_views[index], self._token_biases[index], layer.token_scaling, rows)
        return layer.token_output(output.view(rows, -1))

    def _attend_to_memory(self, index: int, layer: StepLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        rows, sources = hidden_states.shape[0], hidden_states.shape[0] // self.copies
        query = self._project_memory_query(layer, hidden_states)
        if self.copies > 1:
            # (rows, heads, head_dim) -> (sources, key_value_heads, copies * groups, head_dim) and back
            query = fold_copies(query.view(rows, self.key_value_heads, self.groups, self.head_dim), self.copies)
        # (sources * key_value_heads, copies * groups, head_dim)
        query = query.reshape(sources * self.key_value_heads, -1, self.head_dim)
        output = attend_rows(query, *self._memory_views[index], self._memory_bias, layer.memory_scaling, sources)
        if self.copies > 1:
            output = unfold_copies(output.unflatten(0, (sources, -1)), self.copies)
        return layer.memory_output(output.reshape(rows, -1))


def attend(
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
    batch, heads = query.shape[:2]
    rows = (query.reshape(batch * heads, -1, query.shape[-1]), keys.flatten(0, 1), values.flatten(0, 1))
    return attend_rows(*rows, bias, scaling, batch).unflatten(0, (batch, heads))


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float, batch: int
) -> torch.Tensor:
    """Attention of few queries, heads side by side.

    Args:
        query: `(batch * heads, query, head_dim)`.
        keys: `(batch * heads, key, head_dim)`.
        values: `(batch * heads, key, head_dim)`.
        bias: Added to the scores, `(1 or batch, 1 or heads, 1 or query, key)`.
        scaling: Factor of the scores.
        batch: Rows, of so many heads each.

    Returns:
        `(batch * heads, query, head_dim)`.
    """
    if query.dtype != torch.float32:
        # Its scores are more precise than its operands.
        parts = (states.unflatten(0, (batch, -1)) for states in (query, keys, values))
        return nn.functional.scaled_dot_product_attention(*parts, attn_mask=bias, scale=scaling).flatten(0, 1)
    # For one query this is several times as fast on a CPU. With a factor of 0 what stands first is not read.
    scores = torch.baddbmm(query.new_empty((1,)), query, keys.transpose(1, 2), beta=0, alpha=scaling)
    if bias is not None:
        scores = scores.unflatten(0, (batch, -1)).add_(bias).flatten(0, 1)
    return torch.bmm(scores.softmax(dim=-1), values)
