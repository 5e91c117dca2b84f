import math
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import pytest
from datasets import Dataset
from pronunciations import PRONUNCIATIONS

from metaphrase.choices.rules import (
    SIZES,
    CorpusProfile,
    SideProfile,
    StepCost,
    TokenProfile,
    choose_augmentation,
    choose_from_text,
    choose_from_tokens,
    choose_limits,
    choose_size,
    choose_weights,
    describe_choices,
    dropout,
    side_kind,
    tokens_per_batch,
    useful_updates,
)
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.recipe.recipe import Recipe, learning_rate, load_recipe

COMMANDS = [(f"turn {side} {times}", " ".join([f"TURN_{side.upper()}"] * count)) for side in ("left", "right")
            for count, times in enumerate(("once", "twice", "thrice"), start=1)] * 500  # fmt: skip
INFLECTIONS = [(f"{word} PAST {person}", f"{word}ed{person}") for word, _ in PRONUNCIATIONS for person in "12"]

SENTENCES = [pair[0] for pair in make_demo_corpus(num_train=600, num_validation=0, num_test=1)["train"]]
LABELS = [(sentence, "past" if len(sentence) % 2 else "present") for sentence in SENTENCES]
HAN = ["".join(chr(0x4E00 + (17 * row + column * column) % 900) for column in range(15)) for row in range(600)]


def profile(pairs):
    return CorpusProfile.of(Dataset.from_dict(dict(zip(("source", "target"), zip(*pairs, strict=True), strict=True))))


def chosen_from_text(pairs, **fields):
    return choose_from_text(Recipe(train_file="pairs.tsv", **fields), profile(pairs))


@pytest.mark.parametrize(
    ("pairs", "kinds", "is_joint", "metrics"),
    [
        (PRONUNCIATIONS, ("char", "word"), False, ["exact_match", "wer"]),
        (COMMANDS, ("word", "word"), False, ["exact_match", "wer"]),
        (INFLECTIONS, ("char", "char"), True, ["exact_match", "cer"]),
        (LABELS, ("byte_bpe", "word"), False, ["exact_match", "wer"]),
    ],
    ids=["pronunciation", "commands", "inflection", "labels"],
)
def test_tokenizers_and_scores_fit_the_texts(pairs, kinds, is_joint, metrics):
    recipe = chosen_from_text(pairs)
    assert (recipe.tokenizer_kind, recipe.target_tokenizer_kind or recipe.tokenizer_kind) == kinds
    assert recipe.joint_vocabulary is is_joint and recipe.metrics == metrics
    assert (recipe.vocab_size is None) is ("byte_bpe" not in kinds)


KANA = [chr(0x3042) + text for text in HAN]
CODE = [f"publicvoid{text.replace(' ', '')}(intvalue){{return value;}}" for text in SENTENCES]
SHORT = [" ".join(" ".join(SENTENCES).split()[4 * row : 4 * row + 4]) for row in range(500)]
DOCUMENTS = [" ".join(SENTENCES[row:] + SENTENCES[:row]) for row in range(20)]
LONG_HAN = ["".join(chr(0x4E00 + (17 * row + column) % 900) for column in range(40)) for row in range(600)]
SYLLABLES = [chr(0xAC00 + 28 * number) for number in range(399)]
HANGUL = [SYLLABLES[number % 399] + SYLLABLES[7 * number % 399] for number in range(1000)]


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        (SHORT, SHORT[::-1], {"tokenizer_kind": "byte_bpe", "target_tokenizer_kind": None}),
        # Text without spaces is scored by characters, and words of such a script are spelled by them.
        (SENTENCES, HAN, {"bleu_tokenize": "zh"}),
        (SENTENCES, KANA, {"bleu_tokenize": "char"}),
        (HAN, SENTENCES, {"bleu_tokenize": None}),
        (SENTENCES, CODE, {"bleu_tokenize": None}),
        ([text[:3] for text in HAN], [text[2::-1] for text in HAN], {"tokenizer_kind": "char"}),
        (LONG_HAN, [text[::-1] for text in LONG_HAN], {"tokenizer_kind": "byte_bpe"}),
        (DOCUMENTS, SENTENCES[:20], {"metrics": ["rouge", "chrf"]}),
        # Targets are compared with the references, so they stay as they are. Sentences are read in pieces.
        (HANGUL, [" ".join(unicodedata.normalize("NFD", word)) for word in HANGUL], {"normalization": "nfd"}),
        (HANGUL, [word[::-1] for word in HANGUL], {"normalization": None}),
        ([" ".join(HANGUL[row : row + 20]) for row in range(500)], ["a b c " * 20] * 500, {"normalization": None}),
    ],
)
def test_scripts_decide(sources, targets, expected):
    recipe = chosen_from_text(list(zip(sources, targets, strict=True)))
    assert {name: getattr(recipe, name) for name in expected} == expected


