"""Phrases: their ids are those that stand in a text that contains them."""

import pytest
from tiny_generator import SOURCES, TARGETS

from metaphrase.tokenization import encode_phrase, train_tokenizer

KINDS = ["byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "pretokenized"]


def tokenizer_of(kind):
    return train_tokenizer((SOURCES + TARGETS + ["猫 が いる", '"', "die, das"]) * 3, kind=kind, show_progress=False)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def contains(ids, part):
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


@pytest.mark.parametrize("phrase", ["kleiner Hund", "Hund", " die Katze "])
@pytest.mark.parametrize("kind", KINDS)
def test_a_word_is_found_in_the_middle_of_a_text_and_at_its_beginning(kind, phrase):
    tokenizer = tokenizer_of(kind)
    inside, first = encode_phrase(tokenizer, phrase)
    word = phrase.strip()
    assert len(inside) == 1
    assert contains(ids_of(tokenizer, f"zwei {word} und"), inside[0])
    begun = ids_of(tokenizer, f"{word} und")
    assert any(begun[: len(ids)] == ids for ids in [*inside, *first])
    assert tokenizer.decode([*ids_of(tokenizer, "zwei"), *inside[0]]) == f"zwei {word}"


def test_a_space_stands_before_words_alone():
    tokenizer = tokenizer_of("char")
    for phrase, count in (("Hund", 1), ("猫", 1), ('"', 2)):
        inside, _ = encode_phrase(tokenizer, phrase)
        assert len(inside) == count
    assert encode_phrase(tokenizer, "猫")[0] == [ids_of(tokenizer, "猫")]
    assert encode_phrase(tokenizer, "Hund") == ([ids_of(tokenizer, " Hund")], [ids_of(tokenizer, "Hund")])


@pytest.mark.parametrize("phrase", ["", " \t", 3])
def test_a_phrase_must_have_characters(phrase):
    with pytest.raises(ValueError, match="A phrase must be a text with at least one character"):
        encode_phrase(tokenizer_of("char"), phrase)


def test_a_phrase_that_the_tokenizer_cannot_write_is_refused():
    with pytest.raises(ValueError, match="must be able to write a phrase, got 'Ωmega'"):
        encode_phrase(tokenizer_of("char"), "Ωmega")
