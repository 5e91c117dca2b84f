"""Tests of the rules that choose open fields: sensible choices for tasks of different kinds, and reasons for each."""

import math

import pytest
from datasets import Dataset
from pronunciations import PRONUNCIATIONS

from metaphrase.data.profile import CorpusProfile
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.training.choices.rules import (
    SIZES,
    OpenRecipe,
    TokenProfile,
    choose_from_text,
    choose_from_tokens,
    choose_size,
    dropout,
    learning_rate,
    tokens_per_batch,
    useful_updates,
)
from metaphrase.training.recipe.recipe import Recipe, load_recipe

COMMANDS = [(f"turn {side} {times}", " ".join([f"TURN_{side.upper()}"] * count)) for side in ("left", "right")
            for count, times in enumerate(("once", "twice", "thrice"), start=1)] * 500  # fmt: skip
INFLECTIONS = [(f"{word} PAST {person}", f"{word}ed{person}") for word, _ in PRONUNCIATIONS for person in "12"]


def profile(pairs):
    return CorpusProfile.of(Dataset.from_dict(dict(zip(("source", "target"), zip(*pairs, strict=True), strict=True))))


def chosen_from_text(pairs, **fields):
    recipe = OpenRecipe(Recipe(train_file="pairs.tsv", **fields))
    choose_from_text(recipe, profile(pairs))
    return recipe.recipe


@pytest.mark.parametrize(
    ("pairs", "kinds", "is_joint", "metrics"),
    [
        (PRONUNCIATIONS, ("char", "word"), False, ["exact_match", "wer"]),
        (COMMANDS, ("word", "word"), False, ["exact_match", "wer"]),
        (INFLECTIONS, ("char", "char"), True, ["exact_match", "cer"]),
    ],
    ids=["pronunciation", "commands", "inflection"],
)
def test_tokenizers_and_scores_fit_the_texts(pairs, kinds, is_joint, metrics):
    recipe = chosen_from_text(pairs)
    assert (recipe.tokenizer_kind, recipe.target_tokenizer_kind or recipe.tokenizer_kind) == kinds
    assert recipe.joint_vocabulary is is_joint and recipe.vocab_size is None and recipe.metrics == metrics


def test_text_gets_one_vocabulary_of_pieces():
    recipe = chosen_from_text(make_demo_corpus(num_train=2000, num_validation=0, num_test=1)["train"])
    assert (recipe.tokenizer_kind, recipe.joint_vocabulary, recipe.vocab_size) == ("byte_bpe", True, 1000)
    assert recipe.metrics[0] == "bleu" and 32 <= recipe.max_source_length <= 96


def test_scripts_of_several_bytes_have_longer_limits():
    texts = ["".join(chr(0x4E00 + (17 * row + column) % 900) for column in range(40)) for row in range(600)]
    recipe = chosen_from_text([(text, text[::-1]) for text in texts])
    assert recipe.tokenizer_kind == "byte_bpe" and recipe.max_source_length >= 60


def test_given_fields_stay():
    recipe = chosen_from_text(COMMANDS, tokenizer_kind="byte", num_validation=7, max_source_length=9)
    assert (recipe.tokenizer_kind, recipe.num_validation, recipe.max_source_length) == ("byte", 7, 9)
    # Limits in tokens of another tokenizer are not guessed.
    assert recipe.joint_vocabulary is None and recipe.max_target_length == Recipe().max_target_length


@pytest.mark.parametrize(("pairs", "size"), [(10, 2), (100, 20), (500, 50), (8000, 400), (119_000, 1000)])
def test_size_of_validation(pairs, size):
    assert chosen_from_text((PRONUNCIATIONS * 30)[:pairs]).num_validation == size


TASKS = {
    # Pairs, tokens of both sides and of the longest pair, as measured; the width that was best.
    "1,000 pronunciations": (TokenProfile(1000, 8_400, 6_800, 40), 128),
    "8,000 pronunciations": (TokenProfile(8000, 68_000, 54_000, 60), 128),
    "29,000 sentences": (TokenProfile(29_000, 457_000, 480_000, 110), 256),
    "117,000 sentences": (TokenProfile(116_653, 1_100_000, 1_120_000, 120), 256),
    "a million sentences": (TokenProfile(10**6, 25 * 10**6, 25 * 10**6, 300), 512),
}


@pytest.mark.parametrize("task", TASKS)
def test_size_follows_from_target_tokens(task):
    tokens, width = TASKS[task]
    updates = useful_updates(tokens, tokens_per_batch(tokens))
    assert choose_size(tokens, updates, lambda size: math.inf).width == width
    # There is a batch for the longest pair, and no pair is seen more than 150 times.
    assert tokens_per_batch(tokens) >= tokens.longest
    assert updates * tokens_per_batch(tokens) < 150 * tokens.both


def test_little_time_means_a_small_network():
    tokens, _ = TASKS["29,000 sentences"]
    recipe = OpenRecipe(Recipe(metrics=["bleu"]))
    choose_from_tokens(recipe, tokens, lambda size: size.width**2 / 1e5, 300.0)
    assert recipe.recipe.model["hidden_size"] == 128
    reasons = " ".join(choice.reason for choice in recipe.choices)
    assert "the time allows no larger network" in reasons and "% of them fit into the time" in reasons
    unlimited = OpenRecipe(Recipe(metrics=["bleu"]))
    choose_from_tokens(unlimited, tokens, lambda size: math.inf, None)
    assert unlimited.recipe.model["hidden_size"] == 256 and unlimited.recipe.max_steps == recipe.recipe.max_steps


def test_every_choice_is_a_field_that_a_saved_recipe_holds(tmp_path):
    recipe = OpenRecipe(Recipe(train_file="pairs.tsv"))
    choose_from_text(recipe, profile(PRONUNCIATIONS))
    choose_from_tokens(recipe, TASKS["8,000 pronunciations"][0], lambda size: 1.0, None)
    recipe.recipe.save(tmp_path / "recipe.yaml")
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again == recipe.recipe
    # Nothing is left to choose.
    choose_from_tokens(second := OpenRecipe(again), TASKS["29,000 sentences"][0], lambda size: 1.0, None)
    assert not second.choices
    assert all(choice.reason for choice in recipe.choices)


def test_rates_and_dropout_fall_as_they_should():
    rates = [learning_rate(size.width) for size in SIZES]
    assert rates == sorted(rates, reverse=True) and rates[1] == 2e-3
    assert [dropout(epochs) for epochs in (84, 18, 7)] == [0.3, 0.2, 0.1]
