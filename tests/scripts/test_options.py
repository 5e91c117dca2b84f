"""Options of the command line become arguments of `generate()`."""

import argparse

import pytest
from transformers import GenerationConfig

from metaphrase.decoding.options import GENERATION_OPTIONS, complete_sampling
from metaphrase.scripts.options import add_generation_options, chosen_generation_options


def chosen(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_generation_options(parser)
    return chosen_generation_options(parser.parse_args(words))


def test_every_option_is_one_of_transformers():
    assert GENERATION_OPTIONS.keys() <= vars(GenerationConfig()).keys()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--num_beams 4 --length_penalty 0.6", {"num_beams": 4, "length_penalty": 0.6}),
        # Booleans may be bare or have a value.
        ("--do_sample", {"do_sample": True}),
        ("--do_sample true", {"do_sample": True}),
        ("--do_sample no", {"do_sample": False}),
        ("--early_stopping", {"early_stopping": True}),
        ("--early_stopping no", {"early_stopping": False}),
        ("--early_stopping never", {"early_stopping": "never"}),
        # An option of sampling turns it on, except against a clear word and for contrastive search.
        *((f"--{name} 1", {name: 1, "do_sample": True}) for name in ("temperature", "top_p", "min_p", "typical_p")),
        *((f"--{name} 1", {name: 1, "do_sample": True}) for name in ("top_k", "epsilon_cutoff", "eta_cutoff", "top_h")),
        ("--top_k 3 --do_sample no", {"top_k": 3, "do_sample": False}),
        ("--penalty_alpha 0.6 --top_k 4", {"penalty_alpha": 0.6, "top_k": 4}),
    ],
)
def test_only_what_was_given_is_chosen(words, expected):
    assert chosen(*words.split()) == expected == complete_sampling(expected)
    assert type(chosen("--max_new_tokens", "5")["max_new_tokens"]) is int


@pytest.mark.parametrize("words", [["--num_beams", "many"], ["--early_stopping", "perhaps"]])
def test_a_value_of_another_kind_is_refused(words):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        chosen(*words)


def test_contrastive_search_with_an_option_of_sampling_samples():
    assert complete_sampling({"penalty_alpha": 0.6, "top_k": 4, "top_p": 0.5})["do_sample"] is True
