"""Diverse beam search: groups of beams, each penalized for the tokens that earlier groups have just chosen.

Source: Vijayakumar et al. 2018, Diverse Beam Search, section 4 and algorithm 1 (arXiv 1610.02424), with Hamming diversity.
"""

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.beam_search import Beams, Candidates, Selection, beam_search
from metaphrase.decoding.searches.any_model import search_inputs, search_output


def diverse_beam_search(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    num_beam_groups: int | None = None,
    diversity_penalty: float | None = None,
    **model_kwargs,
) -> torch.LongTensor | GenerateBeamEncoderDecoderOutput:
    """For `generate(custom_generate=diverse_beam_search, num_beams=..., num_beam_groups=..., diversity_penalty=...)`.

    Each group is a beam search of `num_beams / num_beam_groups` beams. At each step the groups choose in turn, and a token
    costs `diversity_penalty` for each beam of earlier groups that has just chosen it.

    Args:
        model: Any encoder-decoder.
        input_ids: From `generate()`, like the next three arguments and `model_kwargs`.
        logits_processor: Applied before the penalty.
        stopping_criteria: Length and end of sequence only.
        generation_config: Source of missing options.
        num_beam_groups: Divisor of `num_beams`; 1 is beam search.
        diversity_penalty: From 0 on, in nats; with 0 all groups are equal.
        **model_kwargs: Arguments of the network.

    Returns:
        The `num_return_sequences` best hypotheses of all groups, which may repeat, and with `return_dict_in_generate`
        their `sequences_scores`: sums of log-probabilities less the penalties, normalized by length.

    Raises:
        ValueError: If a number is out of range, or this search does not support an option.
    """
    groups = generation_config.num_beam_groups if num_beam_groups is None else num_beam_groups
    penalty = generation_config.diversity_penalty if diversity_penalty is None else diversity_penalty
    groups, penalty = 1 if groups is None else groups, 0.0 if penalty is None else penalty
    num_beams = generation_config.num_beams
    if groups < 1:
        raise ValueError(f"`num_beam_groups` must be at least 1, got {groups}.")
    if num_beams % groups:
        raise ValueError(f"`num_beams` must be a multiple of `num_beam_groups`, got {num_beams} and {groups}.")
    if not penalty >= 0.0:
        raise ValueError(f"`diversity_penalty` must not be negative, got {penalty}.")
    state, project, _, prompt = search_inputs(
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
    )
    selection = _DiverseSelection(generation_config, groups, penalty)
    ids, scores = beam_search(project, state, prompt, logits_processor, generation_config, selection)
    return search_output(ids, scores, generation_config)


class _DiverseSelection(Selection):
    """Selection of the best continuations of each group, penalized by earlier groups."""

    def __init__(self, config: GenerationConfig, groups: int, penalty: float):
        super().__init__(config)
        self.groups = groups
        self._penalty = penalty

    def choose(self, log_probs: torch.Tensor, beams: Beams, num_left: int) -> Candidates:
        # (sources * groups, ...) -> (sources, groups, ...)
        log_probs, scores, is_over = (
            tensor.unflatten(0, (-1, self.groups)) for tensor in (log_probs, beams.scores, beams.is_over)
        )
        # Number of beams of earlier groups that chose each token, shape (sources, V).
        counts = log_probs.new_zeros(len(log_probs), log_probs.shape[-1])
        chosen = []
        for group in range(self.groups):
            distinct = log_probs[:, group] - self._penalty * counts[:, None]
            chosen.append(self.choose_best(distinct, scores[:, group], num_left))
            tokens = chosen[-1].tokens.take_along_dim(chosen[-1].chosen, dim=1)
            # A finished group chooses nothing.
            counts.scatter_add_(1, tokens, (~is_over[:, group, None]).to(counts.dtype).expand_as(tokens))
        return Candidates(
            **{
                name: torch.stack([vars(candidates)[name] for candidates in chosen], dim=1).flatten(0, 1)
                for name in vars(chosen[0])
            }
        )
