"""Contrastive search: probable tokens whose hidden states differ from those of earlier tokens.

Source: Su et al. 2022, A Contrastive Framework for Neural Text Generation, section 3.2 (arXiv 2202.06417).
"""

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.searches.any_model import search_inputs, search_output
from metaphrase.decoding.supported_processors import are_ends, process
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

    Each step takes that of the `top_k` most probable tokens with the highest `(1 - penalty_alpha) * probability -
    penalty_alpha * similarity`. Similarity is the highest cosine between the decoder's outputs for the token and for any
    earlier token, prompt included. A last token without a position in the decoder is chosen by probability alone.

    Args:
        model: Any encoder-decoder.
        input_ids: From `generate()`, like the next three arguments and `model_kwargs`.
        logits_processor: Applied first: a forbidden token is no candidate.
        stopping_criteria: Length and end of sequence only.
        generation_config: Source of missing options.
        penalty_alpha: From 0, which is greedy search, to 1.
        top_k: Number of candidates.
        **model_kwargs: Arguments of the network.

    Returns:
        A target for each source, and with `return_dict_in_generate` its `sequences_scores`: the sum of processed
        log-probabilities, without similarity.

    Raises:
        ValueError: If a number is out of range, or this search does not support an option.
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
    config, limit = generation_config, longest_target(model)
    state, project, hidden_of, ids = search_inputs(
        model, input_ids, logits_processor, stopping_criteria, config, model_kwargs, with_hidden_states=True
    )
    ends, device = config._eos_token_tensor, ids.device
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    result = torch.full((len(ids), config.max_length), padding, device=device)
    totals = torch.zeros(len(ids), device=device)
    # Index in the result of each row of the batch.
    rows = torch.arange(len(ids), device=device)
    steps = [state.step(token) for token in ids.unbind(1)]
    # Unit vectors of all tokens so far, shape (sources, tokens, H).
    past = torch.stack([_directions(hidden_of(step)) for step in steps], dim=1)
    logits = project(steps[-1]).float()
    state.spread(top_k)
    for length in range(ids.shape[1], config.max_length):
        scores = process(logits_processor, ids, logits)
        log_probs = nn.functional.log_softmax(scores, dim=-1)
        candidate_log_probs, candidates = log_probs.topk(top_k)
        values = candidate_log_probs
        # A token without a position may still be an end.
        if length != limit:
            step = state.step(candidates.flatten())
            # (sources * top_k, hidden) -> (sources, top_k, hidden)
            present = _directions(hidden_of(step)).unflatten(0, (-1, top_k))
            # (sources, top_k, tokens) -> (sources, top_k)
            similarity = torch.bmm(present, past.transpose(1, 2)).amax(dim=-1)
            values = (1.0 - alpha) * candidate_log_probs.exp() - alpha * similarity
        # The processors may leave fewer than `top_k` tokens.
        chosen = values.masked_fill(candidate_log_probs == -torch.inf, -torch.inf).argmax(dim=1, keepdim=True)
        tokens = candidates.take_along_dim(chosen, dim=1)
        totals[rows] += candidate_log_probs.take_along_dim(chosen, dim=1)[:, 0]
        ids = torch.cat((ids, tokens), dim=1)
        is_left = ~are_ends(tokens[:, 0], ends)
        has_ended = not bool(is_left.all())
        if has_ended or length + 1 == config.max_length:
            result[rows, : length + 1] = ids
        if length + 1 == config.max_length or not bool(is_left.any()):
            result = result[:, : length + 1]
            break
        if length == limit:
            # Raises the decoder's own error for a missing position.
            state.step(candidates.flatten())
        winners = top_k * torch.arange(len(ids), device=device) + chosen[:, 0]
        logits = project(step, winners[is_left]).float()
        state.reorder(winners.repeat_interleave(top_k))
        past = torch.cat((past, present.take_along_dim(chosen[:, :, None], dim=1)), dim=1)
        if has_ended:
            ids, rows, past = ids[is_left], rows[is_left], past[is_left]
            state.select_sources(is_left.nonzero()[:, 0])
    return search_output(result, totals, config)


def _directions(hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.normalize(hidden_states.float(), dim=-1)
