"""Tests of `tokenization.vocabulary_trainer`: long words."""

import pytest
from sentences import SENTENCES

from metaphrase.tokenization import train_tokenizer


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe", "unigram", "wordpiece"])
def test_words_of_any_length_are_cut_to_learn_from_and_counted(kind, caplog):
    """Merging is quadratic in the length of a word."""
    word, (first, rest) = "abcdefghij" * 230, (1000, 300)
    given = [*SENTENCES, f"ein {word} {word[:first]} Hund {word}"]
    cut = [*SENTENCES, f"ein {word[:first]}", word[:first], f"{word[:rest]} {word[:first]} Hund {word[:first]}"]
    cut += [word[:first], word[:rest]]
    options = {"kind": kind, "vocab_size": 320 if kind == "byte_bpe" else 120, "show_progress": False}
    vocabulary = train_tokenizer(given, **options).get_vocab()
    assert "Words of more than 1000 characters were cut to train the vocabulary: 2." in caplog.text
    caplog.clear()
    assert vocabulary == train_tokenizer(cut, **options).get_vocab()
    assert "were cut" not in caplog.text


def test_pieces_of_any_length_stay_whole(caplog):
    long = "ab" * 900
    assert long in train_tokenizer([f"ein {long} Hund"], kind="pretokenized", show_progress=False).get_vocab()
    assert "were cut" not in caplog.text
