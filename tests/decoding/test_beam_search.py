"""Tests of `metaphrase.decoding.beam_search`: transformers' own beam search finds the same hypotheses, token for token."""

import itertools

import pytest
import torch
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import GenerationMixin

from metaphrase.decoding import fast_generation as generation
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.fast_generation import search as fast_search

ENDS = [5, 11, 17, 23]


def sources(config, batch=6, **options):
    inputs = random_batch(config, batch=batch, source=13, padding="left", **options)
    del inputs["decoder_input_ids"]
    return inputs


def both(model, inputs, **options):
    """Return the ids of the fast loop and of transformers' loop."""
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ENDS} | options
    return (
        model.generate(**inputs, **options).tolist(),
        model.generate(**inputs, **options, custom_generate=GenerationMixin._beam_search).tolist(),
    )


@pytest.fixture(autouse=True)
def searches(monkeypatch):
    """The arguments of each call of the fast loop."""
    seen = []
    search = generation.beam_search

    def spy(*arguments):
        seen.append(arguments)
        return search(*arguments)

    monkeypatch.setattr(generation, "beam_search", spy)
    return seen


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("design", DESIGNS)
def test_hypotheses_are_those_of_transformers(design, early_stopping, searches):
    model = tiny_model(**DESIGNS[design])
    inputs = sources(model.config)
    cases = list(itertools.product((2, 8), (0.0, 1.4, -0.5)))
    for beams, length_penalty in cases:
        options = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        ours, theirs = both(model, inputs, **options)
        assert ours == theirs, options
    assert len(searches) == len(cases)


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
    ],
)
def test_options_have_the_effect_of_transformers(options, searches):
    for seed in range(2):
        model = tiny_model(seed=seed, decoder_layers=1)
        ours, theirs = both(model, sources(model.config, seed=seed), **{"num_beams": 4} | options)
        assert ours == theirs
    assert len(searches) == 2


def test_scores_are_those_of_transformers(searches):
    model = tiny_model()
    options = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "length_penalty": 0.7,
        "max_new_tokens": 12,
        "eos_token_id": ENDS,
    }
    ours = model.generate(**sources(model.config), **options, custom_generate=fast_search, return_scores=True)
    theirs = model.generate(**sources(model.config), **options, return_dict_in_generate=True, output_scores=True)
    assert len(searches) == 1
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=1e-4)


def test_a_prompt_is_read_before_the_search():
    model = tiny_model(decoder_layers=1)
    inputs = sources(model.config) | {"decoder_input_ids": torch.tensor([[2, 9, 4], [2, 8, 30], [2, 12, 12]] * 2)}
    for beams in (2, 5):
        ours, theirs = both(model, inputs, num_beams=beams, length_penalty=0.5)
        assert ours == theirs


def test_finished_sources_are_not_computed(monkeypatch):
    model = tiny_model(decoder_layers=1)
    rows = []
    step = DecoderState.step
    monkeypatch.setattr(DecoderState, "step", lambda state, tokens: rows.append(len(tokens)) or step(state, tokens))
    inputs = sources(model.config, batch=12)
    options = {"num_beams": 3, "early_stopping": True, "eos_token_id": ENDS, "max_new_tokens": 20}
    together = model.generate(**inputs, **options)
    # The first step is the same for all hypotheses of a source.
    assert rows[0] == 12 and rows[1] == 36
    assert rows[1:] == sorted(rows[1:], reverse=True) and rows[-1] < 36 and all(count % 3 == 0 for count in rows[1:])
    assert len(set(rows[1:])) > 2
    for row in range(12):
        alone = model.generate(**{name: tensor[row : row + 1] for name, tensor in inputs.items()}, **options)[
            0
        ].tolist()
        assert together[row, : len(alone)].tolist() == alone


@pytest.mark.parametrize(
    "options", [{"suppress_tokens": [t for t in range(37) if t != 3]}, {"forced_eos_token_id": 2}], ids=str
)
def test_without_ended_hypotheses_the_prompt_is_returned(options):
    model = tiny_model()
    options |= {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 1, "do_sample": False}
    expected = model.generate(**sources(model.config), **options, custom_generate=GenerationMixin._beam_search)
    # Unwritten entries would hold these numbers.
    for _ in range(3):
        scratch = torch.full((10_000,), 2**40)
        del scratch
        assert model.generate(**sources(model.config), **options).tolist() == expected.tolist()
