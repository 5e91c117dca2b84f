"""Tests of `tokenization.encoding`: ids of phrases as in a text, and truncation that keeps the end."""

import pytest
from tiny_generator import SOURCES, TARGETS, tiny_pair
from tiny_languages import mbart_tokenizer, nllb_tokenizer

from metaphrase.tokenization import TextFrame, TokenizerPair, encode_phrase, shorten, train_tokenizer

KINDS = ["byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "word", "pretokenized"]


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
        encode_phrase(tokenizer_of("bpe"), "Ωmega")


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(nllb_tokenizer, ["</s>"]), (mbart_tokenizer, ["</s>", "en_XX"])], ids=["nllb", "mbart"]
)
def test_an_end_may_hold_the_code_of_a_language_and_a_beginning_is_none(tokenizer, end):
    tokenizer = tokenizer()
    pair = TokenizerPair(tokenizer, tokenizer)
    [whole] = pair.encode_sources(["a" * 9])
    frame = TextFrame.of(pair.encode_sources)
    assert pair.source.convert_ids_to_tokens(frame.end) == end and frame.length == 2
    assert shorten(whole, 7, frame.end) == [*whole[: 7 - len(end)], *frame.end]
    assert shorten(whole, len(whole), frame.end) == shorten(whole, None, frame.end) == whole


def test_the_end_is_the_end_of_sequence_also_where_the_tokenizer_forgets_it():
    for joint in (True, False):
        pair = tiny_pair(joint)
        assert TextFrame.of(pair.encode_sources) == TextFrame(1, [pair.source.eos_token_id])
        assert TextFrame.of(pair.encode_targets) == TextFrame(1, [pair.target.eos_token_id])


def test_texts_that_a_vocabulary_does_not_know_say_nothing():
    numbers = {"1": 5, "2": 6}
    assert TextFrame.of(
        lambda texts: [[0, *(numbers[c] for c in text if c in numbers), 2] for text in texts]
    ) == TextFrame(2, [2])
    assert TextFrame.of(lambda texts: [[0, 2] for _ in texts]) == TextFrame(2, [2])
    assert TextFrame.of(lambda texts: [[] for _ in texts]) == TextFrame(0, [])


def test_no_text_is_left_where_there_is_no_place():
    assert shorten([5, 6, 7, 2, 3], 2, [2, 3]) == [2, 3]
    assert shorten([5, 2], 2, [2]) == [5, 2]
