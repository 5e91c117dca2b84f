"""Truncation: what is cut to a length still ends as a whole text does."""

import pytest
from tiny_generator import tiny_pair
from tiny_languages import mbart_tokenizer, nllb_tokenizer

from metaphrase.tokenization import TokenizerPair, shared_end, shorten


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(nllb_tokenizer, ["</s>"]), (mbart_tokenizer, ["</s>", "en_XX"])], ids=["nllb", "mbart"]
)
def test_an_end_may_hold_the_code_of_a_language_and_a_beginning_is_none(tokenizer, end):
    tokenizer = tokenizer()
    pair = TokenizerPair(tokenizer, tokenizer)
    [whole] = pair.encode_sources(["a" * 9])
    ids = shared_end(pair.encode_sources)
    assert pair.source.convert_ids_to_tokens(ids) == end
    assert shorten(whole, 7, ids) == [*whole[: 7 - len(ids)], *ids]
    assert shorten(whole, len(whole), ids) == shorten(whole, None, ids) == whole


def test_the_end_is_the_end_of_sequence_also_where_the_tokenizer_forgets_it():
    for joint in (True, False):
        pair = tiny_pair(joint)
        assert shared_end(pair.encode_sources) == [pair.source.eos_token_id]
        assert shared_end(pair.encode_targets) == [pair.target.eos_token_id]


def test_no_text_is_left_where_there_is_no_place():
    assert shorten([5, 6, 7, 2, 3], 2, [2, 3]) == [2, 3]
    assert shorten([5, 2], 2, [2]) == [5, 2]
