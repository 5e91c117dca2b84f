"""The decoding step: a decoder with prepared weights, the kv cache of sources and targets, and one token more of each target.

`MetaphraseDecoder.forward` with a cache computes the same. Here projections are joined and copied, and modules are not called.
Values that are the same in all steps are computed once, new keys and values are written in place, and attention of the one new
token is two matrix products.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from metaphrase.decoding import prepacked_weights, quantization
from metaphrase.decoding.prepacked_weights import LARGEST_SIZE, PrepackedWeight, is_plain
from metaphrase.decoding.quantization import PackedLinear, ShortlistProjection
from metaphrase.modeling import layers as network
from metaphrase.modeling.operators import MetaphraseRMSNorm, soft_cap
from metaphrase.modeling.positions import LearnedPositionEmbedding, rotate
from metaphrase.modeling.stacks import MetaphraseDecoder
from metaphrase.ops.linear_and_dropout import is_hooked

# A model has one head, which takes a large part of a step: a copy pays up to a larger size than in a layer.
_LARGEST_COPY = 2**26
# A CPU multiplies up to so many rows by a transposed weight, which it reads in order of memory, up to twice as fast.
_FEW_TRANSPOSED_ROWS = 64
# A cache grows by so many tokens, or by one for so many tokens in it. Smaller steps would copy it more often.
_ADDED_TOKENS, _TOKENS_PER_ADDED_TOKEN = 16, 4
# With so few entries of a product, and so few rows, the number of calls decides the time, not their size.
_FEW_ENTRIES, _FEW_ROWS = 2**17, 8

Rotation = tuple[torch.Tensor, torch.Tensor] | None


class PreparedLinear:
    """Linear layers that read the same input, as one product.

    Small layers of torch are copied: side by side, and on a CPU in float32 also transposed and prepacked. Quantized layers are
    joined. Other layers are called one by one. `copied` are the weights and biases on which the copies depend.
    """

    def __init__(self, layers: Sequence[nn.Module], largest: int = LARGEST_SIZE, largest_transposed: int = 2**20):
        """Choose which copies to make of layers, all with a bias or none. A copy is made when it is first needed.

        Weights of more entries than `largest` are not copied. A single one of more than `largest_transposed` is not transposed,
        which gains too little for the memory.
        """
        self.copied: list[torch.Tensor] = []
        self._calls, self._max_transposed_rows, kind = list(layers), 0, type(layers[0])
        if issubclass(kind, PackedLinear) and all(type(layer) is kind for layer in layers):
            # The call of a module takes a tenth of the time of its product.
            self._calls = [(layers[0] if len(layers) == 1 else kind(*layers)).forward]
        self._reads_weights = all(
            prepacked_weights.can_record(layer) and layer.weight.numel() <= largest for layer in layers
        )
        if not self._reads_weights:
            return
        self.copied = [parameter for layer in layers for parameter in layer.parameters()]
        self._weights = [layer.weight for layer in layers]
        are_plain = all(map(is_plain, layers))
        self._is_packed = are_plain and prepacked_weights.can_prepack(
            sum(map(len, self._weights)), self._weights[0].shape[1]
        )
        self._is_transposed = are_plain and (len(layers) > 1 or layers[0].weight.numel() <= largest_transposed)
        self._bias = None if layers[0].bias is None else _join([layer.bias for layer in layers])
        if self._is_transposed:
            self._max_transposed_rows = 1 if self._is_packed else _FEW_TRANSPOSED_ROWS
        else:
            self._weight = _join(self._weights)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features of all layers)"""
        if states.dim() == 2 and len(states) <= self._max_transposed_rows:
            weight, bias = self._transposed, self._bias
            return torch.mm(states, weight) if bias is None else torch.addmm(bias, states, weight)
        if not self._reads_weights:
            outputs = [call(states) for call in self._calls]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if self._is_packed and states.numel() > states.shape[-1]:
            return self._packed(states)
        weight = self._transposed.t() if self._is_transposed else self._weight
        return nn.functional.linear(states, weight, self._bias)

    @functools.cached_property
    def _transposed(self) -> torch.Tensor:
        return _join(self._weights).t().contiguous()

    @functools.cached_property
    def _packed(self) -> PrepackedWeight:
        return PrepackedWeight(_join(self._weights), self._bias)


