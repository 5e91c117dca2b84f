"""Beam search over the sources that are not done yet: those that are leave the batch.

Which hypotheses are found is defined by transformers' own `_beam_search`, and tested against it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from metaphrase.decoding.beam_state import BeamState
from metaphrase.decoding.supported_processors import are_ends, process

# Stands for minus infinity, and is added to what must not be chosen; transformers' number, since ties depend on it.
WORST = -1e9


@dataclass
class Candidates:
    """Hypotheses with one token more, of which some end and some go on.

    Attributes:
        scores: Sums of their log-probabilities, `(sources, candidates)`.
        parents: Which hypotheses they continue, `(sources, candidates)`.
        tokens: By which tokens, `(sources, candidates)`.
        is_end: Which have come to an end and are good enough to be kept, `(sources, candidates)`.
        chosen: Places of those that go on, `(sources, beams)`.
        chosen_scores: What these go on with, best first, `(sources, beams)`.
    """

    scores: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor
    is_end: torch.Tensor
    chosen: torch.Tensor
    chosen_scores: torch.Tensor


class Selection:
    """Chooses among all continuations of the hypotheses: the best of each source.

    Attributes:
        groups: Searches of each source, which stand side by side; each has its share of the beams.
    """

    groups = 1

    def __init__(self, config: GenerationConfig):
        self.ends = config._eos_token_tensor

    def choose(self, log_probs: torch.Tensor, beams: "Beams", num_left: int) -> Candidates:
        """The candidates of one step.

        Args:
            log_probs: Of all tokens, `(sources, beams, vocab)`.
            beams: What they continue.
            num_left: Tokens that may stand behind these.
        """
        return self.choose_best(log_probs, beams.scores, num_left)

    def choose_best(self, log_probs: torch.Tensor, scores: torch.Tensor, num_left: int) -> Candidates:
        """The candidates with the highest sums; `scores` are those of what they continue, `(sources, beams)`."""
        num_beams, vocab_size = log_probs.shape[1:]
        # So many that, whichever of them are ends, there are enough to go on.
        num_candidates = max(2, 1 + (0 if self.ends is None else len(self.ends))) * num_beams
        # (sources, beams, vocab) -> (sources, candidates), best first
        scores, places = (log_probs + scores[:, :, None]).flatten(1).topk(num_candidates)
        parents, tokens = places // vocab_size, places % vocab_size
        is_end = are_ends(tokens, self.ends)
        chosen_scores, chosen = (scores + is_end.float() * WORST).topk(num_beams)
        # Where nothing may follow all come to an end.
        is_end |= num_left == 0
        # A hypothesis ends among the best, not among those that are there to go on with.
        is_end[:, num_beams:] = False
        return Candidates(scores, parents, tokens, is_end, chosen, chosen_scores)

    def keep(self, places: torch.Tensor) -> None:
        """Goes on with the sources at these places alone, `(sources)`."""


class Beams:
    """Hypotheses of the sources that are not done. Where a source has several searches, each counts as a source here.

    Attributes:
        indices: Which sources these are, `(sources)`.
        is_over: Which are done and only wait for the other searches of their source, `(sources)`.
        ids: What the hypotheses that go on consist of, `(sources, beams, length)`.
        scores: Sums of their log-probabilities, best first, `(sources, beams)`.
        ended_ids: The best hypotheses that have come to an end, `(sources, beams, length)`; a shorter one is filled up.
        ended_scores: Their scores, normalized by length, best first, `(sources, beams)`.
        ended_lengths: Their tokens, the prompt not counted, or 0 where there is none yet, `(sources, beams)`.
    """

    def __init__(self, prompt: torch.Tensor, beams: int):
        sources = len(prompt)
        self.indices = torch.arange(sources, device=prompt.device)
        self.is_over = torch.zeros_like(self.indices, dtype=torch.bool)
        self.ids = prompt[:, None].expand(-1, beams, -1)
        self.scores = torch.zeros(sources, beams, device=prompt.device)
        # All are the same at first: so only the first one goes on.
        self.scores[:, 1:] = WORST
        # Where none comes to an end, the prompt is what there is.
        self.ended_ids = self.ids.clone()
        self.ended_scores = torch.full_like(self.scores, WORST)
        self.ended_lengths = torch.zeros_like(self.scores, dtype=torch.long)

    def keep(self, places: torch.Tensor) -> "Beams":
        """Those of the sources at these places, `(sources)`."""
        kept = copy.copy(self)
        vars(kept).update({name: tensor.index_select(0, places) for name, tensor in vars(self).items()})
        return kept

    def end(
        self, ids: torch.Tensor, scores: torch.Tensor, is_end: torch.Tensor, length: int, config: GenerationConfig
    ) -> None:
        """Puts those of the candidates that have come to an end among the ended, of which the best stay.

        Args:
            ids: Of the candidates, `(sources, candidates, prompt + length)`.
            scores: Sums of their log-probabilities, `(sources, candidates)`.
            is_end: Which have come to an end, `(sources, candidates)`.
            length: Their tokens, the prompt not counted.
            config: Gives the length penalty.
        """
        scores = scores / length**config.length_penalty + (~is_end).float() * WORST
        ids = torch.cat((_widened(self.ended_ids, ids.shape[2]), ids), dim=1)
        lengths = torch.cat((self.ended_lengths, is_end.long() * length), dim=1)
        self.ended_scores, chosen = torch.cat((self.ended_scores, scores), dim=1).topk(self.scores.shape[1])
        self.ended_ids = ids.take_along_dim(chosen[:, :, None], dim=1)
        self.ended_lengths = lengths.take_along_dim(chosen, dim=1)

    def are_done(self, length: int, max_length: int, config: GenerationConfig) -> torch.Tensor:
        """Which sources have as many ended hypotheses as beams, and none that goes on can be better than all of them.

        Args:
            length: Tokens of what goes on, the prompt not counted.
            max_length: Most of them.
            config: Its `early_stopping` says when none can be better any more: True, at once; False, if none would be at its
                present length; `never`, if none would be at any length.

        Returns:
            `(sources)`.
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
    """Finds the best hypotheses of each source.

    Args:
        project: From the decoder's output to logits.
        state: Of the sources, before the prompt.
        prompt: What each target begins with, `(sources, length)`.
        processors: Change log-probabilities, each row by itself.
        config: With all special ids and limits set, as `generate()` prepares it.
        selection: Chooses what goes on; by default the best.

    Returns:
        Ids `(sources * num_return_sequences, length)`, best first, filled up as transformers does it, and their scores.
    """
    selection = Selection(config) if selection is None else selection
    num_beams, prompt_length, max_length = config.num_beams, prompt.shape[1], config.max_length
    groups, width = selection.groups, num_beams // selection.groups
    beams, done = Beams(prompt.repeat_interleave(groups, dim=0), width), []
    for length in range(prompt_length, max_length):
        is_first, num_left = length == prompt_length, max_length - length - 1
        for token in prompt.unbind(1) if is_first else [beams.ids[:, :, -1].flatten()]:
            hidden_states = state.step(token)
        logits = project(hidden_states).float()
        if is_first:
            state.spread(num_beams)
            logits = logits.repeat_interleave(num_beams, dim=0)
        log_probs = nn.functional.log_softmax(logits, dim=-1)
        log_probs = process(processors, beams.ids.flatten(0, 1), log_probs)
        candidates = selection.choose(log_probs.unflatten(0, (-1, width)), beams, num_left)
        parents, tokens, chosen = candidates.parents, candidates.tokens, candidates.chosen
        ids = torch.cat((beams.ids.take_along_dim(parents[:, :, None], dim=1), tokens[:, :, None]), dim=2)
        beams.scores = candidates.chosen_scores
        beams.ids = ids.take_along_dim(chosen[:, :, None], dim=1)
        if bool(candidates.is_end.any()):
            beams.end(ids, candidates.scores, candidates.is_end, length + 1 - prompt_length, config)
        if num_left == 0:
            break
        parents = parents.take_along_dim(chosen, dim=1)
        is_done = beams.are_done(length + 1 - prompt_length, max_length - prompt_length, config) & ~beams.is_over
        if bool(is_done.any()):
            done.append(beams.keep(is_done.nonzero()[:, 0]))
            beams.is_over = beams.is_over | is_done
            is_left = ~beams.is_over.view(-1, groups).all(dim=1)
            if not bool(is_left.any()):
                return _collect(done, prompt_length, config, groups)
            if not bool(is_left.all()):
                left = is_left.repeat_interleave(groups).nonzero()[:, 0]
                beams, parents = beams.keep(left), parents.index_select(0, left)
                selection.keep(left)
                state.keep(is_left.nonzero()[:, 0])
        first = width * torch.arange(len(parents), device=parents.device)[:, None]
        state.reorder((first + parents).flatten())
    return _collect([*done, beams.keep((~beams.is_over).nonzero()[:, 0])], prompt_length, config, groups)


