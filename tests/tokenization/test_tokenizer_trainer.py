"""Tests of tokenizer training: exact round trips, stable vocabularies, clear errors."""

import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from sentences import SENTENCES

from metaphrase.tokenization import (
    TOKENIZER_KINDS,
    SpecialTokens,
    TokenizerPair,
    iterate_lines,
    readable_tokens,
    sentinel_tokens,
    train_tokenizer,
)
from metaphrase.tokenization.tokenizer_settings import KINDS_WITH_ALL_BYTES

SPLIT_SENTENCES = ["ein an@@ trie@@ b .", "an@@ a b . <unk>", "ein b@@ e@@ in ."] * 2

STRANGE_TEXTS = [
    "",
    " ",
    "  leading",
    "trailing  ",
    "a  b\n\nc\td\r\n",
    "family \U0001f469\u200d\U0001f469\u200d\U0001f467 flag \U0001f1e9\U0001f1ea",
    "e\u0301 is not \u00e9, \ufb01 is not fi, \u212b",
    "nul\0byte",
    "</s>",
    "one </s> two<pad><s> <unk>",
    "\u2028line\u00a0separators\u0085",
    "日本語 العربية",
    "\u2581 Ġ ## @@",
    "\ufeffmark",
    "\U0010ffff\ue000",
]

# What text of seen characters each kind gives back, as its docstring promises.
SEEN_TEXTS = {
    "bpe": ["A dog", "a  b ", "kleiner  Hund: 42", "</s>", "dog</s>", "a <s> b"],
    "unigram": ["A dog", "a  b ", "kleiner  Hund: 42", "</s>", "dog</s>", "a <s> b"],
    "wordpiece": ["A dog", "a b", "kleiner Hund: 42", "Gras, Gras.", "Größere Übungen"],
    "pretokenized": ["ein b .", ". . ein"],
}


