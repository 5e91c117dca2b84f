import pytest
from sentencepiece_models import write_marian_tokenizer
from tiny_generator import SOURCES, TARGETS
from transformers import ByT5Tokenizer, MarianTokenizer

from metaphrase.analysis.words import words_of_decoded, words_of_source, words_of_target
from metaphrase.tokenization import TOKENIZER_KINDS, TokenizerPair, train_tokenizer

TEXTS = ["the small dog runs", "  zwei  kleine Hunde,\tdie laufen. ", "läuft 中文 weg", "a", "x\u00a0y\u2003z"]


@pytest.fixture(scope="module", params=TOKENIZER_KINDS)
def pair(request):
    texts = [*SOURCES, *TARGETS, *TEXTS, *(" ".join(text.split()) for text in TEXTS)] * 4
    return TokenizerPair.train(texts, [], kind=request.param, show_progress=False)


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """A tokenizer without offsets, with pieces that have marks and without some of the characters of `TEXTS`."""
    folder = tmp_path_factory.mktemp("marian") / "marian"
    write_marian_tokenizer(folder, SOURCES, SOURCES)
    return MarianTokenizer.from_pretrained(folder)


def written(tokenizer, ids, word_ids, word):
    return tokenizer.decode([token for token, index in zip(ids, word_ids, strict=True) if index == word]).strip()


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_word_write_it(pair, text, request):
    tokenizer = pair.source
    if request.node.callspec.params["pair"] in ("bpe", "word", "pretokenized"):
        text = " ".join(text.split())  # other white space is inside their tokens
    [ids] = pair.encode_sources([text])
    words, word_ids = words_of_source(tokenizer, text, ids)
    assert words == text.split() and len(word_ids) == len(ids) and word_ids[-1] is None
    assert [written(tokenizer, ids, word_ids, word) for word in range(len(words))] == words
    shown = [index for index in word_ids if index is not None]
    assert shown == sorted(shown)
    assert words_of_target(tokenizer, text, ids) == (words, word_ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded.split() == text.split()
    assert words_of_decoded(tokenizer, decoded, ids) == words_of_source(tokenizer, text, ids)


def test_every_token_has_its_word():
    for kind, text, expected in (
        # Characters of several tokens stay whole. The space is among the seven tokens of the second word.
        ("byte", "中 😀é", [0] * 3 + [1] * 7 + [None]),
        # White space goes with the word behind it, and the last with none.
        ("char", " a  cat ", [0, 0, 1, 1, 1, 1, 1, None, None]),
    ):
        tokenizer = train_tokenizer(SOURCES, kind=kind, show_progress=False)
        ids = tokenizer(text)["input_ids"]
        for words_of in (words_of_source, words_of_decoded):
            assert words_of(tokenizer, text, ids) == (text.split(), expected)


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram"])
def test_tokens_of_the_prefix_belong_to_no_word(kind):
    tokenizer = train_tokenizer([*SOURCES, "summarize: the"] * 3, kind=kind, show_progress=False)
    ids = tokenizer("summarize: a cat")["input_ids"]
    words, word_ids = words_of_source(tokenizer, "a cat", ids, prefix="summarize: ")
    assert words == ["a", "cat"] and word_ids[0] is None and word_ids[-1] is None
    assert [written(tokenizer, ids, word_ids, word) for word in (0, 1)] == words
    apart = [token for token, word in zip(ids[:-1], word_ids, strict=False) if word is None]
    assert tokenizer.decode(apart).strip() == "summarize:"


def test_pieces_are_joined_to_words():
    tokenizer = train_tokenizer(["an@@ trie@@ b .", "@@an @@ b"], kind="pretokenized", show_progress=False)
    for text, words, word_ids in (
        ("an@@ trie@@", ["antrie"], [0, 0, None]),
        ("an@@  b", ["an", "b"], [0, 1, None]),
        ("@@an b", ["@@an", "b"], [0, 1, None]),
        ("an@@ trie@@ b .", ["antrieb", "."], [0, 0, 0, 1, None]),
    ):
        ids = tokenizer(text)["input_ids"]
        assert words_of_target(tokenizer, text, ids) == (words, word_ids)
    assert words_of_decoded(tokenizer, "antrieb .", ids) == (words, word_ids)


def test_tokenizer_of_bytes_without_offsets():
    tokenizer = ByT5Tokenizer()
    ids = tokenizer("für a 中")["input_ids"]
    assert not tokenizer.is_fast
    expected = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, None]
    assert words_of_source(tokenizer, "für a 中", ids) == (["für", "a", "中"], expected)
    assert words_of_source(tokenizer, "a 中", ids, prefix="für ")[1] == [None] * 4 + [0, 0, 1, 1, 1, 1, None]


def test_words_that_tokens_do_not_make_up_are_not_guessed(marian):
    for text, encoded in (("the cat", "the cat runs"), ("the ö cat 中 runs", "the ö cat 中 runs")):
        assert words_of_source(marian, text, marian(encoded)["input_ids"]) == (text.split(), None)
    ids = marian("the cat")["input_ids"]
    words, word_ids = words_of_source(marian, "the cat", ids)
    assert words == ["the", "cat"] and word_ids[-1] is None
    assert [written(marian, ids, word_ids, word) for word in (0, 1)] == words
