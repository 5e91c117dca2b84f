"""The state of beam search: the targets of a source continue one another, as branches of a tree.

A token that several targets share is stored and read once. A target that continues another target copies its mask of tokens; no
key or value moves. Tokens of no target are dropped from time to time.

Source: Miao et al. 2024, section 4.2, arXiv 2305.09781, attend to a tree of tokens in this way.
"""

import torch
from torch import nn

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.kv_cache import with_reserve
from metaphrase.modeling.encoder_decoder import MetaphraseDecoder

# Unused tokens are dropped when the tokens have grown by so many steps, or by this share.
_STEPS_BETWEEN, _SHARE_BETWEEN = 4, 0.25


class BeamState(DecoderState):
    """The kv cache of all layers. A source has one cache row for the tokens of all its targets."""

    def __init__(self, decoder: MetaphraseDecoder, encoder_output: torch.Tensor, attention_mask: torch.Tensor | None):
        super().__init__(decoder, encoder_output, attention_mask)
        sources = len(encoder_output)
        # The position of each token of a source in its target, (sources, tokens).
        self._token_positions = torch.zeros(sources, 0, dtype=torch.long, device=self.device)
        # Added to the scores of each target, (sources, copies, tokens): 0 for its own tokens, the lowest number for others.
        self._mask = torch.zeros(sources, 1, 0, dtype=self.dtype, device=self.device)
        # With more tokens, `_drop_unused` looks for tokens to drop.
        self._most_tokens = 0

    @property
    def rows_per_cache_row(self) -> int:
        return self.copies

    @property
    def rows(self) -> int:
        return self._target_cache.rows * self.copies

    @property
    def num_tokens(self) -> int:
        """Stored tokens of each source."""
        return self._token_positions.shape[1]

    def spread(self, copies: int) -> None:
        self._mask = self._mask.repeat_interleave(copies, dim=1)
        self._spread_sources(copies)

    def reorder(self, rows: torch.Tensor) -> None:
        """Let each row continue the row of the same source with this index, (rows,)."""
        self._mask = self._mask.flatten(0, 1).index_select(0, rows).view(self._mask.shape)

    def select_sources(self, sources: torch.Tensor) -> None:
        self._select_source_cache(sources)
        self._target_cache.select_rows(sources)
        self._token_positions = self._token_positions.index_select(0, sources)
        self._mask = self._mask.index_select(0, sources)

    def _make_room(self, length: int) -> None:
        if length > self.num_positions:
            self._make_tables(with_reserve(self.length, length))
        if self.num_tokens + self.copies > self._most_tokens:
            self._drop_unused()
        if self.num_tokens + self.copies > self._target_cache.capacity:
            self._target_cache.grow(self.num_tokens, 2 * max(self._most_tokens, self.num_tokens + self.copies))

    def _drop_unused(self) -> None:
        """Drop tokens that belong to no target."""
        is_used = (self._mask == 0).any(dim=1)
        count = int(is_used.sum(dim=1).max())
        if count < self.num_tokens:
            # Used tokens first, in their order. A source with fewer used tokens keeps some unused ones.
            indices = is_used.long().argsort(dim=1, descending=True, stable=True)[:, :count]
            self._target_cache.select_tokens(indices)
            self._token_positions = self._token_positions.take_along_dim(indices, dim=1)
            self._mask = self._mask.take_along_dim(indices[:, None], dim=2)
        self._most_tokens = count + max(_STEPS_BETWEEN * self.copies, int(_SHARE_BETWEEN * count))

    def _prepare_step(self) -> None:
        start, stop = self.num_tokens, self.num_tokens + self.copies
        # (layers, sources, copies, heads, head_dim); with one copy, without the axis.
        keys = self._target_cache.keys[..., start:stop].movedim(4, 2).squeeze(2)
        values = self._target_cache.values[..., start:stop, :].movedim(3, 2).squeeze(2)
        self._new_entries = list(zip(keys.unbind(0), values.unbind(0), strict=True))
        self._target_views = self._target_cache.views(stop)
        lowest = torch.finfo(self.dtype).min
        new = self._mask.new_full((self.copies, self.copies), lowest).fill_diagonal_(0)
        self._mask = torch.cat((self._mask, new.expand(len(self._mask), -1, -1)), dim=2)
        self._token_positions = nn.functional.pad(self._token_positions, (0, self.copies), value=self.length)
        self._target_biases = self._map_biases(self._tree_bias)

    def _tree_bias(self, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the bias of the scores, (sources, 1 or key_value_heads, copies * groups, tokens).

        Args:
            bias: Position bias of the last position, (H, positions).
        """
        # (sources, copies, tokens) -> (sources, 1, copies, 1, tokens)
        mask = self._mask[:, None, :, None]
        if bias is None:
            return mask.expand(-1, -1, -1, self.groups, -1).flatten(2, 3)
        # (H, sources, tokens) -> (sources, key_value_heads, 1, groups, tokens)
        token_bias = bias[:, bias.shape[1] - 1 - self.length + self._token_positions].transpose(0, 1)
        return (mask + token_bias.unflatten(1, (-1, 1, self.groups))).flatten(2, 3)