def train(kind, texts=None, **settings):
    if texts is None:
        texts = SPLIT_SENTENCES if kind == "pretokenized" else SENTENCES
    if kind in ("byte_bpe", "bpe", "unigram", "wordpiece"):
        settings = {"vocab_size": 280 if kind == "byte_bpe" else 130} | settings
    return train_tokenizer(texts, kind=kind, show_progress=False, **settings)


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_special_token_ids_and_inputs(kind):
    special_tokens = SpecialTokens(additional_special_tokens=("<2de>",))
    tokenizer = train(kind, special_tokens=special_tokens, additional_special_tokens=sentinel_tokens(2))
    names = ["<pad>", "<s>", "</s>", "<unk>", "<2de>", "<extra_id_0>", "<extra_id_1>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(7))
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.padding_side == "right"
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    batch = tokenizer(["A dog", "A small dog"], padding=True)
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert batch["input_ids"][0][-1] == 0 or kind == "pretokenized"


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_one_end_and_no_beginning(kind):
    tokenizer = train(kind)
    text = "ein an@@ trie@@ b ." if kind == "pretokenized" else "A small dog"
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bare and not {0, 1, 2} & set(bare)
    assert tokenizer(text)["input_ids"] == [*bare, 2]
    assert tokenizer(text, text)["input_ids"] == [*bare, 2, *bare, 2]


@pytest.mark.parametrize("kind", KINDS_WITH_ALL_BYTES)
@pytest.mark.parametrize("text", STRANGE_TEXTS)
def test_kinds_with_all_bytes_give_every_text_back(kind, text):
    for texts in (None, [*SENTENCES, *filter(None, STRANGE_TEXTS)]):
        tokenizer = train(kind, texts, additional_special_tokens=["<2de>"])
        for changed in (text, f" {text}", f"<2de>{text}", f"{text} <2de> {text}"):
            assert round_trip(tokenizer, changed) == changed
            assert not {0, 1, 2, 3} & set(tokenizer(changed, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", sorted(SEEN_TEXTS))
def test_text_of_seen_characters_comes_back(kind):
    tokenizer = train(kind)
    for text in SEEN_TEXTS[kind]:
        assert round_trip(tokenizer, text) == text
        assert not {0, 1, 2, 3} & set(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("kind", "more_texts", "text", "expected"),
    [
        ("bpe", [], "  A dog", " A dog"),
        ("unigram", [], "  A dog", " A dog"),
        ("wordpiece", ["# < / s >"], "a  </s> ##s s##s", "a < /s> # # s s # # s"),
        # Control characters that split no word, and a word as long as a sentence.
        ("wordpiece", ["a\x1cb \x1fc"] * 3, "a\x1cb \x1fc", "a\x1cb \x1fc"),
        ("wordpiece", [], "nasseGras" * 100, "nasseGras" * 100),
    ],
)
def test_spaces_and_marks_that_a_kind_changes(kind, more_texts, text, expected):
    assert round_trip(train(kind, [*SENTENCES, *more_texts]), text) == expected


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_control_tokens_spelled_like_words_are_never_read_from_text(kind):
    special_tokens = SpecialTokens(eos_token="EOS", pad_token="-*-", unk_token="[UNK]")
    tokenizer = train(kind, ["EOS xEOSx", "EOS -*- x-*-"] * 50, vocab_size=None, special_tokens=special_tokens)
    for text in ["EOS", "x EOS x", "xEOSx -*-"]:
        assert not {0, 1, 2} & set(tokenizer(text, add_special_tokens=False)["input_ids"])
        if kind not in ("wordpiece", "pretokenized"):
            assert round_trip(tokenizer, text) == text


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_additional_tokens_are_read_from_text_and_shown(kind):
    tokenizer = train(kind, additional_special_tokens=["<2de>"])
    text = "<2de> ein b ." if kind == "pretokenized" else "<2de> A small dog"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 4 and ids.count(4) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_additional_tokens_take_no_room_for_pieces_of_them():
    texts = [f"<2de> {text}" for text in SENTENCES]
    pieces = train("bpe", texts, additional_special_tokens=["<2de>"]).get_vocab()
    assert pieces.keys() == train("bpe", additional_special_tokens=["<2de>"]).get_vocab().keys()


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_same_texts_give_the_same_tokenizer(kind):
    first, *others = [train(kind) for _ in range(3)]
    for other in others:
        assert other.get_vocab() == first.get_vocab()
        # The file of this kind also holds the scores.
        assert kind != "unigram" or other.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe", "unigram", "wordpiece"])
def test_vocab_size_is_met_exactly_or_a_line_says_that_the_texts_are_too_small(kind, caplog):
    caplog.set_level(logging.INFO)
    size = {"byte_bpe": 300, "bpe": 140, "unigram": 66, "wordpiece": 140}[kind]
    assert len(train(kind, vocab_size=size)) == size and not caplog.records
    tokenizer = train(kind, vocab_size=5000)
    assert len(tokenizer) < 5000
    assert f"has {len(tokenizer)} entries, not `vocab_size` 5000" in caplog.text
    # A size that was chosen for the user is no mistake.
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_byte_vocabulary_is_in_byte_order():
    tokenizer = train_tokenizer((), kind="byte")
    assert len(tokenizer) == 260
    assert tokenizer("é\0z", add_special_tokens=False)["input_ids"] == [byte + 4 for byte in "é\0z".encode()]


def test_char_has_one_token_per_character():
    tokenizer = train("char", ["ab", "öä", "ä😀"])
    assert [tokenizer.decode([index]) for index in range(260, len(tokenizer))] == ["ä", "ö", "😀"]
    assert tokenizer("ä x😀", add_special_tokens=False)["input_ids"] == [260, 4 + ord(" "), 4 + ord("x"), 262]
    assert tokenizer("中", add_special_tokens=False)["input_ids"] == [4 + byte for byte in "中".encode()]


def test_word_has_one_token_per_word():
    tokenizer = train("word", ["B ʁ A", "</s>  B", "<2de> B"], additional_special_tokens=["<2de>"])
    words = ["B", "</s>", "A", "ʁ"]
    assert [tokenizer.decode([index]) for index in range(261, len(tokenizer))] == words
    for text, ids in [
        ("B ʁ </s> A", [261, 264, 262, 263]),
        ("<2de> A B", [4, 263, 261]),
        (" A", [5 + ord(" "), 263]),
        ("AB A", [5 + byte for byte in b" AB"] + [263]),
        ("<2de>A", [4, 5 + ord("A")]),
    ]:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert readable_tokens(tokenizer, [4, 264, 5 + ord(" "), 5 + 0xE4]) == ["<2de>", "▁ʁ", "▁", "ä"]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_rare_entries_are_spelled_in_bytes_and_counted(kind, caplog):
    texts = ["ä ä ä ö ö é", "ö ü"]
    assert len(train(kind, texts)) == 264 and not caplog.records
    tokenizer = train(kind, texts, vocab_size=262)
    # Equally frequent entries are in alphabetical order.
    assert [tokenizer.decode([index]) for index in (260, 261)] == ["ä", "ö"] and len(tokenizer) == 262
    assert "2 of 4 different " in caplog.text and ", 2 of 8 occurrences, are not" in caplog.text
    assert "will be spelled in bytes: `vocab_size` 262 is full" in caplog.text
    assert round_trip(tokenizer, "é ä") == "é ä"
    assert train(kind, texts, min_frequency=3).get_vocab() == tokenizer.get_vocab()


def test_pretokenized_looks_whole_pieces_up_and_undoes_the_joiner():
    tokenizer = train("pretokenized")
    ids = tokenizer("ein an@@ trie@@ b .")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ein", "an@@", "trie@@", "b", ".", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ein antrieb ."
    assert round_trip(tokenizer, " ein  b ") == "ein b"
    assert round_trip(tokenizer, "ein an@@") == "ein an"
    assert tokenizer("an trie@@", add_special_tokens=False)["input_ids"][0] == tokenizer.unk_token_id
    assert tokenizer("<unk> </s>", add_special_tokens=False)["input_ids"] == [3, 3]


@pytest.mark.parametrize("joiner", ["@@", "+", "a.*b\\", "￭"])
def test_references_are_joined_as_decoding_joins_them(joiner, tmp_path):
    tokenizer = train("pretokenized", [f"wa{joiner} ter b"], joiner=joiner)
    TokenizerPair(tokenizer, tokenizer).save_pretrained(tmp_path)
    pair = TokenizerPair.from_pretrained(tmp_path)
    assert round_trip(pair.target, f"wa{joiner} ter b") == "water b"
    assert pair.as_decoded([f"wa{joiner} ter b", "water b", f"wa{joiner}"]) == ["water b", "water b", "wa"]


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "wordpiece", "char"])
def test_references_of_other_kinds_stay_as_they_are(kind):
    tokenizer = train(kind, ["a b@@ c"])
    assert TokenizerPair(tokenizer, tokenizer).as_decoded(["b@@ c", "b+ c"]) == ["b@@ c", "b+ c"]


def test_pretokenized_limits_are_counted_and_reported(caplog):
    texts = ["a a a b b c", "a d"]
    assert len(train("pretokenized", texts)) == 4 + 4
    assert not caplog.records
    tokenizer = train("pretokenized", texts, min_frequency=2)
    assert tokenizer.convert_ids_to_tokens([4, 5]) == ["a", "b"] and len(tokenizer) == 6
    assert "2 of 4 different pieces, 2 of 8 occurrences" in caplog.text
    caplog.clear()
    assert len(train("pretokenized", texts, vocab_size=7)) == 7
    assert "1 of 4 different pieces, 1 of 8 occurrences" in caplog.text and "`vocab_size` 7" in caplog.text


def test_normalization_and_lowercase():
    text = "E\u0301t\u00e9 \ufb01n"
    assert round_trip(train("byte", normalization="nfc"), text) == unicodedata.normalize("NFC", text)
    assert round_trip(train("byte", normalization="nfkc", lowercase=True), text) == "\u00e9t\u00e9 fin"
    for normalization in ("nfd", "nfkd"):
        tokenizer = train("char", ["\ud55c"], normalization=normalization)
        # A syllable falls into its letters.
        assert round_trip(tokenizer, "\ud55c") == "\u1112\u1161\u11ab" and len(tokenizer) == 263
    lowered = train("pretokenized", ["Ein B@@ aum"], lowercase=True)
    assert round_trip(lowered, "EIN b@@ AUM") == "ein baum"


LOADING_PROGRAM = """
import json, sys
sys.modules["metaphrase"] = None
from transformers import AutoTokenizer
results = {}
for kind, texts in json.load(sys.stdin).items():
    tokenizer = AutoTokenizer.from_pretrained(kind)
    batch = tokenizer(texts)
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
    rest = [sorted(batch), len(tokenizer), tokenizer.pad_token_id, tokenizer.model_max_length, tokenizer.padding_side]
    results[kind] = [batch["input_ids"], decoded, rest]
print(json.dumps(results))
"""


def test_saved_tokenizers_load_without_metaphrase(tmp_path):
    texts = ["<2de> A small </s> Hund", "ein an@@ trie@@ b .", *STRANGE_TEXTS]
    expected = {}
    for kind in TOKENIZER_KINDS:
        tokenizer = train(kind, additional_special_tokens=["<2de>"], model_max_length=77)
        tokenizer.save_pretrained(tmp_path / kind)
        ids = tokenizer(texts)["input_ids"]
        decoded = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        expected[kind] = [ids, decoded, [["attention_mask", "input_ids"], len(tokenizer), 0, 77, "right"]]
    result = subprocess.run(
        [sys.executable, "-c", LOADING_PROGRAM],
        input=json.dumps(dict.fromkeys(TOKENIZER_KINDS, texts)),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert json.loads(result.stdout) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bytebpe"}, r"`kind` must be one of .* got 'bytebpe'. Did you mean 'byte_bpe'\?"),
        ({"normalization": "nfx"}, r"`normalization` must be one of nfc, nfd, nfkc, nfkd, got 'nfx'"),
        ({"vocab_size": 0}, r"`vocab_size` must be a positive whole number, got 0"),
        ({"vocab_size": 259}, r"`vocab_size` must be at least 260 .*4 special tokens \+ 256 bytes.*got 259"),
        ({"kind": "byte", "vocab_size": 259}, r"`vocab_size` must be at least 260"),
        ({"kind": "word", "vocab_size": 259}, r"`vocab_size` must be at least 260"),
        ({"kind": "unigram", "min_frequency": 2}, r"`min_frequency` must be left out for kind 'unigram'"),
        ({"joiner": "@@"}, r"`joiner` must be left out unless `kind` is 'pretokenized'"),
        ({"kind": "pretokenized", "joiner": "@ @"}, r"`joiner` must be one or more characters without a space"),
        ({"additional_special_tokens": ["<s>"]}, r"must differ from one another, got <s> more than once"),
        ({"additional_special_tokens": "<2de>"}, r"must be two or more printable ASCII characters .*, got '<'"),
    ],
)
def test_settings_are_checked_before_any_text_is_read(settings, message):
    def unreadable():
        raise AssertionError("the texts were read")
        yield

    with pytest.raises(ValueError, match=message):
        train_tokenizer(unreadable(), show_progress=False, **settings)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_characters_must_fit_into_the_vocabulary(kind):
    with pytest.raises(
        ValueError, match=r"`vocab_size` must be at least \d+ .*characters of the texts\), got 12\."
    ) as caught:
        train(kind, vocab_size=12)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    assert len(train(kind, vocab_size=needed)) == needed
    with pytest.raises(ValueError, match=f"must be at least {needed} "):
        train(kind, vocab_size=needed - 1)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "at least one character that is not white space"),
        (["", " \n"], "at least one character that is not white space"),
        (["<2de>", " <2de> "], "at least one character that is not white space"),
        ("a dog", "got the single string 'a dog'"),
        (["a", b"b"], "strings only, got bytes as text 2"),
        (["a", "b\ud800"], "lone surrogate .* in text 2"),
    ],
)
def test_texts_are_checked(texts, message):
    with pytest.raises(ValueError, match=f"`texts` must .*{message}"):
        train("bpe", texts, additional_special_tokens=["<2de>"])


@pytest.mark.parametrize("token", ["x", "", "<a b>", "<é>", "<\n>", None])
def test_special_tokens_must_be_plain(token):
    with pytest.raises(ValueError, match="two or more printable ASCII characters"):
        SpecialTokens(eos_token=token)


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


@pytest.mark.skipif("METAPHRASE_DATA" not in os.environ, reason="METAPHRASE_DATA names no folder of corpora")
def test_pretokenized_corpus_comes_back_joined():
    folder = Path(os.environ["METAPHRASE_DATA"]) / "multi30k_en_de_bpe10k"
    lines = list(iterate_lines([folder / "train.en", folder / "train.de"]))
    tokenizer = train_tokenizer(lines, kind="pretokenized", show_progress=False)
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokenizer(lines)["input_ids"]]
    # Spaces at the ends of a line are not kept.
    assert decoded == [line.strip(" ").replace("@@ ", "") for line in lines]
