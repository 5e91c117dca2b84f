"""The state of decoding, the kv cache of sources and targets, and the decoding step.

`MetaphraseDecoder.forward` with a cache computes the same. Here, values that are the same in all steps are computed once, new
keys and values are written in place, and attention of the one new token is two matrix products.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from metaphrase.decoding.kv_cache import KeyValueCache
from metaphrase.decoding.prepacked_weights import is_plain
from metaphrase.decoding.prepared_decoder import PreparedLayer, prepared_layers, prepared_norm
from metaphrase.modeling.encoder_decoder import MetaphraseDecoder
from metaphrase.modeling.layers import MetaphraseAttention, fold_copies, unfold_copies
from metaphrase.modeling.positions import LearnedPositionEmbedding, rotate

# With so few entries of a product, and so few rows, the number of calls decides the time, not their size.
_FEW_ENTRIES, _FEW_ROWS = 2**17, 8
# These rotations depend on the length of the sequence so far.
_CHANGING_ROTATIONS = ("dynamic", "longrope")

Rotation = tuple[torch.Tensor, torch.Tensor] | None


class _AbsorbedAttention:
    """The cross-attention of a layer to one source: the keys absorb the query projection, the values the output projection.

    For queries x W, keys K, values V and a slice U of the output projection, scores x W K' are x (W K'), and outputs p V U are
    p (V U). A step makes two products instead of four, and reads less if the source is much shorter than `head_dim`.

    Source: DeepSeek-AI 2024, section 2.1.2, arXiv 2405.04434, absorbs projections in the same way.
    """

    def __init__(
        self, attention: MetaphraseAttention, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ):
        """Multiply plain projections in float32 on a CPU.

        Shapes are (key_value_heads, head_dim, S) for keys, (key_value_heads, S, head_dim) for values, and (S,) for a bias that is
        added to the scores.
        """
        query, output, groups = attention.q_proj, attention.o_proj, attention.num_key_value_groups
        # (H, S, head_dim)
        keys, values = (states.repeat_interleave(groups, dim=0) for states in (keys.mT, values))
        heads, self._length, head_dim = keys.shape
        keys = keys * attention.scaling
        # (H, head_dim, D)
        weight = query.weight.detach().view(heads, head_dim, -1)
        # (D, H * S)
        self._keys = torch.bmm(keys, weight).flatten(0, 1).t()
        # (H, S)
        bias = None if bias is None else bias.expand(heads, -1)
        if query.bias is not None:
            query_bias = torch.bmm(keys, query.bias.detach().view(heads, head_dim, 1))[..., 0]
            bias = query_bias if bias is None else query_bias + bias
        self._bias = None if bias is None else bias.flatten()
        # (D, H * head_dim) -> (H, head_dim, D)
        weight = output.weight.detach().view(-1, heads, head_dim).permute(1, 2, 0)
        values = torch.bmm(values, weight)
        if output.bias is not None:
            # The attention weights of the first head sum up to 1.
            values[0] += output.bias.detach()
        # (H * S, D)
        self._values = values.flatten(0, 1)

    def add_to(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the residual plus the attention of the states, both (rows, D)."""
        bias, keys = self._bias, self._keys
        scores = torch.mm(states, keys) if bias is None else torch.addmm(bias, states, keys)
        weights = scores.view(-1, self._length).softmax(dim=-1).view(scores.shape)
        return torch.addmm(residual, weights, self._values)


