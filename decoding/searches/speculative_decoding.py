"""Speculative decoding: a small model drafts some tokens, and the large model checks all of them in one pass.

Rows accept different numbers of tokens, so each row has its own length. The result is that of the large model alone: the
same tokens in greedy search, the same distribution in sampling.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from metaphrase.decoding.decoder_state import DecoderState, PreparedLayer, Rotation, attend
from metaphrase.decoding.options import are_ends, process
from metaphrase.decoding.searches.joint_search import JointSearch
from metaphrase.modeling.encoder_decoder import MetaphraseDecoder
from metaphrase.modeling.layers import fold_copies, unfold_copies
from metaphrase.modeling.positions import LearnedPositionEmbedding, rotate

DEFAULT_NUM_ASSISTANT_TOKENS = 5


class RaggedDecoderState(DecoderState):
    """Keys and values of all layers, for rows of different lengths. It reads blocks of tokens, and can forget tokens again.

    A token's index in the cache is its position. A row that forgets tokens overwrites them later, and a mask hides them until
    then.

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


class SpeculativeSearch(JointSearch):
    """Greedy search and sampling with a draft model, for `generate(custom_generate=...)` of the target model.

    A block of tokens is rounded differently than single tokens. In bfloat16, greedy search may choose the other of two
    tokens that are almost equally probable.

    Args:
        num_assistant_tokens: Tokens per draft.

    Attributes:
        num_drafted: Number of drafted tokens so far.
        num_accepted: Number of drafted tokens that are part of a target.

    Raises:
        ValueError: If `num_assistant_tokens` is not above 0.
    """

    def __init__(self, num_assistant_tokens: int = DEFAULT_NUM_ASSISTANT_TOKENS):
        if num_assistant_tokens < 1:
            raise ValueError(f"`num_assistant_tokens` must be at least 1, got {num_assistant_tokens}.")
        self.num_assistant_tokens = num_assistant_tokens
        self.num_drafted = self.num_accepted = 0

    def state_class(self, config: GenerationConfig) -> type[RaggedDecoderState]:
        return RaggedDecoderState

    def search(self, projections, states, prompt, processors, config, return_scores):
        """Search as in `JointSearch`; the second model drafts. Scores are sums of log-probabilities.

        Raises:
            ValueError: If there are beams.
        """
        if config.num_beams > 1:
            raise ValueError(f"`num_beams` must be 1 with `assistant_model`, got {config.num_beams}.")
        speculation = _Speculation(self, projections, states, prompt, processors, config, return_scores)
        while len(speculation.rows) and prompt.shape[1] < config.max_length:
            speculation.take_round()
        return speculation.result[:, : speculation.longest], speculation.totals


