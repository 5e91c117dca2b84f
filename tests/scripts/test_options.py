"""Options of the command line become arguments of `generate()`."""

import argparse

import pytest
from transformers import GenerationConfig

from metaphrase.decoding.options import GENERATION_OPTIONS, complete_sampling
from metaphrase.scripts.options import (
    add_generation_options,
    add_phrase_options,
    chosen_generation_options,
    chosen_phrase_options,
)


def chosen(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_generation_options(parser)
    return chosen_generation_options(parser.parse_args(words))


def test_every_option_is_one_of_transformers():
    assert GENERATION_OPTIONS.keys() <= vars(GenerationConfig()).keys()


def test_only_what_was_given_is_chosen():
    assert chosen() == {}
    assert chosen("--num_beams", "4", "--length_penalty", "0.6") == {"num_beams": 4, "length_penalty": 0.6}
    assert type(chosen("--max_new_tokens", "5")["max_new_tokens"]) is int


@pytest.mark.parametrize(
    ("words", "value"), [(["--do_sample"], True), (["--do_sample", "true"], True), (["--do_sample", "no"], False)]
)
def test_booleans_may_be_bare_or_have_a_value(words, value):
    assert chosen(*words) == {"do_sample": value}


def test_early_stopping_may_be_never():
    values = {word: chosen("--early_stopping", word)["early_stopping"] for word in ("never", "true", "no")}
    assert (
        values == {"never": "never", "true": True, "no": False} and chosen("--early_stopping")["early_stopping"] is True
    )


@pytest.mark.parametrize("words", [["--num_beams", "many"], ["--early_stopping", "perhaps"]])
def test_a_value_of_another_kind_is_refused(words):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        chosen(*words)


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"]
)
def test_an_option_of_sampling_asks_for_it(name):
    assert chosen(f"--{name}", "1") == {name: 1, "do_sample": True}
    assert complete_sampling({name: 1}) == {name: 1, "do_sample": True}


def test_sampling_is_not_turned_on_against_a_clear_word_or_without_reason():
    assert complete_sampling({"top_k": 3, "do_sample": False}) == {"top_k": 3, "do_sample": False}
    given = {"num_beams": 2}
    assert complete_sampling(given) == given == {"num_beams": 2}


def test_candidates_of_contrastive_search_are_not_sampled():
    given = {"penalty_alpha": 0.6, "top_k": 4}
    assert chosen("--penalty_alpha", "0.6", "--top_k", "4") == complete_sampling(given) == given
    assert complete_sampling(given | {"top_p": 0.5})["do_sample"] is True


def test_phrases_are_lists_and_each_of_the_first_kind_may_be_one_of_several():
    parser = argparse.ArgumentParser()
    add_phrase_options(parser)
    assert chosen_phrase_options(parser.parse_args([])) == {}
    words = ["--must_contain", "a dog", "--never_contain", "x", "y z", "--must_contain", "cat", "cats"]
    expected = {"must_contain": [["a dog"], ["cat", "cats"]], "never_contain": ["x", "y z"]}
    assert chosen_phrase_options(parser.parse_args(words)) == expected
