"""Tests of `metaphrase.decoding.beam_search`: transformers' own beam search finds the same hypotheses, token for token."""

import itertools

import pytest
import torch
from tiny_models import DESIGNS, random_sources, tiny_model
from transformers import GenerationMixin

from metaphrase.decoding.beam_search import top_of_rows
from metaphrase.decoding.fast_generation import search as fast_search

ENDS = [5, 11, 17, 23]


def sources(config, batch=6, **options):
    return random_sources(config, batch=batch, source=13, padding="left", **options)


def check(model, inputs, **options):
    """Compare the ids of the fast loop and of transformers' loop."""
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ENDS} | options
    expected = model.generate(**inputs, **options, custom_generate=GenerationMixin._beam_search)
    assert model.generate(**inputs, **options).tolist() == expected.tolist(), options


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("design", DESIGNS)
def test_hypotheses_are_those_of_transformers(design, early_stopping, fast_loops):
    model = tiny_model(**DESIGNS[design])
    for beams, length_penalty in itertools.product((2, 8), (0.0, 1.4, -0.5)):
        options = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        check(model, sources(model.config), **options)
    assert fast_loops == ["beam_search"] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3},
        {"num_return_sequences": 4, "no_repeat_ngram_size": 1},
        {"eos_token_id": 7},
        {"eos_token_id": None, "pad_token_id": 9},
        {"eos_token_id": list(range(1, 34)), "num_return_sequences": 4},
        {"max_new_tokens": 1, "num_return_sequences": 4},
        {"min_new_tokens": 6},
        {"num_beams": 36, "num_return_sequences": 36, "max_new_tokens": 3},
        {"forced_bos_token_id": 8, "forced_eos_token_id": 5},
        {"repetition_penalty": 3.0, "suppress_tokens": [4, 6], "begin_suppress_tokens": [9, 10]},
        {"bad_words_ids": [[4], [6, 7]], "exponential_decay_length_penalty": (3, 1.5), "renormalize_logits": True},
        # No hypothesis ends, and the prompt is returned.
        {"suppress_tokens": [t for t in range(37) if t != 3], "max_new_tokens": 1, "num_return_sequences": 4},
        {"decoder_input_ids": torch.tensor([[2, 9, 4], [2, 8, 30], [2, 12, 12]] * 2), "length_penalty": 0.5},
    ],
)
def test_options_have_the_effect_of_transformers(options, fast_loops):
    for seed in range(2):
        model = tiny_model(seed=seed, decoder_layers=1)
        check(model, sources(model.config, seed=seed), **{"num_beams": 4} | options)
    assert len(fast_loops) == 2


def test_scores_are_those_of_transformers(fast_loops):
    model = tiny_model()
    options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7, "max_new_tokens": 12}
    options |= sources(model.config) | {"eos_token_id": ENDS}
    ours = model.generate(**options, custom_generate=fast_search, return_scores=True)
    theirs = model.generate(**options, return_dict_in_generate=True, output_scores=True)
    assert len(fast_loops) == 1
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=1e-4)


def test_finished_sources_are_not_computed(step_rows):
    model = tiny_model(decoder_layers=1)
    inputs, rows = sources(model.config, batch=12), step_rows
    options = {"num_beams": 3, "early_stopping": True, "eos_token_id": ENDS, "max_new_tokens": 20}
    together = model.generate(**inputs, **options)
    # The first step is the same for all hypotheses of a source.
    assert rows[0] == 12 and rows[1] == 36
    assert rows[1:] == sorted(rows[1:], reverse=True) and rows[-1] < 36 and all(count % 3 == 0 for count in rows[1:])
    assert len(set(rows[1:])) > 2
    for row in range(12):
        [alone] = model.generate(**{name: tensor[row : row + 1] for name, tensor in inputs.items()}, **options)
        assert together[row, : len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("columns", [100, 16384, 40003])
def test_the_largest_entries_of_long_rows_are_those_of_topk(columns):
    rows = torch.randn(3, columns)
    # Forbidden tokens, and the rows of beams that do not continue.
    rows[1, 40:] = -torch.inf
    rows[2, columns // 2 :] -= 1e9
    values, indices = top_of_rows(rows, 8)
    expected = rows.topk(8)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)