def test_given_fields_stay():
    recipe = chosen_from_text(COMMANDS, tokenizer_kind="byte", num_validation=7)
    assert (recipe.tokenizer_kind, recipe.num_validation) == ("byte", 7)
    recipe = choose_limits(Recipe(max_source_length=9), {"source": [50], "target": [50]})
    assert (recipe.max_source_length, recipe.usual_source_length) == (9, 50)
    recipe = choose_limits(Recipe(generation_max_length=70), {"source": [50], "target": [50]})
    assert recipe.usual_source_length is None


@pytest.mark.parametrize(
    ("source", "target", "longest", "expected"),
    [
        (50, 20, (None, None), (80, 32, "skip")),
        # A target that is cut would teach the model not to end.
        (2000, 20, (None, None), (1024, 32, "truncate")),
        (2000, 2000, (None, None), (1024, 1024, "skip")),
        (200, 5, (64, 64), (64, 16, "truncate")),
        (200, 200, (128, 64), (128, 64, "skip")),
        (50, 200, (None, 64), (80, 64, "skip")),
    ],
)
def test_limits_hold_nearly_all_texts(source, target, longest, expected):
    lengths = {"source": [5] * 5000 + [source] * 50, "target": [3] * 5000 + [target] * 50}
    recipe = choose_limits(Recipe(train_file="pairs.tsv"), lengths, longest)
    assert (recipe.max_source_length, recipe.max_target_length, recipe.too_long) == expected


@pytest.mark.parametrize(("pairs", "size"), [(10, 2), (100, 20), (500, 50), (8000, 400), (119_000, 1000)])
def test_size_of_validation(pairs, size):
    words = [(f"{word}{number}", target) for number in range(30) for word, target in PRONUNCIATIONS]
    assert chosen_from_text(words[:pairs]).num_validation == size


def test_repeated_pairs_change_no_choice():
    pairs = [(sentence, sentence.upper()) for sentence in SENTENCES[:300]]
    once, often = chosen_from_text(pairs), chosen_from_text(pairs * 10)
    assert once == often and once.tokenizer_kind == "byte_bpe"


