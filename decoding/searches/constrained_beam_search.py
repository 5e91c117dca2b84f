"""Constrained beam search: targets that contain given phrases.

Source: Hokamp and Liu 2017, Lexically Constrained Decoding for Sequence Generation Using Grid Beam Search (arXiv 1704.07138):
hypotheses compete only with those that have met as many tokens of the phrases. Post and Vilar 2018, Fast Lexically Constrained
Decoding with Dynamic Beam Allocation, section 3 (arXiv 1804.06609): they share one beam of fixed width.
"""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.beam_search import WORST, Beams, Candidates, Selection, beam_search
from metaphrase.decoding.searches.any_model import search_inputs, search_output
from metaphrase.decoding.searches.phrase_automaton import PhraseAutomaton
from metaphrase.decoding.searches.phrase_constraints import (
    check_constraints,
    ids_without_text,
    num_places,
    read_constraints,
)
from metaphrase.decoding.supported_processors import are_ends


def constrained_beam_search(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    force_words_ids: list | None = None,
    first_words_ids: list | None = None,
    special_ids: Sequence[int] = (),
    **model_kwargs,
) -> torch.LongTensor | GenerateBeamEncoderDecoderOutput:
    """For `generate(custom_generate=constrained_beam_search, num_beams=..., force_words_ids=...)`.

    Phrases may overlap in the target, and one that occurs by itself, or in what the target is given to begin with, counts. What
    must not occur is `bad_words_ids`.

    Args:
        model: Any encoder-decoder.
        input_ids: From `generate()`, as are the next three.
        logits_processor: Change log-probabilities; what they rule out is not forced.
        stopping_criteria: Those of length and end of sequence.
        generation_config: Gives what is not given here.
        force_words_ids: For each constraint the ids of a phrase, or several such lists, of which one must occur.
        first_words_ids: For each constraint further lists of ids, which meet it only where the target begins with them.
        special_ids: Tokens that are no text, such as the codes of languages, behind which alone a target still begins; the start,
            the end, padding and a forced first token are none either way.
        **model_kwargs: From `generate()`.

    Returns:
        The `num_return_sequences` best hypotheses that meet all constraints, and with `return_dict_in_generate` their
        `sequences_scores`: sums of log-probabilities, those of the phrases included, normalized by length, as for beam search.

    Raises:
        ValueError: If constraints are malformed, contradict each other or do not fit, if other settings leave a source without
            such a target, or if something is asked for that this search cannot do.
    """
    if force_words_ids is None:
        force_words_ids = generation_config.force_words_ids
    constraints = read_constraints(force_words_ids, first_words_ids)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    check_constraints(constraints, vocab_size, generation_config)
    special_ids = ids_without_text(special_ids, generation_config)
    automaton = PhraseAutomaton(constraints, vocab_size, input_ids.device, special_ids)
    inputs = search_inputs(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    selection = ConstrainedSelection(generation_config, automaton, inputs.prompt)
    num_tokens, room = selection.num_missing, num_places(input_ids.shape[1], generation_config)
    if num_tokens > room:
        raise ValueError(
            f"`max_new_tokens` must leave room for the phrases of `force_words_ids`, got {num_tokens} tokens for {room} places."
        )
    ids, scores = beam_search(
        inputs.project, inputs.state, inputs.prompt, logits_processor, generation_config, selection
    )
    is_lacking = (scores <= WORST / 2).view(len(inputs.prompt), -1).any(dim=1)
    if bool(is_lacking.any()):
        raise ValueError(
            "`force_words_ids` must leave each source as many targets as `num_return_sequences`, got fewer for "
            f"{int(is_lacking.sum())} of {len(is_lacking)} sources: other settings, such as `bad_words_ids`, rule them out, or "
            f"`num_beams` ({generation_config.num_beams}) is too small."
        )
    return search_output(ids, scores, generation_config)


class ConstrainedSelection(Selection):
    """The best continuations among those that have met as many tokens of the phrases: each number of them is a bank.

    A hypothesis may end when all constraints are met, and is given up when they do not fit any more.

    Attributes:
        num_missing: With how many tokens all targets can meet all constraints.
    """

    def __init__(self, config: GenerationConfig, automaton: PhraseAutomaton, prompt: torch.Tensor):
        """Reads the prompts, `(sources, length)`, behind their start token."""
        super().__init__(config)
        self._automaton = automaton
        # The last place is taken.
        self._num_reserved = int(config.forced_eos_token_id is not None)
        # Of the hypotheses, which are the same at first: (sources, beams) and (sources, beams, constraints)
        self._states = torch.full_like(prompt[:, :1], automaton.start).expand(-1, config.num_beams)
        self._is_met = self._states.new_zeros((*self._states.shape, automaton.num_constraints), dtype=torch.bool)
        for tokens in prompt.unbind(1)[1:]:
            self._states, self._is_met = automaton.read(self._states, self._is_met, tokens[:, None])
        # Where nothing is read yet, the first token may be one that is forced and begins nothing.
        behind = self._states if prompt.shape[1] > 1 else torch.zeros_like(self._states)
        self.num_missing = int(automaton.num_missing(behind, self._is_met).max())

    def select_sources(self, sources: torch.Tensor) -> None:
        self._states, self._is_met = self._states[sources], self._is_met[sources]

    def choose(self, log_probs: torch.Tensor, beams: Beams, num_left: int) -> Candidates:
        num_beams, vocab_size = log_probs.shape[1:]
        log_probs = self._ruled_out(log_probs, max(num_left - self._num_reserved, 0))
        scores, places = self._pool(log_probs + beams.scores[:, :, None])
        parents, tokens = places // vocab_size, places % vocab_size
        states, is_met = self._automaton.read(
            self._states.take_along_dim(parents, dim=1), self._is_met.take_along_dim(parents[..., None], dim=1), tokens
        )
        # (sources, candidates)
        progress = self._automaton.progress(states, is_met)
        is_possible = scores > WORST / 2
        is_end = are_ends(tokens, self.ends) | (num_left == 0)
        # A hypothesis ends among those that get a place in the beam, not among those that are there to go on with.
        ending = self._allocate(progress, is_possible)[:, :num_beams]
        has_place = torch.zeros_like(is_end).scatter_(1, ending, True)
        chosen = self._allocate(progress, is_possible & ~is_end)[:, :num_beams]
        chosen_scores = scores.masked_fill(is_end | ~is_possible, WORST).take_along_dim(chosen, dim=1)
        chosen_scores, best = chosen_scores.sort(dim=1, descending=True, stable=True)
        chosen = chosen.take_along_dim(best, dim=1)
        self._states = states.take_along_dim(chosen, dim=1)
        self._is_met = is_met.take_along_dim(chosen[..., None], dim=1)
        return Candidates(scores, parents, tokens, is_end & has_place & is_possible, chosen, chosen_scores)

    def _ruled_out(self, log_probs: torch.Tensor, num_left: int) -> torch.Tensor:
        """Log-probabilities without ends that come too early, and without tokens behind which the phrases do not fit."""
        log_probs = log_probs.clone()
        if self.ends is not None:
            # An end that is no token, such as -1, stands for none.
            ends = self.ends[(self.ends >= 0) & (self.ends < log_probs.shape[-1])]
            is_early = ~self._is_met.all(dim=-1, keepdim=True)
            log_probs[:, :, ends] = log_probs[:, :, ends].masked_fill(is_early, -torch.inf)
        if num_left >= self._automaton.num_tokens:
            return log_probs
        alphabet = self._automaton.alphabet
        fits = self._automaton.num_missing(*self._behind_alphabet()) <= num_left
        kept = log_probs[:, :, alphabet].masked_fill(~fits, -torch.inf)
        # Behind any other token nothing of a phrase is begun: that is the root's state, 0.
        fits = self._automaton.num_missing(torch.zeros_like(self._states), self._is_met) <= num_left
        log_probs = log_probs.masked_fill(~fits[:, :, None], -torch.inf)
        log_probs[:, :, alphabet] = kept
        return log_probs

    def _pool(self, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates, best first: the best of all, those that come nearer to a phrase, and the best of each hypothesis.

        Args:
            totals: Sums of log-probabilities, `(sources, beams, vocab)`.

        Returns:
            Scores and places in `(beams * vocab)`, both `(sources, candidates)`; one that stands twice is possible once.
        """
        num_beams, vocab_size = totals.shape[1:]
        first = vocab_size * torch.arange(num_beams, device=totals.device)[:, None]
        num_best = max(2, 1 + (0 if self.ends is None else len(self.ends))) * num_beams
        scores, places = totals.flatten(1).topk(min(num_best, num_beams * vocab_size))
        progress = self._automaton.progress(self._states, self._is_met)
        comes_nearer = self._automaton.progress(*self._behind_alphabet()) > progress[:, :, None]
        forced = totals[:, :, self._automaton.alphabet].masked_fill(~comes_nearer, -torch.inf)
        own_scores, own = totals.max(dim=-1, keepdim=True)
        scores = torch.cat((scores, forced.flatten(1), own_scores.flatten(1)), dim=1)
        forced_places = (first + self._automaton.alphabet).flatten().expand(len(totals), -1)
        places = torch.cat((places, forced_places, (first + own).flatten(1)), dim=1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        places = places.take_along_dim(order, dim=1)
        # Sorted again, by place, twins stand side by side, the more probable one first.
        sorted_places, by_place = places.sort(dim=1, stable=True)
        is_twin = torch.zeros_like(sorted_places, dtype=torch.bool)
        is_twin[:, 1:] = sorted_places[:, 1:] == sorted_places[:, :-1]
        return scores.masked_fill(torch.zeros_like(is_twin).scatter_(1, by_place, is_twin), -torch.inf), places

    def _behind_alphabet(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where hypotheses would be behind each token of the phrases, and what they would meet, `(sources, beams, alphabet)`."""
        return self._automaton.read(self._states[..., None], self._is_met[:, :, None], self._automaton.alphabet)

    def _allocate(self, progress: torch.Tensor, is_eligible: torch.Tensor) -> torch.Tensor:
        """Candidates in the order in which they get places: the best of each bank, the second best of each, and so on.

        So banks have equal shares, and what one leaves empty goes to the others; of the last round the banks with more
        tokens of the phrases come first.

        Args:
            progress: Bank of each candidate, best first, `(sources, candidates)`.
            is_eligible: Which may get a place; others come last.

        Returns:
            Places, `(sources, candidates)`.
        """
        num_banks = self._automaton.most_progress + 1
        banks = torch.arange(num_banks, device=progress.device)
        is_in_bank = (progress[:, :, None] == banks) & is_eligible[:, :, None]
        rank = is_in_bank.cumsum(dim=1).take_along_dim(progress[:, :, None], dim=2)[:, :, 0]
        order = rank * num_banks + (num_banks - 1 - progress)
        return order.masked_fill(~is_eligible, torch.iinfo(order.dtype).max).argsort(dim=1, stable=True)
