"""Decoder state whose rows have their own lengths. It reads blocks of tokens, and can forget tokens again.

A token's index in the cache is its position. A row that forgets tokens overwrites them later, and a mask per row hides
them until then. A block needs a mask, and a position bias if there is one, of shape (rows, width, past).
"""

import torch

from metaphrase.decoding.decoder_state import DecoderState, Rotation, attend
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

    def __init__(self, decoder: MetaphraseDecoder, encoder_output: torch.Tensor, attention_mask: torch.Tensor | None):
        super().__init__(decoder, encoder_output, attention_mask)
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        # For the current block.
        self._query_positions = self._is_hidden = self.lengths

    def read(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read tokens (rows, width) behind the end of each row, and return the decoder's output (rows, width, H)."""
        decoder, width = self.decoder, input_ids.shape[1]
        past = self.length + width
        self._make_room(past)
        self._query_positions = self.lengths[:, None] + torch.arange(width, device=self.device)
        # (rows, width, past). Future positions, which may hold forgotten tokens, are hidden.
        distances = self._query_positions[:, :, None] - torch.arange(past, device=self.device)
        self._is_hidden = distances < 0
        self._target_biases = self._map_biases(lambda bias: self._block_bias(bias, distances))
        hidden_states, rotation = decoder.enter(decoder.embed_tokens(input_ids), self._query_positions, past)
        if rotation is not None:
            # (rows, 1, width, rotated) -> (rows, width, 1, rotated)
            rotation = tuple(angles.transpose(1, 2) for angles in rotation)
        for index, layer in enumerate(self.layers):
            hidden_states = self._pass_layer(index, layer, hidden_states, rotation)
        self.lengths, self.length = self.lengths + width, past
        return decoder.norm(hidden_states)

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

    def _attend_to_target(
        self, index: int, layer: PreparedLayer, hidden_states: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        # (rows, width, heads, head_dim)
        query, key, value = self._project_target(layer, hidden_states)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        past, rows = self._is_hidden.shape[2], torch.arange(self.rows, device=key.device)[:, None]
        keys, values = self._target_cache.keys[index].mT, self._target_cache.values[index]
        keys[rows, :, self._query_positions] = key
        values[rows, :, self._query_positions] = value
        views = keys.mT[..., :past].flatten(0, 1), values[:, :, :past].flatten(0, 1)
        return layer.self_output(self._attend(query, views, self._target_biases[index], layer.self_scaling, 1))

    def _attend(
        self,
        query: torch.Tensor,
        views: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        scaling: float,
        copies: int,
    ) -> torch.Tensor:
        """Attend as in `DecoderState` with several queries of each row: from (rows, width, H, head_dim) to (rows, width, D)."""
        batch = len(query) // copies
        # (rows, width, H, head_dim) -> (batch, key_value_heads, copies * groups * width, head_dim)
        query = fold_copies(query.transpose(1, 2).unflatten(1, (-1, self.groups)).flatten(2, 3), copies)
        output = attend(query.flatten(0, 1), *views, bias, scaling, batch).unflatten(0, (batch, -1))
        output = unfold_copies(output, copies).unflatten(2, (self.groups, -1))
        return output.flatten(1, 2).transpose(1, 2).flatten(2)