TASKS = {
    # Pairs, tokens of both sides and of the longest pair, as measured; the width that was best.
    "1,000 pronunciations": (TokenProfile(1000, 8_400, 6_800, 40), 128),
    "8,000 pronunciations": (TokenProfile(8000, 68_000, 54_000, 60), 128),
    "10,000 sentences": (TokenProfile(10_000, 112_000, 121_000, 80), 256),
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


def chosen_from_tokens(task="8,000 pronunciations", cost_of=lambda size: StepCost(1.0), seconds=None, **fields):
    # A value that equals its default counts as given.
    before = Recipe.from_mapping({"train_file": "pairs.tsv", **fields}, "the test")
    recipe, _ = choose_from_tokens(before, TASKS[task][0], cost_of, seconds)
    return recipe.checked(), " ".join(describe_choices(before, recipe))


def test_little_time_means_a_small_network():
    recipe, reasons = chosen_from_tokens("29,000 sentences", lambda size: StepCost(size.width**2 / 1e5), 60.0)
    assert recipe.model["hidden_size"] == 128
    assert "the time allows no larger network for" in reasons and "% of them fit into the time" in reasons
    assert "in which the learning rate falls to its end" in reasons
    unlimited, _ = chosen_from_tokens("29,000 sentences")
    assert unlimited.model["hidden_size"] == 256 and unlimited.max_steps == recipe.max_steps


@pytest.mark.parametrize(
    ("share", "batch", "updates"), [(1.2, 4096, 1.2), (0.9, 2048, 1.8), (0.3, 2048, 1), (0.1, 2048, 1)]
)
def test_little_time_means_small_batches(share, batch, updates):
    tokens, _ = TASKS["29,000 sentences"]
    usual = useful_updates(tokens, tokens_per_batch(tokens))
    before = Recipe(train_file="pairs.tsv")
    recipe, seconds = choose_from_tokens(before, tokens, lambda size: StepCost(1.0), share * usual)
    assert recipe.max_tokens_per_batch == batch
    assert recipe.max_steps == pytest.approx(updates * usual, abs=2)
    assert seconds == pytest.approx(recipe.max_steps * batch / 4096)
    reasons = " ".join(describe_choices(before, recipe))
    assert ("and small batches make more updates in the time" in reasons) == (batch < 4096)
    fixed, _ = chosen_from_tokens("29,000 sentences", seconds=share * usual, max_tokens_per_batch=4096)
    assert fixed.max_tokens_per_batch == 4096


@pytest.mark.parametrize(("times", "expected"), [(1, 1), (1.5, 1.5), (4, 2)])
def test_time_that_is_left_gives_more_updates(times, expected):
    tokens, _ = TASKS["29,000 sentences"]
    usual = useful_updates(tokens, tokens_per_batch(tokens))
    recipe, reasons = chosen_from_tokens("29,000 sentences", seconds=times * usual)
    assert recipe.max_steps == pytest.approx(expected * usual, abs=1)
    assert ("epochs fit into the time" in reasons) == (times == 1.5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Half of the run may bring no better score: 2,396 updates, 80 epochs.
        ({"eval_steps": 23}, {"save_steps": 23, "average_best": 3, "early_stopping_patience": 52}),
        ({"metric_for_best_model": "chrf"}, {"eval_strategy": "steps", "average_best": 3}),
        ({"eval_strategy": "epoch"}, {"save_strategy": "epoch", "average_best": 3, "early_stopping_patience": 40}),
        ({"eval_strategy": "no"}, {"average_best": None, "early_stopping_patience": None}),
        ({"eval_strategy": "steps", "save_strategy": "steps"}, {"average_best": None, "early_stopping_patience": None}),
        ({"load_best_model_at_end": True}, {"eval_strategy": "steps", "average_best": None, "save_total_limit": 3}),
        ({"average_last": 2}, {"eval_strategy": "steps", "average_best": None, "load_best_model_at_end": False}),
        ({"predict_with_generate": False}, {"metric_for_best_model": "loss", "max_decoded_samples": None}),
        ({"preset": "student-tiny"}, {"model": {}, "learning_rate": 0.002}),
        ({"warmup_steps": 30}, {"learning_rate": 0.00336, "lr_scheduler_type": "cosine"}),
    ],
    ids=str,
)
def test_one_given_field_leaves_the_others_to_be_chosen(fields, expected):
    chosen = chosen_from_tokens(num_validation=50, metrics=["bleu", "chrf"], **fields)[0]
    assert {name: getattr(chosen, name) for name in expected} == expected
    assert {name: getattr(chosen, name) for name in fields} == fields


GREEK = [(text, "".join(chr(0x370 + ord(one) % 80) if one != " " else " " for one in text)) for text in SENTENCES]


@pytest.mark.parametrize(
    ("pairs", "fields", "expected"),
    [
        (GREEK, {"tokenizer_kind": "unigram"}, ("unigram", None, False, 1000)),
        # The marks of terms are tokens of one vocabulary, and only pieces are sampled.
        (GREEK, {"augmentation": {"terms": 0.3}}, ("byte_bpe", None, True, 1000)),
        (PRONUNCIATIONS, {"subword_sampling": 0.1}, ("byte_bpe", None, False, 1000)),
        (PRONUNCIATIONS, {"joint_vocabulary": True}, ("byte_bpe", None, True, 1000)),
        (PRONUNCIATIONS, {"target_tokenizer_kind": "char"}, ("char", "char", False, None)),
        (COMMANDS, {"joint_vocabulary": True}, ("word", None, True, None)),
        (PRONUNCIATIONS, {"preset": "student-marian"}, ("unigram", None, False, 1000)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_one_given_field_of_the_tokenizers_leaves_the_others_to_be_chosen(pairs, fields, expected):
    recipe = chosen_from_text(pairs, **fields)
    names = ("tokenizer_kind", "target_tokenizer_kind", "joint_vocabulary", "vocab_size")
    assert tuple(getattr(recipe, name) for name in names) == expected
    recipe.checked()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"dropout": 0.4}, {"hidden_size": 128, "encoder_layers": 2, "dropout": 0.4}),
        ({"decoder_layers": 1}, {"hidden_size": 128, "encoder_layers": 2, "decoder_layers": 1, "dropout": 0.3}),
        ({"hidden_size": 400}, {"hidden_size": 400, "encoder_layers": 2, "encoder_ffn_dim": 1000}),
    ],
    ids=str,
)
def test_one_given_field_of_the_network_leaves_the_others_to_be_chosen(model, expected):
    recipe = chosen_from_tokens(model=model)[0]
    assert expected.items() <= recipe.model.items() and recipe.preset == "metaphrase-tiny"
    assert recipe.learning_rate == learning_rate(recipe.model["hidden_size"])
    MetaphraseConfig.from_preset(recipe.preset, **recipe.model)