def _join(parameters: list[torch.Tensor]) -> torch.Tensor:
    return parameters[0].detach() if len(parameters) == 1 else torch.cat([weight.detach() for weight in parameters])


class PreparedLayer:
    """The projections, norms and activation of one decoder layer. Projections with the same input stand side by side."""

    def __init__(self, layer: network.MetaphraseDecoderLayer):
        attention, cross, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        self.is_recurrent = isinstance(attention, network.MetaphraseSSRU)
        if self.is_recurrent:
            self.ssru_input = PreparedLinear([attention.input_proj])
            self.ssru_forget = PreparedLinear([attention.forget_proj])
        else:
            self.self_qkv = PreparedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
            self.self_output = PreparedLinear([attention.o_proj])
        self.cross_query = PreparedLinear([cross.q_proj])
        self.cross_key_value = PreparedLinear([cross.k_proj, cross.v_proj])
        self.cross_output = PreparedLinear([cross.o_proj])
        self.mlp_input = PreparedLinear([mlp.gate_proj, mlp.up_proj] if mlp.is_gated else [mlp.up_proj])
        self.mlp_output = PreparedLinear([mlp.down_proj])
        self.activation, self.is_gated = mlp.activation, mlp.is_gated
        # Both attentions have the same heads.
        self.scaling = cross.scaling
        # Norms of queries and keys, which most models have not.
        names, no_norm = ("self_attn", "cross_attn", "mlp"), nn.Identity()
        self.self_head_norms, self.cross_head_norms = (
            [prepared_norm(getattr(module, name, no_norm)) for name in ("q_norm", "k_norm")]
            for module in (attention, cross)
        )
        # Norms of the input of each sublayer, of its output, and of the sum of output and residual.
        norms, self.output_norms = (
            [prepared_norm(getattr(layer, name + kind, no_norm)) for name in names]
            for kind in ("_norm", "_output_norm")
        )
        no_norms = [prepared_norm(no_norm)] * 3
        self.input_norms, self.sum_norms = (norms, no_norms) if layer.is_pre_norm else (no_norms, norms)


def prepared_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of a norm, without the call of a module where the class is known."""
    if type(norm) is nn.LayerNorm:
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda states: torch.layer_norm(states, shape, weight, bias, eps)
    return norm.forward if type(norm) in (MetaphraseRMSNorm, nn.Identity) else norm


def _prepare_layers(layers: nn.ModuleList) -> tuple[list[PreparedLayer], list[torch.Tensor]]:
    prepared = [PreparedLayer(layer) for layer in layers]
    linears = [value for layer in prepared for value in vars(layer).values() if isinstance(value, PreparedLinear)]
    return prepared, [weight for linear in linears for weight in linear.copied]


def prepare_head(head: nn.Linear) -> tuple[tuple[PreparedLinear, ShortlistProjection | None], list[torch.Tensor]]:
    linear = PreparedLinear([head], largest=_LARGEST_COPY, largest_transposed=LARGEST_SIZE)
    # Elsewhere all logits are computed as fast.
    gains = is_plain(head) and head.weight.numel() > quantization.LEAST_SHORTLIST_SIZE and quantization.has_kernels()
    return (linear, ShortlistProjection(head) if gains else None), list(head.parameters())


def prepared_rows(head: nn.Module, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a head's projection to the logits of some tokens, (count,), or None if its rows cannot be selected."""
    if isinstance(head, PackedLinear) and not is_hooked(head):
        return head.select_outputs(tokens).forward
    if type(head) is not nn.Linear or is_hooked(head):
        return None
    # Indexing takes several times as long. A transposed or prepacked copy would not pay for one batch.
    parts = {"weight": head.weight, "bias": head.bias}
    parts = {name: None if part is None else part.detach().index_select(0, tokens) for name, part in parts.items()}
    return functools.partial(nn.functional.linear, **parts)


