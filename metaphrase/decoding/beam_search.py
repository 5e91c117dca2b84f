"""Beam search. A source that is done leaves the batch.

transformers' `_beam_search` defines which hypotheses are found; the tests compare both.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.options import are_ends, process
from metaphrase.modeling.stacks import MetaphraseDecoder

# Stands for minus infinity. transformers' number, because ties depend on it.
WORST = -1e9
# Columns that `top_of_rows` compares as one.
_BLOCK = 64
# Unused tokens are dropped when the tokens have grown by so many steps, or by this share.
_STEPS_BETWEEN, _SHARE_BETWEEN = 4, 0.25


class BeamState(DecoderState):
    """The state of beam search: the targets of a source continue one another, as branches of a tree.

    A source has one row of the cache for the tokens of all its targets. A token that several targets share is stored and read
    once. A target that continues another target copies its mask of tokens; no key or value moves. Tokens of no target are
    dropped from time to time.

    Source: Miao et al. 2024, section 4.2, arXiv 2305.09781, attend to a tree of tokens in this way.
    """

    def __init__(self, decoder: MetaphraseDecoder, encoder_output: torch.Tensor, attention_mask: torch.Tensor | None):
        super().__init__(decoder, encoder_output, attention_mask)
        sources = len(encoder_output)
        # The position of each token of a source in its target, (sources, tokens).
        self._token_positions = torch.zeros(sources, 0, dtype=torch.long, device=self.device)
        # Added to the scores of each target, (sources, copies, tokens): 0 for its own tokens, the lowest number for others.
        self._mask = torch.zeros(sources, 1, 0, dtype=self.dtype, device=self.device)
        # With more tokens, a step looks for tokens to drop.
        self._most_tokens = 0

    def reorder(self, rows: torch.Tensor) -> None:
        self._mask = self._mask.flatten(0, 1).index_select(0, rows).unflatten(0, (len(self._mask), -1))
        self._states = [states.index_select(0, rows) for states in self._states]

    def select_sources(self, sources: torch.Tensor) -> None:
        super().select_sources(sources)
        self._token_positions = self._token_positions.index_select(0, sources)
        self._mask = self._mask.index_select(0, sources)

    def _prepare_step(self) -> None:
        if self._token_positions.shape[1] + self.copies > self._most_tokens:
            is_used = (self._mask == 0).any(dim=1)
            count = int(is_used.sum(dim=1).max())
            if count < self._token_positions.shape[1]:
                # Used tokens first, in their order. A source with fewer used tokens keeps some unused ones.
                indices = is_used.long().argsort(dim=1, descending=True, stable=True)[:, :count]
                self._target_cache.select_tokens(indices)
                self._token_positions = self._token_positions.take_along_dim(indices, dim=1)
                self._mask = self._mask.take_along_dim(indices[:, None], dim=2)
            self._most_tokens = count + max(_STEPS_BETWEEN * self.copies, int(_SHARE_BETWEEN * count))
        start = self._token_positions.shape[1]
        stop = start + self.copies
        self._new_entries = self._target_cache.extend(start, self.copies, 2 * max(self._most_tokens, stop))
        self._target_views = self._target_cache.views(stop)
        new = self._mask.new_full((self.copies, self.copies), torch.finfo(self.dtype).min).fill_diagonal_(0)
        self._mask = torch.cat((self._mask, new.expand(len(self._mask), -1, -1)), dim=2)
        self._token_positions = nn.functional.pad(self._token_positions, (0, self.copies), value=self.length)
        self._target_biases = self._masked_biases(self._mask, self.length - self._token_positions[:, None])


def top_of_rows(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest entries of rows (rows, columns) and their columns, both (rows, count), largest first.

    On a CPU, torch's `topk` takes ten times as long as the maximum. The largest entries of a long row are in the blocks with
    the largest maxima, and only these blocks are searched. This takes a quarter of the time for 32 rows of 148,000, on Zen 4.
    """
    columns = rows.shape[1]
    blocks = columns // _BLOCK
    if rows.device.type != "cpu" or blocks < 16 * count:
        return rows.topk(count)
    maxima = rows[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(dim=2)
    # In the order of the row, as for one search of the row.
    chosen = maxima.topk(count).indices.sort(dim=1).values
    candidates = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    tail = torch.arange(blocks * _BLOCK, columns).expand(len(rows), -1)
    candidates = torch.cat((candidates, tail), dim=1)
    values, indices = rows.gather(1, candidates).topk(count)
    return values, candidates.gather(1, indices)


class Selection:
    """Selection of the best continuations of each source."""

    def __init__(self, config: GenerationConfig, tokens: torch.Tensor | None = None):
        """Select among `tokens`, the token of each log-probability, (V,). None means all tokens of the vocabulary."""
        self.ends, self._tokens = config._eos_token_tensor, tokens
        # Enough candidates to continue, even if all end tokens are among them.
        self.num_candidates = max(2, 1 + (0 if self.ends is None else len(self.ends))) * config.num_beams

    def choose(self, log_probs: torch.Tensor, beams: "Beams", num_left: int) -> tuple[torch.Tensor, ...]:
        """Select the candidates with the highest sums of log-probabilities (sources, beams, V), which are overwritten.

        At most `num_left` tokens follow the tokens of this step.

        Returns:
            Of the candidates, (sources, candidates) each: sums of log-probabilities, indices of the beams that they continue,
            last tokens, and True for those that end and are good enough to be stored. Of those that continue, (sources, beams)
            each, best first: their indices among the candidates, and the scores with which they continue.
        """
        num_beams, vocab_size = log_probs.shape[1:]
        # (sources, beams, V) -> (sources, candidates), best first
        totals = log_probs.add_(beams.scores[:, :, None]).flatten(1)
        scores, indices = top_of_rows(totals, self.num_candidates)
        parents, tokens = indices // vocab_size, indices % vocab_size
        tokens = tokens if self._tokens is None else self._tokens[tokens]
        is_end = are_ends(tokens, self.ends)
        chosen_scores, chosen = (scores + is_end.float() * WORST).topk(num_beams)
        is_end |= num_left == 0
        # The candidates behind the best `num_beams` are there to continue only.
        is_end[:, num_beams:] = False
        return scores, parents, tokens, is_end, chosen, chosen_scores

    def select_sources(self, sources: torch.Tensor) -> None:
        """Select the sources with these indices, (sources,)."""


class Beams:
    """The hypotheses of the sources that are not done.

    Attributes:
        indices: Indices of the sources in the batch, (sources,).
        ids: Ids of the hypotheses that continue, (sources, beams, length).
        scores: Sums of their log-probabilities, best first, (sources, beams).
        ended_ids: Ids of the best hypotheses that have ended, padded, (sources, beams, length).
        ended_scores: Their scores, normalized by length, best first, (sources, beams).
        ended_lengths: Their numbers of tokens without the prompt; 0 for an empty entry, (sources, beams).
    """

    def __init__(self, prompt: torch.Tensor, beams: int):
        sources = len(prompt)
        self.indices = torch.arange(sources, device=prompt.device)
        self.ids = prompt[:, None].expand(-1, beams, -1)
        self.scores = torch.zeros(sources, beams, device=prompt.device)
        # All beams are equal at first, and only the first one continues.
        self.scores[:, 1:] = WORST
        # The prompt is the result if no hypothesis ends.
        self.ended_ids = self.ids.clone()
        self.ended_scores = torch.full_like(self.scores, WORST)
        self.ended_lengths = torch.zeros_like(self.scores, dtype=torch.long)

    def select_sources(self, sources: torch.Tensor) -> "Beams":
        """Return the beams of the sources with these indices, (sources,)."""
        selected = copy.copy(self)
        vars(selected).update({name: tensor.index_select(0, sources) for name, tensor in vars(self).items()})
        return selected

    def are_done(self, length: int, max_length: int, config: GenerationConfig) -> torch.Tensor:
        """Return True for sources whose ended hypotheses can no longer be beaten, (sources,).

        Such a source has as many ended hypotheses as beams. `early_stopping` True stops there. False also compares them to the
        scores at the present length, and "never" to the scores at any length. Lengths leave the prompt out.
        """
        is_full = (self.ended_lengths > 0).all(dim=1)
        if config.early_stopping is True:
            return is_full
        if config.early_stopping == "never" and config.length_penalty > 0.0:
            length = max_length
        best_possible = self.scores[:, 0] / length**config.length_penalty
        return is_full & (best_possible <= self.ended_scores[:, -1])


def beam_search(
    project: Callable[[torch.Tensor], torch.Tensor],
    state: BeamState,
    prompt: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    selection: Selection | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the best hypotheses of each source. Arguments are those of `sample`, but the processors change log-probabilities.

    Returns:
        Ids (sources * num_return_sequences, length), best first and padded as transformers pads, and their scores.
    """
    selection = Selection(config) if selection is None else selection
    num_beams, prompt_length, max_length = config.num_beams, prompt.shape[1], config.max_length
    beams, done = Beams(prompt, num_beams), []
    for length in range(prompt_length, max_length):
        is_first, num_left = length == prompt_length, max_length - length - 1
        for token in prompt.unbind(1) if is_first else [beams.ids[:, :, -1].flatten()]:
            hidden_states = state.step(token)
        logits = project(hidden_states).float()
        if is_first:
            state.expand_beams(num_beams)
            logits = logits.repeat_interleave(num_beams, dim=0)
        # In place: a new tensor of this size costs more than the additions.
        log_probs = torch.log_softmax(logits, dim=-1, out=logits)
        log_probs = process(processors, beams.ids.flatten(0, 1), log_probs)
        scores, parents, tokens, is_end, chosen, beams.scores = selection.choose(
            log_probs.unflatten(0, (-1, num_beams)), beams, num_left
        )
        ids = torch.cat((beams.ids.take_along_dim(parents[:, :, None], dim=1), tokens[:, :, None]), dim=2)
        beams.ids = ids.take_along_dim(chosen[:, :, None], dim=1)
        num_tokens = length + 1 - prompt_length
        if bool(is_end.any()):
            # Store the candidates that have ended, and drop the worst ended hypotheses.
            scores = scores / num_tokens**config.length_penalty + (~is_end).float() * WORST
            ids = torch.cat(
                (nn.functional.pad(beams.ended_ids, (0, 1 + length - beams.ended_ids.shape[2])), ids), dim=1
            )
            lengths = torch.cat((beams.ended_lengths, is_end.long() * num_tokens), dim=1)
            beams.ended_scores, best = torch.cat((beams.ended_scores, scores), dim=1).topk(num_beams)
            beams.ended_ids = ids.take_along_dim(best[:, :, None], dim=1)
            beams.ended_lengths = lengths.take_along_dim(best, dim=1)
        parents = parents.take_along_dim(chosen, dim=1)
        is_done = beams.are_done(num_tokens, max_length - prompt_length, config) | (num_left == 0)
        if bool(is_done.any()):
            done.append(beams.select_sources(is_done.nonzero()[:, 0]))
            sources = (~is_done).nonzero()[:, 0]
            if not len(sources):
                break
            beams, parents = beams.select_sources(sources), parents.index_select(0, sources)
            selection.select_sources(sources)
            state.select_sources(sources)
        first = num_beams * torch.arange(len(parents), device=parents.device)[:, None]
        state.reorder((first + parents).flatten())
    # No step is left behind a prompt of the maximum length.
    return _collect(done or [beams], prompt_length, config)


def _collect(done: list[Beams], prompt_length: int, config: GenerationConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and scores of the ended hypotheses, in the order of the sources."""
    count, ends = config.num_return_sequences, config._eos_token_tensor
    # If the padding id is 0, transformers pads with the first end token.
    padding = -1 if ends is None else int(config._pad_token_tensor or ends[0])
    order = torch.cat([beams.indices for beams in done]).argsort()
    width = max(beams.ended_ids.shape[2] for beams in done)
    for beams in done:
        beams.ended_ids = nn.functional.pad(beams.ended_ids, (0, width - beams.ended_ids.shape[2]))
    columns = ([getattr(beams, f"ended_{name}") for beams in done] for name in ("ids", "scores", "lengths"))
    ids, scores, lengths = (torch.cat(parts).index_select(0, order) for parts in columns)
    scores, best = scores.sort(dim=1, descending=True, stable=True)
    scores, best = scores[:, :count].flatten(), best[:, :count]
    lengths = lengths.take_along_dim(best, dim=1).flatten()
    ids = ids.take_along_dim(best[:, :, None], dim=1).flatten(0, 1)[:, : prompt_length + int(lengths.max())]
    is_padding = torch.arange(ids.shape[1], device=ids.device) >= prompt_length + lengths[:, None]
    return ids.masked_fill(is_padding, padding), scores
