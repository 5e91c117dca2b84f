"""Tests of compiled decoding steps: beam search with compiled steps finds what it finds without."""

import copy
import pickle

import pytest
import torch
from tiny_models import random_batch, random_sources, tiny_model
from transformers import CompileConfig
from transformers.cache_utils import DynamicCache, StaticCache

from metaphrase.decoding.fast_generation import SharedSourceCache
from metaphrase.inference.batches import decode

SEARCH = {"num_beams": 3, "do_sample": False, "max_new_tokens": 7, "length_penalty": 1.0}


@pytest.fixture
def graphs():
    """Those that were compiled, with nothing left over from other tests."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def static(graphs, **options):
    """Options of `generate()` with which steps are compiled, on a CPU too: each graph is noted and run as it is."""

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=compile_graph, fullgraph=True, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, **options}


@pytest.mark.parametrize("fields", [{"position_embedding_type": "relative"}, {"position_embedding_type": "rotary"}])
def test_beams_are_the_same_by_one_graph_for_all_steps(fields, graphs):
    model = tiny_model(**fields)
    inputs = random_sources(model.config)
    expected = model.generate(**inputs, **SEARCH)
    for count in (1, 2):
        # Other options compile another graph.
        options = static(graphs)
        for _ in range(2):
            assert model.generate(**inputs, **SEARCH, **options).tolist() == expected.tolist()
            assert len(graphs) == count


def test_searches_with_scores_are_compiled_too(graphs):
    model = tiny_model()
    batch = [row[row != model.config.pad_token_id].tolist() for row in random_sources(model.config)["input_ids"]]
    expected = decode(model, batch, return_scores=True, **SEARCH)
    found = decode(model, batch, return_scores=True, **SEARCH, **static(graphs))
    assert graphs
    for (one,), (other,) in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize("options", [{"disable_compile": True}, {"cache_implementation": None}], ids=str)
def test_nothing_is_compiled_that_should_not_be(options, graphs):
    model = tiny_model()
    inputs = random_sources(model.config)
    found = model.generate(**inputs, **SEARCH, **static(graphs, **options))
    assert found.tolist() == model.generate(**inputs, **SEARCH).tolist() and not graphs


def test_the_model_is_left_as_it_was(graphs):
    model = tiny_model()
    inputs, before = random_sources(model.config), set(vars(model))
    model.generate(**inputs, **SEARCH, **static(graphs))
    # transformers keeps those for the next call.
    assert set(vars(model)) - before <= {"_cache", "_previous_max_cache_length", "last_search"}
    other = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    assert other.generate(**inputs, **SEARCH, **static(graphs)).tolist() == other.generate(**inputs, **SEARCH).tolist()


def test_a_model_whose_steps_cannot_be_compiled_can_be_called(graphs):
    def fail(graph, inputs):
        raise RuntimeError("no compiler")

    model, options = tiny_model(), static(graphs)
    inputs = random_sources(model.config)
    options["compile_config"].backend = fail
    with pytest.raises(Exception, match="no compiler"):
        model.generate(**inputs, **SEARCH, **options)
    assert model.generate(**inputs, **SEARCH).shape[0] == len(inputs["input_ids"]) and not graphs


def test_rows_change_places_where_they_are():
    model = tiny_model()
    cache = SharedSourceCache(StaticCache(config=model.config, max_cache_len=6), DynamicCache())
    with torch.no_grad():
        model(**random_batch(model.config), past_key_values=cache, use_cache=True)
    rows, other = torch.tensor([2, 0, 0]), copy.deepcopy(cache.self_attention_cache)
    places = [layer.keys.data_ptr() for layer in cache.self_attention_cache.layers]
    other.reorder_cache(rows)
    cache.reorder_cache(rows)
    assert [layer.keys.data_ptr() for layer in cache.self_attention_cache.layers] == places
    for one, expected in zip(cache.self_attention_cache.layers, other.layers, strict=True):
        assert torch.equal(one.keys, expected.keys) and torch.equal(one.values, expected.values)
