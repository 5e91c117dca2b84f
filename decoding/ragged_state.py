"""Decoder state whose rows have their own lengths. It reads blocks of tokens, and can forget tokens again.

A token's index in the cache is its position. A row that forgets tokens overwrites them later, and a mask per row hides
them until then. A block needs a mask, and a position bias if there is one, of shape (rows, width, past).
"""

import torch

from metaphrase.decoding.decoder_state import DecoderState, attend
from metaphrase.decoding.prepared_decoder import PreparedLayer
from metaphrase.modeling.attention import fold_copies, unfold_copies
from metaphrase.modeling.encoder_decoder import MetaphraseDecoder
from metaphrase.modeling.positions import rotate


class RaggedDecoderState(DecoderState):
    """Keys and values of all layers, for rows of different lengths.

    Attributes:
        lengths: Tokens of each row, shape (rows,).
        length: The largest of `lengths`.
    """

    def __init__(self, decoder: MetaphraseDecoder, memory: torch.Tensor, memory_mask: torch.Tensor | None):
        super().__init__(decoder, memory, memory_mask)
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=memory.device)
        # For the current block.
        self._query_positions = self._is_hidden = self.lengths
        self._block_biases: dict[int, torch.Tensor] = {}

    def read(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read tokens (rows, width) behind the end of each row, and return the decoder's output (rows, width, H)."""
        width, device = input_ids.shape[1], input_ids.device
        past = self.length + width
        self._make_room(past)
        self._query_positions = self.lengths[:, None] + torch.arange(width, device=device)
        # (rows, width, past). Future positions, which may hold forgotten tokens, are hidden.
        distances = self._query_positions[:, :, None] - torch.arange(past, device=device)
        self._is_hidden = distances < 0
        self._block_biases = {}
        for bias in self._biases:
            if id(bias) not in self._block_biases:
                self._block_biases[id(bias)] = self._block_bias(bias, distances)
        decoder = self.decoder
        hidden_states, rotation = decoder.enter(decoder.embed_tokens(input_ids), self._query_positions, past)
        for index, layer in enumerate(self.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.lengths, self.length = self.lengths + width, past
        return decoder.norm(hidden_states)

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read one token of each row, shape (rows,), and return the decoder's output (rows, H)."""
        return self.read(input_ids[:, None])[:, 0]

    def go_back(self, lengths: torch.Tensor) -> None:
        """Forget all tokens of each row behind its first `lengths` tokens, shape (rows,)."""
        self.lengths, self.length = lengths, int(lengths.max())

    def spread(self, copies: int) -> None:
        super().spread(copies)
        self.lengths = self.lengths.repeat_interleave(copies)

    def select_sources(self, sources: torch.Tensor) -> None:
        super().select_sources(sources)
        self.go_back(self.lengths.view(-1, self.copies)[sources].flatten())

    def _make_room(self, past: int) -> None:
        before = self._target_cache.capacity
        super()._make_room(past)
        if self._target_cache.capacity > before:
            # Hidden positions have weight 0, but must not hold NaN.
            self._target_cache.keys[..., self.length :] = 0
            self._target_cache.values[..., self.length :, :] = 0

    def _block_bias(self, bias: torch.Tensor | None, distances: torch.Tensor) -> torch.Tensor:
        """Return a block's bias and mask, shape (rows, 1 or key_value_heads, groups * width, past).

        `bias` (heads, capacity) is that of the last position, and `distances` has shape (rows, width, past).
        """
        lowest = torch.finfo(self.dtype).min
        if bias is None:
            mask = torch.zeros_like(distances, dtype=self.dtype).masked_fill_(self._is_hidden, lowest)
            return mask.repeat(1, self.groups, 1)[:, None]
        # (heads, rows, width, past) -> (rows, heads, width, past)
        block = bias[:, bias.shape[1] - 1 - distances.clamp(min=0)].transpose(0, 1)
        block = block.masked_fill(self._is_hidden[:, None], lowest)
        return block.unflatten(1, (-1, self.groups)).flatten(2, 3)

    def _fold(self, query: torch.Tensor) -> torch.Tensor:
        """(rows, width, heads, head_dim) -> (rows, key_value_heads, groups * width, head_dim)"""
        return query.transpose(1, 2).unflatten(1, (-1, self.groups)).flatten(2, 3)

    def _unfold(self, output: torch.Tensor) -> torch.Tensor:
        """(rows, key_value_heads, groups * width, head_dim) -> (rows, width, heads * head_dim)"""
        return output.unflatten(2, (self.groups, -1)).flatten(1, 2).transpose(1, 2).flatten(2)

    def _attend_to_target(
        self,
        index: int,
        layer: PreparedLayer,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        # (rows, width, heads, head_dim)
        query, key, value = self._project_target(layer, hidden_states)
        if rotation is not None:
            # (rows, 1, width, rotated) -> (rows, width, 1, rotated)
            rotation = tuple(angles.transpose(1, 2) for angles in rotation)
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        past, rows = self._is_hidden.shape[2], torch.arange(self.rows, device=key.device)[:, None]
        keys, values = self._target_cache.keys[index].mT, self._target_cache.values[index]
        keys[rows, :, self._query_positions] = key
        values[rows, :, self._query_positions] = value
        keys, values, bias = keys.mT[..., :past], values[:, :, :past], self._block_biases[id(self._biases[index])]
        return layer.self_output(self._unfold(attend(self._fold(query), keys, values, bias, layer.self_scaling)))

    def _attend_to_source(self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
        keys, values = self._source_cache.keys[index], self._source_cache.values[index]
        query = fold_copies(self._fold(self._project_cross_query(layer, hidden_states)), self.copies)
        output = attend(query, keys, values, self._source_bias, layer.cross_scaling)
        return layer.cross_output(self._unfold(unfold_copies(output, self.copies)))
