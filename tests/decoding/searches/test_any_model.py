"""Search states: what searches need of models that are not Metaphrase's."""

import pytest
from small_searches import ENDS, MODELS_OF_EXPERTS, search_model, search_sources

from metaphrase.inference import constrained_beam_search, contrastive_search, diverse_beam_search

SEARCHES = {
    "diverse": {"custom_generate": diverse_beam_search, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"custom_generate": contrastive_search, "penalty_alpha": 0.6, "top_k": 3},
    "constrained": {"custom_generate": constrained_beam_search, "num_beams": 4, "force_words_ids": [[7, 8]]},
}
OPTIONS = {"max_new_tokens": 6, "eos_token_id": ENDS}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("name", MODELS_OF_EXPERTS)
def test_mixtures_of_experts_are_searched(name, search):
    model = search_model(name)
    rows = model.generate(**search_sources(model), **OPTIONS, **search).tolist()
    assert len(rows) == 5 and len(set(map(tuple, rows))) > 1


@pytest.mark.parametrize("name", MODELS_OF_EXPERTS)
def test_one_group_of_beams_over_experts_is_beam_search(name):
    model = search_model(name)
    inputs = search_sources(model)
    search = {"custom_generate": diverse_beam_search, "num_beam_groups": 1}
    found = model.generate(**inputs, **OPTIONS, num_beams=4, **search).tolist()
    assert found == model.generate(**inputs, **OPTIONS, num_beams=4).tolist()