def test_every_choice_is_a_field_that_a_saved_recipe_holds(tmp_path):
    given = Recipe(train_file="pairs.tsv")
    recipe = choose_from_text(given, profile(PRONUNCIATIONS))
    recipe, _ = choose_from_tokens(recipe, TASKS["8,000 pronunciations"][0], lambda size: StepCost(1.0), None)
    recipe.save(tmp_path / "recipe.yaml")
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again.to_dict() == recipe.to_dict() and all(line.endswith(")") for line in describe_choices(given, recipe))
    # Nothing is left to choose.
    second, _ = choose_from_tokens(again, TASKS["29,000 sentences"][0], lambda size: StepCost(1.0), None)
    assert second == again and not describe_choices(again, second)


def test_rates_and_dropout_fall_as_they_should():
    rates = [learning_rate(size.width) for size in SIZES]
    assert rates == sorted(rates, reverse=True) and rates[1] == 2e-3
    assert [dropout(epochs) for epochs in (84, 18, 7)] == [0.3, 0.2, 0.1]
    tokens = TokenProfile(10**7, 25 * 10**7, 25 * 10**7, 300)
    # Much text is read three times.
    assert useful_updates(tokens, 16_384) == round(3 * tokens.both / 16_384) and useful_updates(tokens, 1024) == 10**5


def test_numbers_of_places_need_absolute_positions():
    recipe = Recipe(train_file="pairs.tsv", tokenizer_kind="word")
    rare_words, parts = SimpleNamespace(substitutes={}), {"num_additions": 3, "num_outer": 0}
    for has_places, positions in ((True, "sinusoidal"), (False, None)):
        recombination = SimpleNamespace(**parts, has_places=has_places)
        chosen = choose_augmentation(recipe, lambda parts=(rare_words, recombination): parts)
        assert chosen.augmentation == {"recombination": 0.3}
        assert chosen.model.get("position_embedding_type") == positions
    given = recipe.replace(model={"position_embedding_type": "learned"})
    recombination = SimpleNamespace(**parts, has_places=True)
    assert choose_augmentation(given, lambda: (rare_words, recombination)).model == given.model


def test_recombined_pairs_need_no_dropout_but_r_drop_does():
    recipe, again = (
        chosen_from_tokens(augmentation={"recombination": 0.3}, r_drop_alpha=alpha)[0] for alpha in (0.0, 5.0)
    )
    assert recipe.model["dropout"] == 0 < again.model["dropout"]


def test_the_best_weights_and_the_beams_are_chosen_on_validation_pairs():
    recipe = chosen_from_tokens(num_validation=50, metrics=["exact_match", "wer"])[0]
    assert recipe.metric_for_best_model == "wer" and recipe.average_best == 3 and recipe.save_total_limit == 4
    assert recipe.choose_decoding and recipe.num_beams is None and recipe.early_stopping_patience
    assert 11 <= recipe.max_steps / recipe.eval_steps < 13
    recipe = chosen_from_tokens(num_validation=50, metrics=["bleu"], save_total_limit=1, num_beams=2)[0]
    assert recipe.metric_for_best_model == "bleu" and recipe.average_best is None and recipe.load_best_model_at_end
    other = choose_weights(Recipe(train_file="a", model_name_or_path="b", reward="chrf", metrics=["wer", "chrf"]), 9)
    assert not recipe.choose_decoding and other.metric_for_best_model == "chrf"
    without = chosen_from_tokens(metrics=["bleu"])[0]
    assert without.num_beams == 4 and without.average_best is None and not without.choose_decoding