class _Speculation:
    """Unfinished targets of a batch. `search` counts the tokens that are drafted and accepted.

    Source: Leviathan et al. 2023, algorithm 1, arXiv 2211.17192; Chen et al. 2023, algorithm 2, arXiv 2302.01318.

    Attributes:
        rows: Index in the result of each row, shape (rows,).
        ids: Prompts and targets so far, padded, shape (rows, max_length).
        lengths: Tokens so far with the prompt, shape (rows,). An ended row has its prompt's length until all rows of its
            source have ended.
        is_ended: True for ended rows, shape (rows,).
        result: Ended targets, padded, shape (sources * copies, max_length); the longest has `longest` tokens.
        totals: Sums of their log-probabilities, shape (sources * copies,), or None.
    """

    def __init__(
        self,
        search: SpeculativeSearch,
        projections: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        states: Sequence[RaggedDecoderState],
        prompt: torch.Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        with_scores: bool,
    ):
        (self.project, self.project_draft), (self.state, self.draft) = projections, states
        self.search, self.processors, self.config = search, processors, config
        count, self.prompt_length = prompt.shape
        self.copies = count // self.state.rows
        for state in states:
            state.spread(self.copies)
        self.padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.rows = torch.arange(count, device=prompt.device)
        self.ids = nn.functional.pad(prompt, (0, config.max_length - self.prompt_length), value=self.padding)
        self.lengths = torch.full_like(self.rows, self.prompt_length)
        self.is_ended = torch.zeros_like(self.rows, dtype=torch.bool)
        self.result, self.longest = self.ids.clone(), self.prompt_length
        self.totals = torch.zeros(count, device=prompt.device) if with_scores else None
        # Tokens that each decoder can read.
        self.limits = [config.max_length] * 2
        for index, positions in enumerate(state.decoder.embed_positions for state in states):
            if isinstance(positions, LearnedPositionEmbedding):
                self.limits[index] = min(config.max_length, positions.num_embeddings - positions.offset)

    def take_round(self) -> None:
        """Draft, check, and add at least one token to each row."""
        longest = int(self.lengths.max())
        # The draft model does not read its own last token.
        room = min(self.config.max_length - 1, self.limits[0], self.limits[1] + 1) - longest
        drafted, draft_probs = self._draft(max(0, min(self.search.num_assistant_tokens, room)))
        width = drafted.shape[1]
        # The last token is unread; in the first round the whole prompt is.
        block = self._columns(self.state.lengths, longest - self.state.length)
        hidden_states = self.state.read(torch.cat((block, drafted), dim=1))[:, -1 - width :]
        positions = self.lengths[:, None] + torch.arange(width + 1, device=self.ids.device)
        # The draft is already in `ids`, where processors read it.
        logits = self.project(hidden_states).float()
        scores = self._process(positions.flatten(), logits.flatten(0, 1)).unflatten(0, positions.shape)
        tokens, accepted = self._choose(scores, drafted, draft_probs)
        # Samples are scored by the model itself, as in `sample`.
        self._add(tokens, accepted, positions, logits if self.config.do_sample else scores)

    def _columns(self, starts: torch.Tensor, width: int) -> torch.Tensor:
        """Return `width` ids of each row from its start on, shape (rows, width)."""
        return self.ids.take_along_dim(starts[:, None] + torch.arange(width, device=self.ids.device), dim=1)

    def _process(self, lengths: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply the processors to scores (rows * width, V), each behind its number of ids, shape (rows * width,).

        A processor reads rows of one length, so equal lengths are processed together.
        """
        if not self.processors:
            return scores
        processed, width = torch.empty_like(scores), len(scores) // len(self.ids)
        for length in lengths.unique().tolist():
            chosen = (lengths == length).nonzero()[:, 0]
            processed[chosen] = process(self.processors, self.ids[chosen // width, :length], scores[chosen])
        return processed

    def _draft(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens (rows, width) into `ids`, and return them, with probabilities (rows, width, V) for sampling."""
        if width == 0:
            return self.ids[:, :0], None
        # All rows read as many tokens as the row with the most unread ones; other rows read some again.
        unread = int((self.lengths - self.draft.lengths).max())
        starts = (self.lengths - unread).clamp(min=0)
        self.draft.go_back(starts)
        last = (self.lengths - 1 - starts)[:, None, None]
        hidden_states = self.draft.read(self._columns(starts, unread)).take_along_dim(last, dim=1)
        self.draft.go_back(self.lengths)
        probs = []
        for step in range(width):
            scores = self._process(self.lengths + step, self.project_draft(hidden_states[:, 0]).float())
            if self.config.do_sample:
                probs.append(nn.functional.softmax(scores, dim=-1))
                tokens = torch.multinomial(probs[-1], num_samples=1)
            else:
                tokens = scores.argmax(dim=-1, keepdim=True)
            self.ids.scatter_(1, self.lengths[:, None] + step, tokens)
            if step + 1 < width:
                hidden_states = self.draft.read(tokens)
        self.search.num_drafted += width * int((~self.is_ended).sum())
        return self._columns(self.lengths, width), torch.stack(probs, dim=1) if probs else None

    def _choose(
        self, scores: torch.Tensor, drafted: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept a prefix of the draft, and choose one token of the target model behind it.

        A drafted token is accepted with probability p / q, of the target model and of the draft model. The first refused
        token is drawn again from the positive part of p - q. Greedy search is the case of all p in one token.

        `scores` has shape (rows, width + 1, V), `drafted` (rows, width), and `draft_probs` (rows, width, V) is None for
        greedy search. Returns tokens (rows, width + 1), and the number of accepted tokens (rows,). One more token is valid.
        """
        if not self.config.do_sample:
            tokens = scores.argmax(dim=-1)
            return tokens, (tokens[:, :-1] == drafted).long().cumprod(dim=1).sum(dim=1)
        probs = nn.functional.softmax(scores, dim=-1)
        if draft_probs is None:
            return torch.multinomial(probs[:, 0], num_samples=1), torch.zeros_like(self.lengths)
        target, draft = (p.take_along_dim(drafted[:, :, None], dim=2)[:, :, 0] for p in (probs[:, :-1], draft_probs))
        is_accepted = torch.rand_like(target) * draft < target
        accepted = is_accepted.long().cumprod(dim=1).sum(dim=1)
        # Behind a draft accepted as a whole, q is 0.
        surplus = probs - nn.functional.pad(draft_probs, (0, 0, 0, 1))
        index = accepted[:, None, None]
        probs, surplus = (p.take_along_dim(index, dim=1)[:, 0] for p in (probs, surplus.clamp(min=0)))
        # By rounding, nothing may be left.
        surplus = torch.where(surplus.sum(dim=-1, keepdim=True) > 0, surplus, probs)
        added = torch.multinomial(surplus, num_samples=1)
        return nn.functional.pad(drafted, (0, 1)).scatter(1, accepted[:, None], added), accepted

    def _add(self, tokens: torch.Tensor, accepted: torch.Tensor, positions: torch.Tensor, scores: torch.Tensor) -> None:
        """Add the chosen tokens (rows, width + 1) up to the ends, and drop sources whose rows have all ended."""
        order, ends = torch.arange(tokens.shape[1], device=tokens.device), self.config._eos_token_tensor
        counts = accepted + 1
        is_end = are_ends(tokens, ends) & (order < counts[:, None])
        # Up to the first end, inclusive.
        ended_counts = is_end.long().argmax(dim=1) + 1
        counts = torch.where(is_end.any(dim=1), ended_counts, counts).masked_fill(self.is_ended, 0)
        is_taken = order < counts[:, None]
        self.ids.scatter_(1, positions, tokens.masked_fill(~is_taken, self.padding))
        self.search.num_accepted += int(torch.minimum(accepted, counts).sum())
        if self.totals is not None:
            log_probs = nn.functional.log_softmax(scores, dim=-1).take_along_dim(tokens[:, :, None], dim=2)[:, :, 0]
            self.totals[self.rows] += log_probs.masked_fill(~is_taken, 0.0).sum(dim=1)
        self.lengths = self.lengths + counts

        is_ending = ~self.is_ended & (is_end.any(dim=1) | (self.lengths == self.config.max_length))
        if bool(is_ending.any()):
            self.result[self.rows[is_ending]] = self.ids[is_ending]
            self.longest = max(self.longest, int(self.lengths[is_ending].max()))
            self.is_ended = self.is_ended | is_ending
            self.lengths = self.lengths.masked_fill(self.is_ended, self.prompt_length)
        # Forget refused tokens; the last token is still unread.
        for state in (self.state, self.draft):
            state.go_back(torch.minimum(state.lengths, self.lengths - 1))
        is_done = self.is_ended.view(-1, self.copies).all(dim=1)
        if bool(is_done.any()):
            is_left = ~is_done.repeat_interleave(self.copies)
            for name in ("rows", "ids", "lengths", "is_ended"):
                setattr(self, name, getattr(self, name)[is_left])
            if len(self.rows):
                self.state.select_sources((~is_done).nonzero()[:, 0])
                self.draft.select_sources((~is_done).nonzero()[:, 0])
