"""Tests of diverse beam search: groups of beams, each penalized for the tokens of earlier groups."""

import pytest
import torch
from small_searches import (
    ENDS,
    MODELS,
    MODELS_OF_EXPERTS,
    OURS,
    log_probabilities,
    one_of,
    search_model,
    search_sources,
)

from metaphrase.inference import diverse_beam_search

OPTIONS = {"num_beams": 6, "max_new_tokens": 8, "eos_token_id": ENDS, "return_dict_in_generate": True}


def diverse(model, inputs, groups, penalty, **options):
    search = {"custom_generate": diverse_beam_search, "num_beam_groups": groups, "diversity_penalty": penalty}
    return model.generate(**inputs, **OPTIONS | options, **search)


def plainly(model, source, groups, penalty, options, start):
    """Algorithm 1 of the paper, one hypothesis at a time, with whole passes; the ends as beam search keeps them."""
    width, count = options["num_beams"] // groups, options["max_new_tokens"]
    length_penalty, stops = options.get("length_penalty", 1.0), options.get("early_stopping", False)
    going = [[((start,), 0.0)] for _ in range(groups)]
    ended, is_over = [[] for _ in range(groups)], [False] * groups
    for length in range(1, count + 1):
        taken = []
        for group in range(groups):
            if is_over[group]:
                continue
            candidates = []
            targets = torch.tensor([list(ids) for ids, _ in going[group]])
            for (ids, score), row in zip(going[group], log_probabilities(model, source, targets), strict=True):
                for token, log_prob in enumerate(row.tolist()):
                    candidates.append((score + log_prob - penalty * taken.count(token), (*ids, token)))
            candidates.sort(reverse=True)
            for score, ids in candidates[:width]:
                if ids[-1] in ENDS or length == count:
                    ended[group].append((score / length**length_penalty, ids))
            ended[group] = sorted(ended[group], reverse=True)[:width]
            going[group] = [(ids, score) for score, ids in candidates if ids[-1] not in ENDS][:width]
            taken += [ids[-1] for ids, _ in going[group]]
            best = going[group][0][1] / length**length_penalty
            is_over[group] = len(ended[group]) == width and (stops or best <= ended[group][-1][0])
        if all(is_over):
            break
    return sorted((hypothesis for group in ended for hypothesis in group), reverse=True)


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 6, "length_penalty": 0.3}, {"early_stopping": True}])
@pytest.mark.parametrize("name", [*MODELS, *MODELS_OF_EXPERTS])
def test_one_group_is_beam_search(name, options, states):
    model = search_model(name)
    inputs = search_sources(model)
    found = diverse(model, inputs, 1, 3.0, **options)
    expected = model.generate(**inputs, **OPTIONS | options, output_scores=True)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)
    assert states == ["BeamState" if name in OURS else "CachedState"]


@pytest.mark.parametrize(
    ("groups", "penalty", "options"),
    [
        (2, 0.5, {"length_penalty": 0.2}),
        (3, 1.5, {"early_stopping": True}),
        (6, 4.0, {"length_penalty": 0.2, "early_stopping": True}),
    ],
)
@pytest.mark.parametrize("name", ["sinusoidal", "t5"])
def test_hypotheses_are_those_of_the_algorithm(name, groups, penalty, options):
    model = search_model(name)
    inputs = search_sources(model, batch=4)
    start = model.config.decoder_start_token_id
    options = OPTIONS | {"max_new_tokens": 5, "num_return_sequences": 6} | options
    lengths = set()
    found = diverse(model, inputs, groups, penalty, **options)
    for row in range(4):
        expected = plainly(model, one_of(inputs, row), groups, penalty, options, start)
        for place, (score, ids) in enumerate(expected):
            assert found.sequences[6 * row + place, : len(ids)].tolist() == list(ids)
            assert found.sequences_scores[6 * row + place].item() == pytest.approx(score, abs=1e-3)
            lengths.add(len(ids))
    assert len(lengths) > 2


@pytest.mark.parametrize(
    ("groups", "penalty", "options", "message"),
    [
        (4, 0.5, {}, r"`num_beams` must be a multiple of `num_beam_groups`, got 6 and 4"),
        (0, 0.5, {}, r"`num_beam_groups` must be at least 1, got 0"),
        (2, -0.5, {}, r"`diversity_penalty` must not be negative, got -0.5"),
        (2, float("nan"), {}, r"`diversity_penalty` must not be negative, got nan"),
        (2, 0.5, {"do_sample": True}, r"`do_sample` must be False"),
        (2, 0.5, {"output_scores": True}, r"`output_scores` must be False"),
        (2, 0.5, {"max_time": 1e4}, r"`stopping_criteria` must .* MaxTimeCriteria"),
        (2, 0.5, {"encoder_repetition_penalty": 2.0}, r"`logits_processor` must .* EncoderRepetitionPenalty"),
        (2, 0.5, {"cache_implementation": "static"}, r"`cache_implementation` must be None or 'dynamic'"),
    ],
)
def test_errors_name_the_argument(groups, penalty, options, message):
    model = search_model("sinusoidal")
    with pytest.raises(ValueError, match=message):
        diverse(model, search_sources(model), groups, penalty, **options)