@pytest.mark.parametrize(
    "batches", [{"max_tokens_per_batch": 4096}, {"max_tokens_per_batch": 512, "gradient_accumulation_steps": 8}]
)
def test_the_length_of_the_run_follows_from_given_batches(batches):
    recipe = chosen_from_tokens(**batches)[0]
    assert recipe.max_steps == useful_updates(TASKS["8,000 pronunciations"][0], 4096)


@pytest.mark.parametrize(
    ("task", "devices", "share", "batch", "factor"),
    [
        # The update of one device has 4,096 tokens, or 16,384 of much text.
        ("29,000 sentences", 2, 2048, 2048, 1),
        ("29,000 sentences", 4, 2048, 2048, math.sqrt(2)),
        ("29,000 sentences", 64, 2048, 2048, 2),
        ("29,000 sentences", 2, 8192, 4096, math.sqrt(2)),
        ("a million sentences", 4, 2048, 4096, 1),
        ("a million sentences", 8, 8192, 8192, 2),
        ("1,000 pronunciations", 2, 2048, 1024, math.sqrt(2)),
    ],
)
def test_several_devices_share_the_update_of_one(task, devices, share, batch, factor):
    tokens, before = TASKS[task][0], Recipe(train_file="pairs.tsv")
    alone, _ = choose_from_tokens(before, tokens, lambda size: StepCost(1.0), None)
    shared = replace(tokens, devices=devices, smallest_share=share)
    recipe, _ = choose_from_tokens(before, shared, lambda size: StepCost(1.0), None)
    assert recipe.max_tokens_per_batch == batch and recipe.gradient_accumulation_steps == 1
    assert recipe.learning_rate == pytest.approx(factor * alone.learning_rate, abs=1e-5)
    if factor == 1:
        counted = {"max_tokens_per_batch": batch, "reasons": {}}
        assert recipe.replace(**counted) == alone.replace(**counted)


@pytest.mark.parametrize(("batch", "factor"), [(512, 1), (2048, 1), (4096, math.sqrt(2)), (16_384, math.sqrt(2))])
def test_the_rate_of_given_batches_follows_from_the_tokens_of_all_devices(batch, factor):
    # The rule would give a single device 4,096 tokens.
    tokens, before = TASKS["29,000 sentences"][0], Recipe(train_file="pairs.tsv", max_tokens_per_batch=batch)
    rates = [
        choose_from_tokens(before, replace(tokens, devices=devices), lambda size: StepCost(1.0), None)[0].learning_rate
        for devices in (1, 2)
    ]
    assert rates == [2e-3, pytest.approx(factor * 2e-3, abs=1e-5)]


def test_memory_splits_the_batch_of_each_device():
    tokens = replace(TASKS["29,000 sentences"][0], devices=2)
    recipe, _ = choose_from_tokens(Recipe(train_file="pairs.tsv"), tokens, lambda size: StepCost(1.0, 4), None)
    assert (recipe.max_tokens_per_batch, recipe.gradient_accumulation_steps) == (512, 4)


def test_sentences_of_few_words_get_pieces_and_symbols_words():
    days, years = ("first", "second", "third"), ("eighty-one", "ninety-two", "ninety-five")
    texts = [f"{month} the {day}{{}} nineteen {year}" for month in ("May", "June") for day in days for year in years]
    targets = SideProfile.of([str(number) for number in range(18)] * 300)
    for mark, kind in (("", "word"), (",", "byte_bpe")):
        # The mark stands in half of the texts.
        source = SideProfile.of([text.format(mark if number % 2 else "") for number, text in enumerate(texts * 300)])
        assert source.new_words == 0 and side_kind(source, targets) == kind


def test_a_sample_counts_for_all_pairs():
    encoded = Dataset.from_dict({"source_length": [3, 5], "target_length": [2, 7]})
    tokens = TokenProfile.of(encoded, scale=10.0)
    assert (tokens.pairs, tokens.source, tokens.target, tokens.longest) == (20, 80, 90, 12)
    pairs = Dataset.from_dict({"source": ["a", "b"], "target": ["c", "d"]})
    assert CorpusProfile.of(pairs, scale=10.0).pairs == 20
