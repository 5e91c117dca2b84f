"""Tests of all searches: batched equals alone, and mixtures of experts, whose encoder output has extra fields."""

import pytest
import torch
from small_searches import ENDS, MODELS_OF_EXPERTS, one_of, search_model, search_sources

from metaphrase.inference import constrained_beam_search, contrastive_search, diverse_beam_search

SEARCHES = {
    "diverse": {"custom_generate": diverse_beam_search, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"custom_generate": contrastive_search, "penalty_alpha": 0.6, "top_k": 3},
    "constrained": {"custom_generate": constrained_beam_search, "num_beams": 4, "force_words_ids": [[7, 8]]},
}
MANY_ENDS = [*ENDS, 2, 3, 10, 13, 14, 15, 16, 18, 20, 30, 35, 36]
OPTIONS = {"max_new_tokens": 6, "eos_token_id": ENDS}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("name", MODELS_OF_EXPERTS)
def test_mixtures_of_experts_are_searched(name, search):
    model = search_model(name)
    rows = model.generate(**search_sources(model), **OPTIONS, **search).tolist()
    assert len(rows) == 5 and len(set(map(tuple, rows))) > 1


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("name", ["sinusoidal", "t5"])
def test_batched_is_alone(name, search):
    """Some sources end before others."""
    model = search_model(name)
    inputs = search_sources(model, batch=8)
    count = 2 if "num_beams" in search else 1
    options = {"num_return_sequences": count, "return_dict_in_generate": True, **OPTIONS, **search}
    options["max_new_tokens"] = 14
    if "force_words_ids" in search:
        # With few ends all targets would be as long as possible.
        options |= {"eos_token_id": MANY_ENDS, "early_stopping": True}
    together = model.generate(**inputs, **options)
    lengths = set()
    for row in range(8):
        alone = model.generate(**one_of(inputs, row), **options)
        targets, width = together.sequences[count * row :][:count], alone.sequences.shape[1]
        assert targets[:, :width].tolist() == alone.sequences.tolist()
        if count == 1:
            assert set(targets[0, width:].tolist()) <= {model.config.pad_token_id}
        torch.testing.assert_close(
            together.sequences_scores[count * row :][:count], alone.sequences_scores, atol=1e-3, rtol=0
        )
        lengths.add(width)
    assert len(lengths) > 1 or (name == "t5" and "num_beam_groups" in search)
