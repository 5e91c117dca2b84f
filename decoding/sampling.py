"""Greedy search and sampling. A source whose targets have ended leaves the batch."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.options import are_ends, only_lower, process
from metaphrase.decoding.shortlist import Shortlist


def sample(
    project: Callable[[torch.Tensor], torch.Tensor],
    state: DecoderState,
    prompt: torch.Tensor,
    copies: int,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    with_scores: bool = False,
    shorten: Callable[[torch.Tensor], Shortlist | None] | None = None,
    permitted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Extend targets by the most probable tokens, or by tokens drawn at random.

    Args:
        project: Returns logits from the decoder's output.
        state: State of the sources, before the prompt.
        prompt: First ids of each target, (sources, length).
        copies: Targets of each source.
        processors: Change logits, each row by itself.
        config: As `generate()` prepares it, with all special ids and limits.
        with_scores: True returns scores.
        shorten: Returns shortlists from the decoder's output. Only greedy search of one target without scores uses them.
        permitted: The token of each logit, (V,). None means all tokens of the vocabulary.

    Returns:
        Ids (sources * copies, length), padded behind their ends, and the sums of their log-probabilities, (sources * copies,):
        of samples under the model itself, of greedy search after the processors.
    """
    ends, prompt_length = config._eos_token_tensor, prompt.shape[1]
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    ids = prompt.repeat_interleave(copies, dim=0)
    # Targets that left the batch: their rows in the result, and their ids.
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    totals = torch.zeros(len(ids), device=ids.device) if with_scores else None
    # The row in the result of each row of the batch.
    rows = torch.arange(len(ids), device=ids.device)
    is_ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    # Scores and sampling need the logits of all tokens.
    if config.do_sample or with_scores or copies > 1 or not only_lower(processors):
        shorten = None
    unread: Sequence[torch.Tensor] = prompt.unbind(1)
    for length in range(prompt_length, config.max_length):
        for token in unread:
            hidden_states = state.step(token)
        shortlist = None if shorten is None else shorten(hidden_states)
        tokens = None if shortlist is None else _best_of(shortlist, processors, ids)
        if tokens is None:
            logits = project(hidden_states).float()
            if length == prompt_length:
                state.spread(copies)
                logits = logits.repeat_interleave(copies, dim=0)
            scores = process(processors, ids, logits)
            tokens = _draw(scores) if config.do_sample else scores.argmax(dim=-1)
            if totals is not None:
                # The distribution that samples are drawn from may be cut to a single token, with a score of 0.
                scored = logits if config.do_sample else scores
                log_probs = nn.functional.log_softmax(scored, dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]
                totals[rows] += log_probs.masked_fill(is_ended, 0.0)
            tokens = tokens if permitted is None else permitted[tokens]
        if ends is not None:
            # With one target per source, targets that have ended are no longer in the batch.
            if copies > 1:
                tokens = tokens.masked_fill(is_ended, padding)
            is_ended = is_ended | are_ends(tokens, ends)
        ids = torch.cat((ids, tokens[:, None]), dim=1)
        is_done = is_ended if copies == 1 else is_ended.view(-1, copies).all(dim=1)
        unread = (tokens,)
        is_last = length + 1 == config.max_length
        if is_last or True in is_done.tolist():
            is_leaving = is_done.repeat_interleave(copies) | is_last
            done.append((rows[is_leaving], ids[is_leaving]))
            if bool(is_leaving.all()):
                break
            ids, rows, is_ended = ids[~is_leaving], rows[~is_leaving], is_ended[~is_leaving]
            state.select_sources((~is_done).nonzero()[:, 0])
            unread = (ids[:, -1],)
    if not done:
        # The prompt has the maximum length.
        return ids, totals
    result = ids.new_full((sum(len(rows) for rows, _ in done), done[-1][1].shape[1]), padding)
    for rows, ended_ids in done:
        result[rows, : ended_ids.shape[1]] = ended_ids
    return result, totals


def _draw(scores: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row of logits (rows, V), shape (rows,). Raise ValueError on a CPU for a row without probabilities."""
    try:
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1)[:, 0]
    except RuntimeError as error:
        if bool(scores.isfinite().any(dim=-1).all()) and not bool(scores.isnan().any()):
            # The rows are not the reason, but for example too little memory.
            raise
        raise ValueError(
            "Each row of logits must have a finite entry and no NaN to draw a token, got a row without. Check the weights of "
            "the model, and whether the options suppress all tokens."
        ) from error


def _best_of(shortlist: Shortlist, processors: LogitsProcessorList, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the most probable tokens, (rows,), or None if a token outside the shortlist may be more probable.

    The processors only lower logits. `ids` of the rows so far have shape (rows, length).
    """
    if not processors:
        return shortlist.tokens[shortlist.logits.argmax(dim=-1)]
    scores = shortlist.logits.new_full((len(ids), shortlist.vocab_size), -torch.inf)
    scores[:, shortlist.tokens] = shortlist.logits
    highest, tokens = process(processors, ids, scores).max(dim=-1)
    return tokens if bool((highest >= shortlist.floor).all()) else None
