"""Tests of `metaphrase.decoding.sampling`: greedy search token for token, and draws from the same distribution."""

import pytest
import torch
from tiny_models import DESIGNS, random_sources, tiny_model
from transformers import GenerationMixin

from metaphrase.decoding.fast_generation import search as fast_search

ENDS = [5, 11, 17, 23]
PLAIN = {"custom_generate": GenerationMixin._sample}


def sources(config, batch=6):
    return random_sources(config, batch=batch, source=13, padding="left")


@pytest.mark.parametrize(
    ("design", "options"),
    [(design, {}) for design in DESIGNS.values()]
    + [
        ({}, options)
        for options in (
            {"no_repeat_ngram_size": 1},
            {"eos_token_id": 7, "pad_token_id": 30},
            {"eos_token_id": None},
            {"min_new_tokens": 5, "repetition_penalty": 2.0},
            {"max_new_tokens": 1},
            {"forced_bos_token_id": 8, "forced_eos_token_id": 5},
        )
    ],
)
def test_greedy_search_is_that_of_transformers(design, options, fast_loops):
    model = tiny_model(**design)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ENDS} | sources(model.config) | options
    assert model.generate(**options).tolist() == model.generate(**options, **PLAIN).tolist()
    assert fast_loops == ["sample"]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.5}, {"min_p": 0.1}, {"typical_p": 0.6}]
)
def test_draws_are_those_of_transformers_until_a_target_ends(options, copies, fast_loops):
    model = tiny_model()
    options = {"do_sample": True, "eos_token_id": None, "max_new_tokens": 9, "num_return_sequences": copies} | options
    texts = []
    for way in ({}, PLAIN):
        torch.manual_seed(0)
        texts.append(model.generate(**sources(model.config), **options, **way).tolist())
    assert texts[0] == texts[1] and fast_loops == ["sample"]


def test_draws_follow_the_distribution_of_the_model_where_rows_leave():
    """Of many draws after one that may end, each token comes as often as its probability says, give or take five deviations."""
    model = tiny_model(decoder_layers=1, vocab_size=12, initializer_range=0.15)
    inputs = sources(model.config, batch=2)
    copies, ends = 4000, [3, 4]
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "num_return_sequences": copies, "eos_token_id": ends}
    drawn = model.generate(**inputs, **options).view(2, copies, 3)
    checked = 0
    for row in range(2):
        source = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        for first in range(12):
            seconds = drawn[row][drawn[row, :, 1] == first][:, 2]
            if first in ends:
                assert set(seconds.tolist()) <= {model.config.pad_token_id}
                continue
            prompt = torch.tensor([[model.config.decoder_start_token_id, first]])
            with torch.inference_mode():
                expected = model(**source, decoder_input_ids=prompt).logits[0, -1].softmax(-1)
            count = len(seconds)
            if count < 200:
                continue
            shares = torch.bincount(seconds, minlength=12) / count
            deviation = (expected * (1 - expected) / count).sqrt()
            assert ((shares - expected).abs() < 5 * deviation + 1e-3).all()
            checked += 1
    assert checked > 5


def test_finished_sources_are_not_computed(step_rows):
    model, rows = tiny_model(decoder_layers=1), step_rows
    options = {"do_sample": True, "num_return_sequences": 2, "eos_token_id": ENDS, "max_new_tokens": 25}
    torch.manual_seed(0)
    outputs = model.generate(**sources(model.config, batch=12), **options)
    assert rows[:2] == [12, 24] and rows[1:] == sorted(rows[1:], reverse=True) and len(set(rows[1:])) > 2
    # After its end a row is padding, and no row is cut off before it.
    for row in outputs[:, 1:].tolist():
        end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
        assert set(row[end + 1 :]) <= {model.config.pad_token_id}


@pytest.mark.parametrize("copies", [1, 3])
def test_scores_are_sums_of_log_probabilities_under_the_model(copies):
    model = tiny_model()
    inputs = sources(model.config)
    options = {"do_sample": copies > 1, "num_return_sequences": copies, "eos_token_id": ENDS, "max_new_tokens": 8}
    options |= {"temperature": 2.0, "top_p": 0.5} if copies > 1 else {}
    torch.manual_seed(0)
    outputs = model.generate(**inputs, **options, custom_generate=fast_search, return_scores=True)
    for index, row in enumerate(outputs.sequences.tolist()):
        end = next((place for place, token in enumerate(row) if token in ENDS), len(row) - 1)
        target = torch.tensor([row[: end + 1]])
        source = {name: tensor[index // copies :][:1] for name, tensor in inputs.items()}
        with torch.inference_mode():
            logits = model(**source, decoder_input_ids=target[:, :-1]).logits
        expected = logits.log_softmax(-1).take_along_dim(target[:, 1:, None], dim=2).sum()
        torch.testing.assert_close(outputs.sequences_scores[index], expected, atol=1e-3, rtol=1e-4)
