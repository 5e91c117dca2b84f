"""A state of decoding whose targets go on from one another, as in beam search: those of a source are the branches of one tree.

A token that several targets have in common is kept and read once. A target that goes on from another one takes over which tokens
are its own, a mask, and no key or value is moved; those that no target has any more are dropped from time to time.

Source: attention over a tree of tokens is that of Miao et al. 2024, section 4.2, arXiv 2305.09781.
"""

import torch
from torch import nn

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.kv_cache import with_reserve
from metaphrase.modeling.decoder import MetaphraseDecoder

# Tokens are dropped once there are more than the targets have by so many steps' tokens, or by this share of theirs.
_STEPS_BETWEEN, _SHARE_BETWEEN = 4, 0.25


class BeamState(DecoderState):
    """Keys and values of all layers, for each source the tokens of all its targets."""

    def __init__(self, decoder: MetaphraseDecoder, memory: torch.Tensor, memory_mask: torch.Tensor | None):
        super().__init__(decoder, memory, memory_mask)
        # At which place of a target each token of a source stands, (sources, tokens); added to the scores of each target: 0
        # for its own tokens, and for others as little as there is, (sources, copies, tokens).
        self._places = torch.zeros(len(memory), 0, dtype=torch.long, device=self.device)
        self._mask = torch.zeros(len(memory), 1, 0, dtype=self.dtype, device=self.device)
        self._lowest = torch.finfo(self.dtype).min
        # With more tokens than this it is worth looking for some to be dropped.
        self._most_tokens = 0

    @property
    def token_copies(self) -> int:
        return self.copies

    @property
    def rows(self) -> int:
        return self._tokens.rows * self.copies

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept of each source."""
        return self._places.shape[1]

    def spread(self, copies: int) -> None:
        self._mask = self._mask.repeat_interleave(copies, dim=1)
        self._spread_memory(copies)

    def reorder(self, rows: torch.Tensor) -> None:
        """Lets each row go on from another one of the same source, `(rows)`."""
        self._mask = self._mask.flatten(0, 1).index_select(0, rows).view(self._mask.shape)

    def keep(self, sources: torch.Tensor) -> None:
        self._keep_memory(sources)
        self._tokens.keep_rows(sources)
        self._places, self._mask = self._places.index_select(0, sources), self._mask.index_select(0, sources)

    def _make_room(self, past: int) -> None:
        if past > self.num_places:
            self._make_tables(with_reserve(self.length, past))
        if self.num_tokens + self.copies > self._most_tokens:
            self._drop()
        if self.num_tokens + self.copies > self._tokens.capacity:
            self._tokens.grow(self.num_tokens, 2 * max(self._most_tokens, self.num_tokens + self.copies))

    def _drop(self) -> None:
        """Drops tokens that no target has."""
        is_read = (self._mask == 0).any(dim=1)
        count = int(is_read.sum(dim=1).max())
        if count < self.num_tokens:
            # Those that are read in front, in their order; where these are fewer, others behind them.
            kept = is_read.long().argsort(dim=1, descending=True, stable=True)[:, :count]
            self._tokens.keep_places(kept)
            self._places = self._places.take_along_dim(kept, dim=1)
            self._mask = self._mask.take_along_dim(kept[:, None], dim=2)
        self._most_tokens = count + max(_STEPS_BETWEEN * self.copies, int(_SHARE_BETWEEN * count))

    def _open_step(self) -> None:
        new_places = slice(self.num_tokens, self.num_tokens + self.copies)
        # (layers, sources, copies, heads, head_dim), and without copies where there is one
        keys = self._tokens.keys[..., new_places].movedim(4, 2).squeeze(2)
        values = self._tokens.values[..., new_places, :].movedim(3, 2).squeeze(2)
        self._slots = list(zip(keys.unbind(0), values.unbind(0), strict=True))
        self._token_views = self._tokens.views(new_places.stop)
        new = self._mask.new_full((self.copies, self.copies), self._lowest).fill_diagonal_(0)
        self._mask = torch.cat((self._mask, new.expand(len(self._mask), -1, -1)), dim=2)
        self._places = nn.functional.pad(self._places, (0, self.copies), value=self.length)
        self._token_biases = self._of_each_layer(self._tree_bias)

    def _tree_bias(self, bias: torch.Tensor | None) -> torch.Tensor:
        """What is added to the scores, `(sources, 1 or key_value_heads, copies * groups, tokens)`.

        Args:
            bias: That of the last place, `(heads, places)`.
        """
        # (sources, copies, tokens) -> (sources, 1, copies, 1, tokens)
        mask = self._mask[:, None, :, None]
        if bias is None:
            return mask.expand(-1, -1, -1, self.groups, -1).flatten(2, 3)
        # (heads, sources, tokens) -> (sources, key_value_heads, 1, groups, tokens)
        of_tokens = bias[:, bias.shape[1] - 1 - self.length + self._places].transpose(0, 1)
        return (mask + of_tokens.unflatten(1, (-1, 1, self.groups))).flatten(2, 3)
