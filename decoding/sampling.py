"""Greedy search and sampling: one target goes on by itself, and leaves the batch with its source when it has ended."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.shortlist import Shortlist
from metaphrase.decoding.supported_processors import are_ends, only_lower, process


def sample(
    project: Callable[[torch.Tensor], torch.Tensor],
    state: DecoderState,
    prompt: torch.Tensor,
    copies: int,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    with_scores: bool = False,
    shorten: Callable[[torch.Tensor], Shortlist | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Goes on with the most probable token, or with one drawn at random.

    Args:
        project: From the decoder's output to logits.
        state: Of the sources, before the prompt.
        prompt: What each target begins with, `(sources, length)`.
        copies: Targets of each source.
        processors: Change logits, each row by itself.
        config: With all special ids and limits set, as `generate()` prepares it.
        with_scores: Whether scores are wanted.
        shorten: From the decoder's output to the tokens that may be the most probable ones, for greedy search without scores.

    Returns:
        Ids `(sources * copies, length)`, padded behind their ends, and the sum of the log-probabilities of each,
        `(sources * copies)`, as the processors left them.
    """
    ends, prompt_length = config._eos_token_tensor, prompt.shape[1]
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    ids = prompt.repeat_interleave(copies, dim=0)
    # What has ended: rows of the result, and their ids.
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    totals = torch.zeros(len(ids), device=ids.device) if with_scores else None
    # Where in the result the rows of the batch belong.
    rows = torch.arange(len(ids), device=ids.device)
    is_ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    if not only_lower(processors) or copies > 1:
        shorten = None
    unread: Sequence[torch.Tensor] = prompt.unbind(1)
    for length in range(prompt_length, config.max_length):
        for token in unread:
            hidden_states = state.step(token)
        shortlist = None if shorten is None else shorten(hidden_states)
        tokens = None if shortlist is None else _best_of(shortlist, processors, ids)
        if tokens is None:
            scores = project(hidden_states).float()
            if length == prompt_length:
                state.spread(copies)
                scores = scores.repeat_interleave(copies, dim=0)
            scores = process(processors, ids, scores)
            tokens = draw(scores) if config.do_sample else scores.argmax(dim=-1)
        if totals is not None:
            log_probs = nn.functional.log_softmax(scores, dim=-1).take_along_dim(tokens[:, None], dim=1)[:, 0]
            totals[rows] += log_probs.masked_fill(is_ended, 0.0)
        if ends is not None and copies == 1:
            # Those that have ended are not there any more.
            is_ended = are_ends(tokens, ends)
        elif ends is not None:
            tokens = tokens.masked_fill(is_ended, padding)
            is_ended = is_ended | are_ends(tokens, ends)
        ids = torch.cat((ids, tokens[:, None]), dim=1)
        # A source leaves with the last of its targets.
        is_left = is_ended if copies == 1 else is_ended.view(-1, copies).all(dim=1)
        unread = (tokens,)
        if True in is_left.tolist() or length + 1 == config.max_length:
            is_leaving = is_left.repeat_interleave(copies) | (length + 1 == config.max_length)
            done.append((rows[is_leaving], ids[is_leaving]))
            if bool(is_leaving.all()):
                break
            sources = (~is_left).nonzero()[:, 0]
            ids, rows, is_ended = ids[~is_leaving], rows[~is_leaving], is_ended[~is_leaving]
            state.keep(sources)
            unread = (ids[:, -1],)
    if not done:
        # The prompt is as long as anything may be.
        return ids, totals
    result = ids.new_full((sum(len(part) for part, _ in done), done[-1][1].shape[1]), padding)
    for part, ended in done:
        result[part, : ended.shape[1]] = ended
    return result, totals


def draw(scores: torch.Tensor) -> torch.Tensor:
    """One token of each row of logits `(rows, vocab)`, `(rows)`.

    Raises:
        ValueError: On a CPU, if a row leaves no token a probability.
    """
    try:
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1)[:, 0]
    except RuntimeError as error:
        if bool(scores.isfinite().any(dim=-1).all()) and not bool(scores.isnan().any()):
            raise
        raise ValueError(
            "Logits must be numbers, of which some are above -inf, for a token to be drawn: those of this model are not, "
            "or every token is ruled out."
        ) from error


def _best_of(shortlist: Shortlist, processors: LogitsProcessorList, ids: torch.Tensor) -> torch.Tensor | None:
    """The most probable token of each row, `(rows)`; `None` if it may be one that is not on the list.

    Args:
        shortlist: Of the rows.
        processors: Lower logits, if they do anything.
        ids: What the rows are so far, `(rows, length)`.
    """
    if not processors:
        return shortlist.tokens[shortlist.logits.argmax(dim=-1)]
    scores = shortlist.logits.new_full((len(ids), shortlist.vocab_size), -torch.inf)
    scores[:, shortlist.tokens] = shortlist.logits
    highest, tokens = process(processors, ids, scores).max(dim=-1)
    return tokens if bool((highest >= shortlist.floor).all()) else None