def _collect(
    done: list[Beams], prompt_length: int, config: GenerationConfig, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ended hypotheses of all sources in their order."""
    count, ends = config.num_return_sequences, config._eos_token_tensor
    # Where the padding's id is 0, transformers fills up with the first end.
    fill = -1 if ends is None else int(config._pad_token_tensor or ends[0])
    lengths = torch.cat([beams.ended_lengths[:, :count] for beams in done])
    width = prompt_length + int(lengths.max())
    ids = torch.cat([_widened(beams.ended_ids[:, :count], width) for beams in done])
    scores = torch.cat([beams.ended_scores[:, :count] for beams in done])
    order = torch.cat([beams.indices for beams in done]).argsort()
    # (sources * groups, ...) -> (sources, hypotheses of all groups, ...)
    ids, scores, lengths = (
        tensor.index_select(0, order).unflatten(0, (-1, groups)).flatten(1, 2) for tensor in (ids, scores, lengths)
    )
    if groups > 1:
        scores, best = scores.sort(dim=1, descending=True, stable=True)
        scores, best = scores[:, :count], best[:, :count]
        ids, lengths = ids.take_along_dim(best[:, :, None], dim=1), lengths.take_along_dim(best, dim=1)
        width = prompt_length + int(lengths.max())
        ids = ids[:, :, :width]
    ids, scores, lengths = (tensor.flatten(0, 1) for tensor in (ids, scores, lengths))
    is_filling = torch.arange(width, device=ids.device) >= prompt_length + lengths[:, None]
    return ids.masked_fill(is_filling, fill), scores


def _widened(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Cut off, or filled up with whatever, to so many columns."""
    return nn.functional.pad(ids, (0, width - ids.shape[-1]))
