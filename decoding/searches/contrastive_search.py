"""Contrastive search: a probable token whose hidden state is unlike those of the tokens before it.

Source: Su et al. 2022, A Contrastive Framework for Neural Text Generation, section 3.2 (arXiv 2202.06417).
"""

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.searches.any_model import SearchInputs, search_inputs, search_output
from metaphrase.decoding.supported_processors import process
from metaphrase.modeling.pipeline_support import longest_target


def contrastive_search(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    penalty_alpha: float | None = None,
    top_k: int | None = None,
    **model_kwargs,
) -> torch.LongTensor | GenerateBeamEncoderDecoderOutput:
    """For `generate(custom_generate=contrastive_search, penalty_alpha=..., top_k=...)`.

    Of the `top_k` most probable tokens that one is taken for which `(1 - penalty_alpha) * probability - penalty_alpha *
    similarity` is highest. Similarity is the highest cosine between the decoder's output for it and for any token before it,
    the prompt's included. A last token for which the decoder has no position, so that it cannot be read, is the most probable.

    Args:
        model: Any encoder-decoder.
        input_ids: From `generate()`, as are the next three.
        logits_processor: Change logits; what they rule out is no candidate.
        stopping_criteria: Those of length and end of sequence.
        generation_config: Gives what is not given here.
        penalty_alpha: From 0, which is greedy search, to 1.
        top_k: Candidates.
        **model_kwargs: From `generate()`.

    Returns:
        A target for each source, and with `return_dict_in_generate` its score in `sequences_scores`: the sum of the
        log-probabilities of its tokens, as the processors left them; similarity has no part in it.

    Raises:
        ValueError: If a number is out of its range, or something is asked for that this search cannot do.
    """
    alpha = generation_config.penalty_alpha if penalty_alpha is None else penalty_alpha
    top_k = generation_config.top_k if top_k is None else top_k
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if alpha is None or not 0.0 <= alpha <= 1.0:
        raise ValueError(f"`penalty_alpha` must be between 0 and 1, got {alpha}.")
    if top_k is None or not 1 <= top_k <= vocab_size:
        raise ValueError(f"`top_k` must be between 1 and the {vocab_size} entries of the vocabulary, got {top_k}.")
    for name in ("num_beams", "num_return_sequences"):
        if getattr(generation_config, name) != 1:
            raise ValueError(f"`{name}` must be 1 for contrastive search, got {getattr(generation_config, name)}.")
    inputs = search_inputs(
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, with_hidden_states=True
    )
    limit = longest_target(model)
    ids, scores = _search(inputs, logits_processor, generation_config, alpha, top_k, limit)
    return search_output(ids, scores, generation_config)


def _search(
    inputs: SearchInputs,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    alpha: float,
    top_k: int,
    limit: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `(sources, length)`, padded behind their ends, and scores `(sources)`; the decoder reads `limit` tokens at most."""
    project, state, ids = inputs.project, inputs.state, inputs.prompt
    ends, device = config._eos_token_tensor, ids.device
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    result = torch.full((len(ids), config.max_length), padding, device=device)
    totals = torch.zeros(len(ids), device=device)
    # Where in the result the rows of the batch belong.
    rows = torch.arange(len(ids), device=device)
    steps = [state.step(token) for token in ids.unbind(1)]
    # Of all tokens so far, of length 1 each. (sources, tokens, hidden)
    past = torch.stack([_directions(inputs.hidden_of(step)) for step in steps], dim=1)
    logits = project(steps[-1]).float()
    state.spread(top_k)
    for length in range(ids.shape[1], config.max_length):
        scores = process(processors, ids, logits)
        log_probs = nn.functional.log_softmax(scores, dim=-1)
        candidate_log_probs, candidates = log_probs.topk(top_k)
        values = candidate_log_probs
        # What cannot be read may still be an end.
        if length != limit:
            step = state.step(candidates.flatten())
            # (sources * top_k, hidden) -> (sources, top_k, hidden)
            present = _directions(inputs.hidden_of(step)).unflatten(0, (-1, top_k))
            # (sources, top_k, tokens) -> (sources, top_k)
            similarity = torch.bmm(present, past.transpose(1, 2)).amax(dim=-1)
            values = (1.0 - alpha) * candidate_log_probs.exp() - alpha * similarity
        # Fewer than `top_k` tokens may be left by the processors.
        chosen = values.masked_fill(candidate_log_probs == -torch.inf, -torch.inf).argmax(dim=1, keepdim=True)
        tokens = candidates.take_along_dim(chosen, dim=1)
        totals[rows] += candidate_log_probs.take_along_dim(chosen, dim=1)[:, 0]
        ids = torch.cat((ids, tokens), dim=1)
        is_left = torch.ones_like(rows, dtype=torch.bool) if ends is None else ~torch.isin(tokens[:, 0], ends)
        is_last = length + 1 == config.max_length or not bool(is_left.any())
        if is_last or not bool(is_left.all()):
            result[rows, : length + 1] = ids
        if is_last:
            return result[:, : length + 1], totals
        if length == limit:
            # It says what a decoder without a position says.
            state.step(candidates.flatten())
        # Row of each source that goes on. (sources)
        winners = top_k * torch.arange(len(ids), device=device) + chosen[:, 0]
        logits = project(step, winners[is_left]).float()
        state.reorder(winners.repeat_interleave(top_k))
        past = torch.cat((past, present.take_along_dim(chosen[:, :, None], dim=1)), dim=1)
        if not bool(is_left.all()):
            ids, rows, past = ids[is_left], rows[is_left], past[is_left]
            state.select_sources(is_left.nonzero()[:, 0])
    return result, totals


def _directions(hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.normalize(hidden_states.float(), dim=-1)
