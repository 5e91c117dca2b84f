"""Truncation: what is cut to a length still ends as a whole text does."""

import pytest
from tiny_generator import tiny_pair
from tiny_languages import mbart_tokenizer, nllb_tokenizer

from metaphrase.tokenization import TextFrame, TokenizerPair, shorten


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