class KeyValueCache:
    """Keys (layers, rows, heads, head_dim, capacity) and values (layers, rows, heads, capacity, head_dim) of each row.

    Keys stand in columns. On a CPU, the kernels for many small matrices read the second one by rows: a product with several
    queries takes a fraction of the time.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    def extend(self, length: int, count: int = 1, least: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, by layer, where to write `count` keys and values (rows, count, heads, head_dim) behind the first `length`.

        One token has no axis. A cache without room grows, to a capacity of at least `least`.
        """
        *heads, head_dim, capacity = self.keys.shape
        stop = length + count
        if stop > capacity:
            capacity = max(least, stop + max(_ADDED_TOKENS, length // _TOKENS_PER_ADDED_TOKEN))
            keys = self.keys.new_empty(*heads, head_dim, capacity)
            values = self.values.new_empty(*heads, capacity, head_dim)
            keys[..., :length], values[..., :length, :] = self.keys[..., :length], self.values[..., :length, :]
            self.keys, self.values = keys, values
        keys, values = self.keys[..., length:stop].movedim(4, 2), self.values[..., length:stop, :].movedim(3, 2)
        return list(zip(keys.squeeze(2).unbind(0), values.squeeze(2).unbind(0), strict=True))

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace the rows by the rows with these indices, in this order. An index may repeat."""
        self.keys, self.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)

    def select_tokens(self, indices: torch.Tensor) -> None:
        """Move the tokens with these indices, (rows, count), to the front of each row."""
        count, device = indices.shape[1], indices.device
        is_in_place = (indices == torch.arange(count, device=device)).all(dim=0)
        # The first tokens that stay in place in all rows are not moved.
        start = int(is_in_place.long().cumprod(dim=0).sum())
        if start == count:
            return
        indices = indices[:, start:]
        *heads, head_dim, capacity = self.keys.shape
        columns = indices[:, None, None].expand(*heads, head_dim, -1)
        self.keys[..., start:count] = self.keys.gather(4, columns)
        # (layers, rows, heads, 1) + (rows, 1, count - start)
        flat = torch.arange(heads[0] * heads[1] * heads[2], device=device).view(*heads, 1) * capacity + indices[:, None]
        values = self.values.view(-1, head_dim).index_select(0, flat.flatten())
        self.values[..., start:count, :] = values.view(*flat.shape, head_dim)

    def views(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys (rows * heads, head_dim, length) and values (rows * heads, length, head_dim) of each layer."""
        # A view costs as much as a small product. One call makes the views of all layers.
        keys, values = self.keys[..., :length], self.values[..., :length, :]
        return list(zip(keys.flatten(1, 2).unbind(0), values.flatten(1, 2).unbind(0), strict=True))


class _AbsorbedAttention:
    """The cross-attention of a layer to one source: the keys absorb the query projection, the values the output projection.

    For queries x W, keys K, values V and a slice U of the output projection, scores x W K' are x (W K'), and outputs p V U are
    p (V U). A step makes two products instead of four, and reads less if the source is much shorter than `head_dim`.

    Source: DeepSeek-AI 2024, section 2.1.2, arXiv 2405.04434, absorbs projections in the same way.
    """

    def __init__(
        self,
        attention: network.MetaphraseAttention,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
    ):
        """Read keys (key_value_heads, head_dim, S), values (key_value_heads, S, head_dim) and a bias of the scores, (S,)."""
        query, output, groups = attention.q_proj, attention.o_proj, attention.num_key_value_groups
        # (H, S, head_dim)
        keys, values = (states.repeat_interleave(groups, dim=0) for states in (keys.mT * attention.scaling, values))
        heads, self._length, head_dim = keys.shape
        # (H, S, head_dim) x (H, head_dim, D) -> (D, H * S)
        self._keys = torch.bmm(keys, query.weight.detach().view(heads, head_dim, -1)).flatten(0, 1).t()
        self._bias = keys.new_zeros(heads, self._length) if bias is None else bias.expand(heads, -1)
        if query.bias is not None:
            self._bias = self._bias + torch.bmm(keys, query.bias.detach().view(heads, head_dim, 1))[..., 0]
        self._bias = self._bias.flatten()
        # (H, S, head_dim) x (H, head_dim, D)
        values = torch.bmm(values, output.weight.detach().view(-1, heads, head_dim).permute(1, 2, 0))
        if output.bias is not None:
            # The attention weights of the first head sum up to 1.
            values[0] += output.bias.detach()
        # (H * S, D)
        self._values = values.flatten(0, 1)

    def add_to(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the residual plus the attention of the states, both (rows, D)."""
        scores = torch.addmm(self._bias, states, self._keys)
        weights = scores.view(-1, self._length).softmax(dim=-1).view(scores.shape)
        return torch.addmm(residual, weights, self._values)


class DecoderState:
    """The kv cache of all layers, for sources and for targets that do not depend on each other.

    A source has one target at first, and later `copies` of them, which stay side by side. A row is a target, of `length` tokens
    so far. A step reads `width` tokens of it. `BeamState` holds targets that continue one another.
    """

    width = 1

    def __init__(self, decoder: MetaphraseDecoder, encoder_output: torch.Tensor, attention_mask: torch.Tensor | None):
        """Project the encoder output (sources, S, D) to keys and values. The mask (sources, S) is 0 for padding."""
        self.decoder, self.layers = decoder, prepacked_weights.prepared_copies(decoder, decoder.layers, _prepare_layers)
        self._embedding_norm, self._norm = prepared_norm(decoder.embedding_norm), prepared_norm(decoder.norm)
        self.length, self.copies = 0, 1
        # Rows that share one row of the target cache.
        self._rows_per_cache_row = 1
        attention = decoder.layers[0].cross_attn
        self.head_dim, self.groups = attention.head_dim, attention.num_key_value_groups
        self.soft_cap = decoder.config.attn_logit_softcapping
        keys, values = [], []
        for layer in self.layers:
            # (sources, S, D) -> (sources, key_value_heads, S, head_dim) for both
            states = layer.cross_key_value(encoder_output).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            key, value = states.chunk(2, dim=1)
            keys.append(layer.cross_head_norms[1](key).transpose(2, 3))
            values.append(value)
        self._source_cache = KeyValueCache(torch.stack(keys), torch.stack(values))
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
        # The states of a recurrence in place of the target cache, (rows, D) for each layer.
        size = len(encoder_output), decoder.sizes.hidden_size
        self._states = [encoder_output.new_zeros(size, dtype=torch.float32) for one in self.layers if one.is_recurrent]
        # Tables over positions: each position bias (H, positions), embeddings (positions, D), and cosine and sine
        # (positions, rotated).
        self.num_positions = 0
        self._bias_of_layer = decoder.position_biases()
        self._biases: dict[nn.Module | None, torch.Tensor | None] = {}
        self._positions = self._rotations = None
        # For the current step: by layer, where new keys and values are written and the cache to attend to; by position bias, the
        # bias of the scores.
        self._new_entries, self._target_views, self._target_biases = [], [], {}
        # A first operand that `baddbmm` does not read. Making one takes as long as a small product.
        self._unread = torch.empty(1, dtype=torch.float32, device=self.device)

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read one token of each row, (rows,), and return the decoder's output (rows, D)."""
        start, stop = self.length, self.length + self.width
        if stop > self.num_positions:
            self._grow_tables(stop)
        if not self._states:
            self._prepare_step()
        embeddings, rotation = self.decoder.embed_tokens(input_ids), None
        if self.decoder.norms_first:
            embeddings = self._embedding_norm(embeddings)
        if self._positions is not None:
            embeddings = embeddings + self._positions[start:stop].to(embeddings.dtype)
        if self._rotations is not None:
            # (width, 1, rotated)
            rotation = tuple(angles[start:stop, None].to(embeddings.dtype) for angles in self._rotations)
        hidden_states = embeddings if self.decoder.norms_first else self._embedding_norm(embeddings)
        for index, layer in enumerate(self.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.length = stop
        return self._norm(hidden_states)

    def expand_beams(self, copies: int) -> None:
        """Make `copies` targets of the one target of each source."""
        if copies == 1:
            return
        sources = self._source_cache.keys.shape[1]
        self.reorder(torch.arange(sources, device=self.device).repeat_interleave(copies))
        self.copies = copies
        self._rows_per_cache_row = sources * copies // self._target_cache.keys.shape[1]
        if self._absorbed is not None and not self._gains_by_absorbing():
            self._absorbed = None

    def reorder(self, rows: torch.Tensor) -> None:
        """Let each row continue the row of the same source with this index, (rows,)."""
        self._target_cache.select_rows(rows)
        self._states = [states.index_select(0, rows) for states in self._states]

    def select_sources(self, sources: torch.Tensor) -> None:
        """Select the sources with these indices, (sources,), and their targets."""
        rows = (sources[:, None] * self.copies + torch.arange(self.copies, device=self.device)).flatten()
        self._target_cache.select_rows(rows if self._rows_per_cache_row == 1 else sources)
        self._states = [states.index_select(0, rows) for states in self._states]
        self._source_cache.select_rows(sources)
        self._source_views = self._source_cache.views(self._source_cache.keys.shape[4])
        if self._source_bias is not None:
            self._source_bias = self._source_bias.index_select(0, sources)

    def _absorb(self) -> list[_AbsorbedAttention] | None:
        """Return the absorbed cross-attention of each layer, if there is one source and it gains by it."""
        config, attentions = self.decoder.config, [layer.cross_attn for layer in self.decoder.layers]
        # Norms and soft caps would come between the products.
        has_operations_between = config.qk_norm or config.norm_position == "both" or self.soft_cap is not None
        are_plain = self.dtype == torch.float32 and all(
            is_plain(attention.q_proj) and is_plain(attention.o_proj) for attention in attentions
        )
        is_single = self._source_cache.keys.shape[1] == 1
        if has_operations_between or not are_plain or not is_single or not self._gains_by_absorbing():
            return None
        bias = None if self._source_bias is None else self._source_bias.flatten()
        views = zip(attentions, self._source_views, strict=True)
        return [_AbsorbedAttention(attention, keys, values, bias) for attention, (keys, values) in views]

    def _gains_by_absorbing(self) -> bool:
        size = self.decoder.layers[0].cross_attn.q_proj.weight.numel()
        entries = self._source_cache.keys.shape[4] * size // self.head_dim
        return entries <= size // 2 or (entries <= _FEW_ENTRIES and self.copies <= _FEW_ROWS)

    def _grow_tables(self, length: int) -> None:
        """Compute the position biases, position embeddings and rotations of at least `length` positions."""
        num_positions = length + max(_ADDED_TOKENS, length // _TOKENS_PER_ADDED_TOKEN)
        table, rotary = self.decoder.embed_positions, self.decoder.rotary_emb
        if isinstance(table, LearnedPositionEmbedding):
            # The table raises an error if `length` is more than it has.
            num_positions = max(length, min(num_positions, table.num_embeddings - table.offset))
        positions = torch.arange(num_positions, device=self.device)[None]
        # Only the distance counts: the bias of an earlier query is the end of the bias of the last query. (H, positions)
        self._biases = {
            module: None if module is None else module(positions[:, -1:], positions)[0, :, 0].to(self.dtype)
            for module in dict.fromkeys(self._bias_of_layer)
        }
        if table is not None:
            self._positions = table(positions, num_positions)[0]
        if rotary is not None:
            # (1, positions, rotated) -> (positions, rotated)
            self._rotations = tuple(angles[0] for angles in rotary(self._source_cache.values, positions))
        self.num_positions = num_positions

    def _prepare_step(self) -> None:
        """Find where each layer writes the new keys and values, its views of the cache, and the bias of its scores."""
        past = self.length + 1
        self._new_entries = self._target_cache.extend(self.length)
        self._target_views = self._target_cache.views(past)
        self._target_biases = {
            module: None if bias is None else bias[None, :, -past:].unflatten(1, (-1, self.groups))
            for module, bias in self._biases.items()
        }

    def _masked_biases(self, mask: torch.Tensor, distances: torch.Tensor) -> dict[nn.Module | None, torch.Tensor]:
        """Add a mask (sources, copies, tokens) to biases: (sources, 1 or key_value_heads, copies * groups, tokens)."""
        # The distances lead from the last token of a target back to each token, (sources, 1 or copies, tokens).
        biases = {}
        for module, bias in self._biases.items():
            # (sources, 1, copies, 1, tokens)
            total = mask[:, None, :, None]
            if bias is not None:
                # (H, sources, 1 or copies, tokens) -> (sources, key_value_heads, 1 or copies, groups, tokens)
                token_bias = bias[:, bias.shape[1] - 1 - distances].unflatten(0, (-1, self.groups))
                total = total + token_bias.permute(2, 0, 3, 1, 4)
            biases[module] = total.expand(-1, -1, -1, self.groups, -1).flatten(2, 3)
        return biases

    def _pass_layer(
        self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """(rows, D) -> (rows, D)"""
        output = self._attend_to_target(index, layer, layer.input_norms[0](hidden_states), rotation)
        hidden_states = layer.sum_norms[0](hidden_states + layer.output_norms[0](output))
        states = layer.input_norms[1](hidden_states)
        if self._absorbed is not None:
            hidden_states = self._absorbed[index].add_to(hidden_states, states)
        else:
            query = layer.cross_head_norms[0](layer.cross_query(states).view(len(states), -1, self.head_dim))
            output = self._attend_to_source(index, query, layer.scaling)
            hidden_states = hidden_states + layer.output_norms[1](layer.cross_output(output))
        hidden_states = layer.sum_norms[1](hidden_states)
        inner = layer.mlp_input(layer.input_norms[2](hidden_states))
        if layer.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = layer.activation(gate) * inner
        else:
            inner = layer.activation(inner)
        return layer.sum_norms[2](hidden_states + layer.output_norms[2](layer.mlp_output(inner)))

    def _attend_to_source(self, index: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """(rows, H, head_dim) -> (rows, H * head_dim)"""
        return self._attend(query, self._source_views[index], self._source_bias, scaling, self.copies)

    def _attend_to_target(
        self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        if layer.is_recurrent:
            # The same as in `MetaphraseSSRU`.
            forget = torch.sigmoid(layer.ssru_forget(hidden_states).float())
            self._states[index] = torch.lerp(layer.ssru_input(hidden_states).float(), self._states[index], forget)
            return torch.relu(self._states[index]).to(hidden_states.dtype)
        # (rows, D) -> queries (rows, H, head_dim), keys and values (rows, key_value_heads, head_dim)
        states = layer.self_qkv(hidden_states).view(len(hidden_states), -1, self.head_dim)
        sizes = (self.key_value_heads * self.groups, self.key_value_heads, self.key_value_heads)
        query, key, value = states.split_with_sizes(sizes, dim=1)
        query, key = layer.self_head_norms[0](query), layer.self_head_norms[1](key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        keys, values = self._new_entries[index]
        if self._rows_per_cache_row > 1:
            key, value = key.view(keys.shape), value.view(values.shape)
        keys.copy_(key)
        values.copy_(value)
        views, bias = self._target_views[index], self._target_biases[self._bias_of_layer[index]]
        return layer.self_output(self._attend(query, views, bias, layer.scaling, self._rows_per_cache_row))

    def _attend(
        self,
        query: torch.Tensor,
        views: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        scaling: float,
        copies: int,
    ) -> torch.Tensor:
        """Attend with one query of each row, (rows, H, head_dim) -> (rows, H * head_dim).

        `copies` rows share their keys (rows / copies * key_value_heads, head_dim, keys), their values (..., keys, head_dim)
        and the bias of their scores, (1 or rows / copies, 1 or key_value_heads, 1 or copies * groups, keys).
        """
        rows, (keys, values) = len(query), views
        batch = rows // copies
        if copies > 1:
            # (rows, H, head_dim) -> (batch, key_value_heads, copies, groups, head_dim)
            query = query.view(batch, copies, self.key_value_heads, self.groups, self.head_dim).transpose(1, 2)
        # (batch * key_value_heads, copies * groups, head_dim)
        query = query.reshape(batch * self.key_value_heads, -1, self.head_dim)
        if query.dtype != torch.float32 and self.soft_cap is None:
            # The kernel computes scores in float32.
            states = (flat.unflatten(0, (batch, -1)) for flat in (query, keys.mT, values))
            output = nn.functional.scaled_dot_product_attention(*states, attn_mask=bias, scale=scaling).flatten(0, 1)
        else:
            if self.soft_cap is None:
                # For one query, this is several times as fast on a CPU.
                scores = torch.baddbmm(self._unread, query, keys, beta=0, alpha=scaling)
            else:
                scores = soft_cap(torch.bmm(query, keys) * scaling, self.soft_cap)
            if bias is not None:
                scores = scores.unflatten(0, (batch, -1)).add_(bias).flatten(0, 1)
            output = torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)
        if copies > 1:
            output = output.reshape(batch, self.key_value_heads, copies, -1, self.head_dim).transpose(1, 2)
        return output.reshape(rows, -1)


class FirstStep(DecoderState):
    """The state of a decoder that takes one step: queries absorb the key projection, and what they read the value projection.

    A query x, states S of a source, and projections K and V give the scores x (S K)' = (x K') S', and the outputs p (S V) =
    (p S) V. So no token of a source is projected, which is an eighth of the products of a model with one target token.
    """

    def __init__(self, decoder: MetaphraseDecoder, encoder_output: torch.Tensor, attention_mask: torch.Tensor):
        """Read an encoder output (sources, S, D), whose mask (sources, S) is 0 for padding."""
        # No keys and values: they would be those of an empty source.
        super().__init__(decoder, encoder_output[:, :0], None)
        self._source = encoder_output
        self._hidden = torch.zeros_like(attention_mask, dtype=torch.float32)
        self._hidden.masked_fill_(attention_mask == 0, torch.finfo(torch.float32).min)

    @staticmethod
    def supports(decoder: MetaphraseDecoder) -> bool:
        """Return True if nothing comes between a projection and the scores or the sum of values."""
        attentions = [layer.cross_attn for layer in decoder.layers]
        projections = [projection for attention in attentions for projection in (attention.k_proj, attention.v_proj)]
        is_capped = decoder.config.attn_logit_softcapping is not None
        return not (is_capped or decoder.config.qk_norm) and all(map(prepacked_weights.can_record, projections))

    def _absorb(self) -> None:
        """Leave the projections to each step."""

    def _attend_to_source(self, index: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        attention, rows, heads = self.decoder.layers[index].cross_attn, len(query), self.key_value_heads
        # (key_value_heads, head_dim, D)
        keys, values = (part.weight.unflatten(0, (heads, -1)) for part in (attention.k_proj, attention.v_proj))
        # (key_value_heads, rows * groups, head_dim), with D in place of head_dim, and (rows, H, D)
        query = query.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
        query = torch.bmm(query, keys).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)
        # The bias of the keys adds the same to all scores of a query.
        scores = torch.bmm(query, self._source.mT).float() * scaling + self._hidden[:, None]
        output = torch.bmm(scores.softmax(dim=-1).to(query.dtype), self._source)
        output = output.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
        output = torch.bmm(output, values.mT)
        if attention.v_proj.bias is not None:
            output = output + attention.v_proj.bias.view(heads, 1, -1)
        return output.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1)
