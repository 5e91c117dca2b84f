"""Speculative decoding: a small model drafts some tokens, and the large model checks all of them in one pass.

Rows accept different numbers of tokens, so each row has its own length. The result is that of greedy search with the large model
alone.

Source: Leviathan et al. 2023, algorithm 1, arXiv 2211.17192, for greedy search.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.decoder_state import DecoderState, PreparedLayer, Rotation, attend
from metaphrase.decoding.options import are_ends, process
from metaphrase.decoding.searches.joint_search import start_search
from metaphrase.modeling.positions import LearnedPositionEmbedding, rotate
from metaphrase.modeling.stacks import MetaphraseDecoder

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

    def select_sources(self, sources: torch.Tensor) -> None:
        super().select_sources(sources)
        self.go_back(self.lengths[sources])

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
        rows = len(query)
        # (rows, width, H, head_dim) -> (rows * key_value_heads, groups * width, head_dim)
        query = query.transpose(1, 2).unflatten(1, (-1, self.groups)).flatten(2, 3).flatten(0, 1)
        output = attend(query, *views, bias, scaling, rows)
        return output.view(rows, self.key_value_heads * self.groups, -1, self.head_dim).transpose(1, 2).flatten(2)


class SpeculativeSearch:
    """Greedy search with a draft model, for `generate(custom_generate=...)` of the target model.

    A block of tokens is rounded differently than single tokens. In bfloat16, greedy search may choose the other of two
    tokens that are almost equally probable.

    Attributes:
        num_assistant_tokens: Tokens per draft.
        num_drafted: Number of drafted tokens so far.
        num_accepted: Number of drafted tokens that are part of a target.
    """

    def __init__(self, num_assistant_tokens: int = DEFAULT_NUM_ASSISTANT_TOKENS):
        self.num_assistant_tokens = num_assistant_tokens
        self.num_drafted = self.num_accepted = 0

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        partners: Sequence[tuple[PreTrainedModel, dict[str, torch.Tensor]]] = (),
        return_scores: bool = True,
        **kwargs,
    ) -> GenerateBeamEncoderDecoderOutput:
        """Search as `EnsembleSearch` does; the one partner drafts. Scores are sums of log-probabilities.

        Raises:
            ValueError: If the search is not greedy, or as `start_search`.
        """
        config = generation_config
        if config.num_beams > 1 or config.do_sample:
            raise ValueError(
                "`num_beams` must be 1 and `do_sample` false with `assistant_model`, "
                f"got {config.num_beams} and {config.do_sample}."
            )
        arguments = (model, input_ids, logits_processor, stopping_criteria, config, partners)
        projections, states = start_search(RaggedDecoderState, *arguments, **kwargs)
        speculation = _Speculation(self, projections, states, input_ids, logits_processor, config)
        while len(speculation.rows) and input_ids.shape[1] < config.max_length:
            speculation.take_round()
        ids, scores = speculation.result[:, : speculation.longest], speculation.totals if return_scores else None
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)


class _Speculation:
    """Unfinished targets of a batch. `search` counts the tokens that are drafted and accepted.

    Attributes:
        rows: Index in the result of each row, shape (rows,).
        ids: Prompts and targets so far, padded, shape (rows, max_length).
        lengths: Tokens so far with the prompt, shape (rows,).
        result: Ended targets, padded, shape (sources, max_length); the longest has `longest` tokens.
        totals: Sums of their log-probabilities, shape (sources,).
    """

    def __init__(
        self,
        search: SpeculativeSearch,
        projections: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        states: Sequence[RaggedDecoderState],
        prompt: torch.Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
    ):
        (self.project, self.project_draft), (self.state, self.draft) = projections, states
        self.search, self.processors, self.config = search, processors, config
        count, self.longest = prompt.shape
        self.padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.rows = torch.arange(count, device=prompt.device)
        self.ids = nn.functional.pad(prompt, (0, config.max_length - self.longest), value=self.padding)
        self.lengths = torch.full_like(self.rows, self.longest)
        self.result = self.ids.clone()
        self.totals = torch.zeros(count, device=prompt.device)
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
        drafted = self._draft(max(0, min(self.search.num_assistant_tokens, room)))
        width = drafted.shape[1]
        # The last token is unread; in the first round the whole prompt is.
        block = self._columns(self.state.lengths, longest - self.state.length)
        hidden_states = self.state.read(torch.cat((block, drafted), dim=1))[:, -1 - width :]
        positions = self.lengths[:, None] + torch.arange(width + 1, device=self.ids.device)
        # The draft is already in `ids`, where processors read it.
        logits = self.project(hidden_states).float()
        scores = self._process(positions.flatten(), logits.flatten(0, 1)).unflatten(0, positions.shape)
        tokens = scores.argmax(dim=-1)
        accepted = (tokens[:, :-1] == drafted).long().cumprod(dim=1).sum(dim=1)
        self._add(tokens, accepted, positions, scores)

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

    def _draft(self, width: int) -> torch.Tensor:
        """Draft tokens (rows, width) into `ids`, and return them."""
        if width == 0:
            return self.ids[:, :0]
        # All rows read as many tokens as the row with the most unread ones; other rows read some again.
        unread = int((self.lengths - self.draft.lengths).max())
        starts = (self.lengths - unread).clamp(min=0)
        self.draft.go_back(starts)
        last = (self.lengths - 1 - starts)[:, None, None]
        hidden_states = self.draft.read(self._columns(starts, unread)).take_along_dim(last, dim=1)
        self.draft.go_back(self.lengths)
        for step in range(width):
            scores = self._process(self.lengths + step, self.project_draft(hidden_states[:, 0]).float())
            tokens = scores.argmax(dim=-1, keepdim=True)
            self.ids.scatter_(1, self.lengths[:, None] + step, tokens)
            if step + 1 < width:
                hidden_states = self.draft.read(tokens)
        self.search.num_drafted += width * len(self.rows)
        return self._columns(self.lengths, width)

    def _add(self, tokens: torch.Tensor, accepted: torch.Tensor, positions: torch.Tensor, scores: torch.Tensor) -> None:
        """Add the accepted tokens (rows, width + 1) and one more, up to the ends, and drop rows that have ended."""
        order, counts = torch.arange(tokens.shape[1], device=tokens.device), accepted + 1
        is_end = are_ends(tokens, self.config._eos_token_tensor) & (order < counts[:, None])
        # Up to the first end, inclusive.
        counts = torch.where(is_end.any(dim=1), is_end.long().argmax(dim=1) + 1, counts)
        is_taken = order < counts[:, None]
        self.ids.scatter_(1, positions, tokens.masked_fill(~is_taken, self.padding))
        self.search.num_accepted += int(torch.minimum(accepted, counts).sum())
        log_probs = nn.functional.log_softmax(scores, dim=-1).take_along_dim(tokens[:, :, None], dim=2)[:, :, 0]
        self.totals[self.rows] += log_probs.masked_fill(~is_taken, 0.0).sum(dim=1)
        self.lengths = self.lengths + counts
        # Forget refused tokens; the last token is still unread.
        for state in (self.state, self.draft):
            state.go_back(torch.minimum(state.lengths, self.lengths - 1))
        is_done = is_end.any(dim=1) | (self.lengths == self.config.max_length)
        if bool(is_done.any()):
            self.result[self.rows[is_done]] = self.ids[is_done]
            self.longest = max(self.longest, int(self.lengths[is_done].max()))
            left = (~is_done).nonzero()[:, 0]
            self.rows, self.ids, self.lengths = self.rows[left], self.ids[left], self.lengths[left]
            if len(left):
                self.state.select_sources(left)
                self.draft.select_sources(left)