class DecoderState:
    """The kv cache of all layers, for sources and for targets that do not depend on each other.

    A source has one target at first; `spread` makes several, which stay side by side. A row is a target. `BeamState` holds
    targets that continue one another.

    Attributes:
        length: Tokens of each target so far.
        copies: Targets of each source.
        rows_per_cache_row: Rows that share one row of the target cache.
    """

    rows_per_cache_row = 1

    def __init__(self, decoder: MetaphraseDecoder, encoder_output: torch.Tensor, attention_mask: torch.Tensor | None):
        """Project the encoder output to keys and values.

        Args:
            decoder: The decoder in evaluation mode, in float32 or bfloat16.
            encoder_output: Encoder output (sources, S, D).
            attention_mask: 1 for a token, 0 for padding, (sources, S).
        """
        self.decoder, self.layers = decoder, prepared_layers(decoder)
        self._embedding_norm, self._norm = prepared_norm(decoder.embedding_norm), prepared_norm(decoder.norm)
        self.length, self.copies = 0, 1
        attention = decoder.layers[0].self_attn
        self.head_dim, self.groups = attention.head_dim, attention.num_key_value_groups
        self._source_cache = KeyValueCache.from_layers(
            self._project_source(layer, encoder_output) for layer in self.layers
        )
        # Under autocast, projections have another dtype than the encoder output.
        self.device, self.dtype = encoder_output.device, self._source_cache.values.dtype
        self._source_bias = None
        if attention_mask is not None and not bool(attention_mask.all()):
            bias = torch.zeros_like(attention_mask, dtype=self.dtype)
            bias.masked_fill_(attention_mask == 0, torch.finfo(self.dtype).min)
            # (sources, 1, 1, S)
            self._source_bias = bias[:, None, None]
        self.key_value_heads = self._source_cache.keys.shape[2]
        self._source_views = self._source_cache.views(encoder_output.shape[1])
        self._absorbed = self._absorb()
        self._target_cache = KeyValueCache(self._source_cache.keys[..., :0], self._source_cache.values[..., :0, :])
        # Tables over positions: the position bias of each layer (H, positions), embeddings (positions, D), and cosine and sine
        # (positions, rotated).
        self.num_positions = 0
        self._biases: list[torch.Tensor | None] = []
        self._positions: torch.Tensor | None = None
        self._rotations: Rotation = None
        # For the current step, by layer: where new keys and values are written, the cache to attend to, the bias of the scores.
        self._new_entries: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._target_views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._target_biases: list[torch.Tensor | None] = [None] * len(self.layers)

    @property
    def rows(self) -> int:
        return self._target_cache.rows

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read one token of each row, (rows,), and return the decoder's output (rows, D)."""
        self._make_room(self.length + 1)
        self._prepare_step()
        hidden_states, rotation = self._add_position(self.decoder.embed_tokens(input_ids))
        for index, layer in enumerate(self.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.length += 1
        return self._norm(hidden_states)

    def spread(self, copies: int) -> None:
        """Repeat the target of each source `copies` times."""
        if copies > 1:
            rows = torch.arange(self.rows, device=self.device)
            self._target_cache.select_rows(rows.repeat_interleave(copies))
            self._spread_sources(copies)

    def select_sources(self, sources: torch.Tensor) -> None:
        """Select the sources with these indices, (sources,), and their targets."""
        self._select_source_cache(sources)
        targets = torch.arange(self.copies, device=sources.device)
        self._target_cache.select_rows((sources[:, None] * self.copies + targets).flatten())

    def _absorb(self) -> list[_AbsorbedAttention] | None:
        """Return the absorbed cross-attention of each layer, if there is one source and it gains by it."""
        attentions = [layer.cross_attn for layer in self.decoder.layers]
        are_plain = self.dtype == torch.float32 and all(
            not attention.config.qk_norm and is_plain(attention.q_proj) and is_plain(attention.o_proj)
            for attention in attentions
        )
        if self._source_cache.rows != 1 or not are_plain or not self._gains_by_absorbing():
            return None
        bias = None if self._source_bias is None else self._source_bias.flatten()
        views = zip(attentions, self._source_views, strict=True)
        return [_AbsorbedAttention(attention, keys, values, bias) for attention, (keys, values) in views]

    def _gains_by_absorbing(self) -> bool:
        size = self.decoder.layers[0].cross_attn.q_proj.weight.numel()
        entries = self._source_cache.capacity * size // self.head_dim
        return entries <= size // 2 or (entries <= _FEW_ENTRIES and self.copies <= _FEW_ROWS)

    def _spread_sources(self, copies: int) -> None:
        self.copies *= copies
        if self._absorbed is not None and not self._gains_by_absorbing():
            self._absorbed = None

    def _select_source_cache(self, sources: torch.Tensor) -> None:
        self._source_cache.select_rows(sources)
        self._source_views = self._source_cache.views(self._source_cache.capacity)
        if self._source_bias is not None:
            self._source_bias = self._source_bias.index_select(0, sources)

    def _make_room(self, length: int) -> None:
        """Grow the target cache to at least `length` tokens in each row."""
        if length > self._target_cache.capacity:
            self._target_cache.grow(self.length, length)
            self._make_tables(self._target_cache.capacity)

    def _make_tables(self, num_positions: int) -> None:
        """Compute the position biases, position embeddings and rotations of so many positions."""
        self.num_positions = num_positions
        positions = torch.arange(num_positions, device=self.device)[None]
        # Only the distance counts: the bias of an earlier query is the end of the bias of the last query. (H, positions)
        biases = {
            module: None if module is None else module(positions[:, -1:], positions)[0, :, 0].to(self.dtype)
            for module in dict.fromkeys(self.decoder.position_biases())
        }
        per_layer = [biases[module] for module in self.decoder.position_biases()]
        self._biases = per_layer * (len(self.layers) // len(per_layer))
        table, rotary = self.decoder.embed_positions, self.decoder.rotary_emb
        if table is not None:
            if isinstance(table, LearnedPositionEmbedding):
                positions = positions[:, : table.num_embeddings - table.offset]
            self._positions = table(positions, positions.shape[1])[0]
        if rotary is not None and rotary.rope_type not in _CHANGING_ROTATIONS:
            # (1, positions, rotated) -> (positions, rotated)
            self._rotations = tuple(angles[0] for angles in rotary(self._source_cache.values, positions))

    def _prepare_step(self) -> None:
        """Find where each layer writes the new keys and values, its views of the cache, and the bias of its scores."""
        past, keys, values = self.length + 1, self._target_cache.keys, self._target_cache.values
        self._new_entries = list(
            zip(keys[..., self.length].unbind(0), values[..., self.length, :].unbind(0), strict=True)
        )
        self._target_views = self._target_cache.views(past)
        if any(bias is not None for bias in self._biases):
            self._target_biases = self._map_biases(
                lambda bias: None if bias is None else bias[None, :, -past:].unflatten(1, (-1, self.groups))
            )

    def _map_biases(self, make: Callable[[torch.Tensor | None], torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Apply a function to the bias (H, positions) of each layer, once where layers share a bias."""
        biases = {id(bias): bias for bias in self._biases}
        results = {key: make(bias) for key, bias in biases.items()}
        return [results[id(bias)] for bias in self._biases]

    def _add_position(self, embeddings: torch.Tensor) -> tuple[torch.Tensor, Rotation]:
        """Return the input of the first layer, (rows, D), and the rotation of all layers, (1, rotated)."""
        decoder, position = self.decoder, self.length
        has_position = self._positions is None or position < len(self._positions)
        if has_position and (decoder.rotary_emb is None or self._rotations is not None):
            if self._positions is not None:
                embeddings = embeddings + self._positions[position].to(embeddings.dtype)
            rotation = None
            if self._rotations is not None:
                rotation = tuple(angles[position, None].to(embeddings.dtype) for angles in self._rotations)
            return self._embedding_norm(embeddings), rotation
        positions = torch.tensor([[position]], device=embeddings.device)
        hidden_states, rotation = decoder.enter(embeddings[:, None], positions, position + 1)
        return hidden_states[:, 0], None if rotation is None else tuple(angles[0, 0] for angles in rotation)

    def _pass_layer(
        self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """(rows, D) -> (rows, D)"""
        self_norm, cross_norm, mlp_norm = layer.norms
        if layer.is_pre_norm:
            hidden_states = hidden_states + self._attend_to_target(index, layer, self_norm(hidden_states), rotation)
            hidden_states = self._add_cross_attention(index, layer, hidden_states, cross_norm(hidden_states))
            return hidden_states + layer.feed_forward(mlp_norm(hidden_states))
        hidden_states = self_norm(hidden_states + self._attend_to_target(index, layer, hidden_states, rotation))
        hidden_states = cross_norm(self._add_cross_attention(index, layer, hidden_states, hidden_states))
        return mlp_norm(hidden_states + layer.feed_forward(hidden_states))

    def _project_target(
        self, layer: PreparedLayer, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(..., D) -> queries (..., H, head_dim), keys and values (..., key_value_heads, head_dim)"""
        states = layer.self_qkv(hidden_states)
        states = states.view(*states.shape[:-1], -1, self.head_dim)
        sizes = (self.key_value_heads * self.groups, self.key_value_heads, self.key_value_heads)
        query, key, value = states.split_with_sizes(sizes, dim=-2)
        if layer.self_head_norms is not None:
            query_norm, key_norm = layer.self_head_norms
            query, key = query_norm(query), key_norm(key)
        return query, key, value

    def _project_source(self, layer: PreparedLayer, encoder_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sources, S, D) -> keys and values (sources, key_value_heads, S, head_dim)"""
        states = layer.cross_key_value(encoder_output).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        keys, values = states.chunk(2, dim=1)
        return keys if layer.cross_head_norms is None else layer.cross_head_norms[1](keys), values

    def _attend_to_target(
        self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        query, key, value = self._project_target(layer, hidden_states)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        keys, values = self._new_entries[index]
        if self.rows_per_cache_row > 1:
            key, value = key.view(keys.shape), value.view(values.shape)
        keys.copy_(key)
        values.copy_(value)
        views, bias = self._target_views[index], self._target_biases[index]
        return layer.self_output(self._attend(query, views, bias, layer.self_scaling, self.rows_per_cache_row))

    def _add_cross_attention(
        self, index: int, layer: PreparedLayer, residual: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual plus the cross-attention of the states, both (rows, ..., D)."""
        if self._absorbed is None:
            return residual + self._attend_to_source(index, layer, hidden_states)
        if residual.ndim == 2:
            return self._absorbed[index].add_to(residual, hidden_states)
        flat = residual.flatten(0, -2), hidden_states.flatten(0, -2)
        return self._absorbed[index].add_to(*flat).view(residual.shape)

    def _attend_to_source(self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        query, views = layer.cross_query(hidden_states), self._source_views[index]
        query = query.view(*query.shape[:-1], -1, self.head_dim)
        if layer.cross_head_norms is not None:
            query = layer.cross_head_norms[0](query)
        return layer.cross_output(self._attend(query, views, self._source_bias, layer.cross_scaling, self.copies))

    def _attend(
        self,
        query: torch.Tensor,
        views: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        scaling: float,
        copies: int,
    ) -> torch.Tensor:
        """Attend with one query of each row.

        Args:
            query: Queries (rows, H, head_dim).
            views: Keys (rows / copies * key_value_heads, head_dim, keys) and values (..., keys, head_dim).
            bias: Added to the scores, (1 or rows / copies, 1 or key_value_heads, 1 or copies * groups, keys).
            scaling: Factor of the scores.
            copies: Rows that share keys and values.

        Returns:
            Output (rows, H * head_dim).
        """
        rows = query.shape[0]
        if copies > 1:
            # (rows, H, head_dim) -> (rows / copies, key_value_heads, copies * groups, head_dim)
            query = fold_copies(query.view(rows, self.key_value_heads, self.groups, self.head_dim), copies)
        # (rows / copies * key_value_heads, copies * groups, head_dim)
        query = query.reshape(rows // copies * self.key_value_heads, -1, self.head_dim)
        output = attend(query, *views, bias, scaling, rows // copies)
        if copies > 1:
            output = unfold_copies(output.unflatten(0, (rows // copies, -1)), copies)
        return output.reshape(rows, -1)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float, batch: int
) -> torch.Tensor:
    """Attend with few queries.

    Args:
        query: Queries (batch * H, queries, head_dim).
        keys: Keys in columns, (batch * H, head_dim, keys).
        values: Values (batch * H, keys, head_dim).
        bias: Added to the scores, (1 or batch, 1 or H, 1 or queries, keys).
        scaling: Factor of the scores.
        batch: Rows of the cache.

    Returns:
        Output (batch * H, queries, head_dim).
    """
    if query.dtype != torch.float32:
        # The kernel computes scores in float32.
        states = (flat.unflatten(0, (batch, -1)) for flat in (query, keys.mT, values))
        return nn.functional.scaled_dot_product_attention(*states, attn_mask=bias, scale=scaling).flatten(0, 1)
    # For one query, this is several times as fast on a CPU. With beta 0 the first operand is not read.
    scores = torch.baddbmm(_unread_operand(query.device), query, keys, beta=0, alpha=scaling)
    if bias is not None:
        scores = scores.unflatten(0, (batch, -1)).add_(bias).flatten(0, 1)
    return torch.bmm(scores.softmax(dim=-1), values)


@functools.cache
def _unread_operand(device: torch.device) -> torch.Tensor:
    """Return a tensor to pass where a kernel reads nothing. Making one takes as long as a small product."""
    with torch.inference_mode(False):
        return torch.empty(1, dtype=torch.float32, device=device)
