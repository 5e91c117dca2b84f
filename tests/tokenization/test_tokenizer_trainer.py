import functools
import json
import logging
import os
import subprocess
import sys
import unicodedata

import pytest

from metaphrase.tokenization import TOKENIZER_KINDS, TokenizerPair, readable_tokens, sentinel_tokens, train_tokenizer
from metaphrase.tokenization.tokenizer_trainer import KINDS_WITH_ALL_BYTES

SENTENCES = [
    "A small dog runs across the wet grass.",
    "A small cat sleeps on the grass, as ever.",
    "Ein kleiner Hund läuft über das nasse Gras.",
    "Eine kleine Katze schläft wie immer im Gras!",
    "Größere Übungen: 12 + 30 = 42 <s> </s> #1",
] * 4
SPLIT_SENTENCES = ["ein an@@ trie@@ b .", "an@@ a b . <unk>", "ein b@@ e@@ in ."] * 2
STRANGE_TEXTS = ["", " ", "  leading", "trailing  ", "a  b\n\nc\td\r\n", "nul\0byte", "</s>", "a </s> b<pad><s> <unk>"]
STRANGE_TEXTS += ["family \U0001f469\u200d\U0001f469\u200d\U0001f467 flag \U0001f1e9\U0001f1ea", "日本語 العربية"]
STRANGE_TEXTS += ["e\u0301 is not \u00e9, \ufb01 is not fi, \u212b", "\u2028line\u00a0separators\u0085"]
STRANGE_TEXTS += ["\u2581 Ġ ## @@", "\ufeffmark", "\U0010ffff\ue000"]
# Texts of seen characters that each kind decodes unchanged, as the docstring of `train_tokenizer` promises.
SEEN_TEXTS = dict.fromkeys(("bpe", "unigram"), ("A dog", "a  b ", "kleiner  Hund: 42", "</s>", "dog</s>", "a <s> b"))
SEEN_TEXTS["pretokenized"] = ("ein b .", ". . ein")


def train(kind, texts=None, **settings):
    if texts is None:
        texts = SPLIT_SENTENCES if kind == "pretokenized" else SENTENCES
    if kind in ("byte_bpe", "bpe", "unigram"):
        settings = {"vocab_size": 280 if kind == "byte_bpe" else 130} | settings
    return train_tokenizer(texts, kind=kind, show_progress=False, **settings)


@functools.cache
def trained(kind):
    return train(kind, additional_special_tokens=["<2de>", *sentinel_tokens(2)])


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_special_tokens_and_ends(kind):
    tokenizer = trained(kind)
    names = ["<pad>", "<s>", "</s>", "<unk>", "<2de>", "<extra_id_0>", "<extra_id_1>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(7))
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3] and len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    text = "ein an@@ trie@@ b ." if kind == "pretokenized" else "A small dog"
    batch = tokenizer(["ein" if kind == "pretokenized" else "A", text], padding=True)
    assert sorted(batch) == ["attention_mask", "input_ids"] and batch["input_ids"][0][-1] == 0
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bare and not {0, 1, 2} & set(bare)
    assert tokenizer(text)["input_ids"] == [*bare, 2]
    assert tokenizer(text, text)["input_ids"] == [*bare, 2, *bare, 2]
    text = "<2de> ein b ." if kind == "pretokenized" else "<2de> A small dog"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 4 and ids.count(4) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", KINDS_WITH_ALL_BYTES)
def test_kinds_with_all_bytes_give_every_text_back(kind):
    seen = train(kind, [*SENTENCES, *filter(None, STRANGE_TEXTS)], additional_special_tokens=["<2de>"])
    for tokenizer in (trained(kind), seen):
        for text in STRANGE_TEXTS:
            for changed in (text, f" {text}", f"<2de>{text}", f"{text} <2de> {text}"):
                assert round_trip(tokenizer, changed) == changed
                assert not {0, 1, 2, 3} & set(tokenizer(changed, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", SEEN_TEXTS)
def test_text_of_seen_characters_comes_back(kind):
    for text in SEEN_TEXTS[kind]:
        assert round_trip(trained(kind), text) == text
        assert not {0, 1, 2, 3} & set(trained(kind)(text, add_special_tokens=False)["input_ids"])
    assert kind == "pretokenized" or round_trip(trained(kind), "  A dog") == " A dog"


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "word"])
def test_same_texts_give_the_same_tokenizer(kind):
    assert train(kind).backend_tokenizer.to_str() == train(kind).backend_tokenizer.to_str()


@pytest.mark.parametrize(("kind", "size"), [("byte_bpe", 300), ("bpe", 140), ("unigram", 66)])
def test_vocab_size_is_met_exactly_or_a_line_says_that_the_texts_are_too_small(kind, size, caplog):
    caplog.set_level(logging.INFO)
    assert len(train(kind, vocab_size=size)) == size and not caplog.records
    tokenizer = train(kind, vocab_size=5000)
    assert f"has {len(tokenizer)} entries, not `vocab_size` 5000" in caplog.text
    # A size that was chosen for the user is no mistake.
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_byte_and_char_have_a_token_for_each_byte_or_character():
    tokenizer = train_tokenizer((), kind="byte")
    assert len(tokenizer) == 260
    assert tokenizer("é\0z", add_special_tokens=False)["input_ids"] == [byte + 4 for byte in "é\0z".encode()]
    tokenizer = train("char", ["ab", "öä", "ä😀"])
    assert [tokenizer.decode([index]) for index in range(260, len(tokenizer))] == ["ä", "ö", "😀"]
    assert tokenizer("ä x😀", add_special_tokens=False)["input_ids"] == [260, 4 + ord(" "), 4 + ord("x"), 262]
    assert tokenizer("中", add_special_tokens=False)["input_ids"] == [4 + byte for byte in "中".encode()]


def test_word_has_one_token_per_word():
    tokenizer = train("word", ["B ʁ A", "</s>  B", "<2de> B"], additional_special_tokens=["<2de>"])
    assert [tokenizer.decode([index]) for index in range(261, len(tokenizer))] == ["B", "</s>", "A", "ʁ"]
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


@pytest.mark.parametrize(
    ("kind", "fate"), [("char", "spelled in bytes"), ("word", "spelled in bytes"), ("pretokenized", "unknown")]
)
def test_rare_entries_are_counted_and_left_out(kind, fate, caplog):
    texts, first = ["ä ä ä ö ö é", "ö ü"], 4 if kind == "pretokenized" else 260
    assert len(train(kind, texts)) == first + 4 and not caplog.records
    tokenizer = train(kind, texts, vocab_size=first + 2)
    # Equally frequent entries are in alphabetical order.
    assert [tokenizer.decode([index]).strip() for index in (first, first + 1)] == ["ä", "ö"]
    assert "2 of 4 different " in caplog.text and ", 2 of 8 occurrences, are not" in caplog.text
    assert f"will be {fate}: `vocab_size` is {first + 2}" in caplog.text
    assert round_trip(tokenizer, "é ä") == ("ä" if kind == "pretokenized" else "é ä")
    assert train(kind, texts, min_frequency=3).get_vocab() == tokenizer.get_vocab()


def test_pretokenized_looks_whole_pieces_up_and_undoes_the_joiner():
    tokenizer = train("pretokenized")
    ids = tokenizer("ein an@@ trie@@ b .")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ein", "an@@", "trie@@", "b", ".", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ein antrieb ."
    assert round_trip(tokenizer, " ein  b ") == "ein b" and round_trip(tokenizer, "ein an@@") == "ein an"
    assert tokenizer("an trie@@", add_special_tokens=False)["input_ids"][0] == tokenizer.unk_token_id
    assert tokenizer("<unk> </s>", add_special_tokens=False)["input_ids"] == [3, 3]


@pytest.mark.parametrize("joiner", ["@@", "a.*b\\", "￭"])
def test_references_are_joined_as_decoding_joins_them(joiner, tmp_path):
    tokenizer = train("pretokenized", [f"wa{joiner} ter b"], joiner=joiner)
    TokenizerPair(tokenizer, tokenizer).save_pretrained(tmp_path)
    pair = TokenizerPair.from_pretrained(tmp_path)
    assert round_trip(pair.target, f"wa{joiner} ter b") == "water b"
    assert pair.as_decoded([f"wa{joiner} ter b", "water b", f"wa{joiner}"]) == ["water b", "water b", "wa"]
    for kind in ("bpe", "char"):
        assert TokenizerPair(trained(kind), trained(kind)).as_decoded(["b@@ c"]) == ["b@@ c"]


def test_normalization_and_lowercase():
    text = "E\u0301t\u00e9 \ufb01n"
    assert round_trip(train("byte", normalization="nfc"), text) == unicodedata.normalize("NFC", text)
    assert round_trip(train("byte", normalization="nfkc", lowercase=True), text) == "\u00e9t\u00e9 fin"
    tokenizer = train("char", ["\ud55c"], normalization="nfd")
    # A syllable falls into its letters.
    assert round_trip(tokenizer, "\ud55c") == "\u1112\u1161\u11ab" and len(tokenizer) == 263
    assert round_trip(train("pretokenized", ["Ein B@@ aum"], lowercase=True), "EIN b@@ AUM") == "ein baum"


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
        tokenizer = train(kind, additional_special_tokens=["<2de>"])
        tokenizer.model_max_length = 77
        tokenizer.save_pretrained(tmp_path / kind)
        ids = tokenizer(texts)["input_ids"]
        decoded = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        expected[kind] = [ids, decoded, [["attention_mask", "input_ids"], len(tokenizer), 0, 77, "right"]]
    options = {"input": json.dumps(dict.fromkeys(TOKENIZER_KINDS, texts)), "capture_output": True, "text": True}
    options |= {"check": True, "cwd": tmp_path, "env": os.environ | {"HF_HUB_OFFLINE": "1"}}
    result = subprocess.run([sys.executable, "-c", LOADING_PROGRAM], **options)
    assert json.loads(result.stdout) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bytebpe"}, r"`kind` must be one of .* got 'bytebpe'. Did you mean 'byte_bpe'\?"),
        ({"vocab_size": 259}, r"`vocab_size` must be at least 260 .*4 special tokens \+ 256 bytes.*got 259"),
        ({"kind": "unigram", "min_frequency": 2}, r"`min_frequency` has no effect for kind 'unigram'"),
        ({"joiner": "@@"}, r"`joiner` must be .* for kind 'pretokenized'"),
        ({"kind": "pretokenized", "joiner": "@ @"}, r"`joiner` must be characters without a space"),
        ({"additional_special_tokens": ["<s>"]}, r"special token must .* differ from all others, got '<s>'"),
        ({"additional_special_tokens": "<2de>"}, r"must be two or more printable ASCII characters .*, got '<'"),
        *(({"additional_special_tokens": [token]}, "must be two or more") for token in ("x", "<a b>", "<é>")),
    ],
)
def test_settings_are_checked_before_any_text_is_read(settings, message):
    def unreadable():
        raise AssertionError("the texts were read")
        yield

    with pytest.raises(ValueError, match=message):
        train_tokenizer(unreadable(), show_progress=False, **settings)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_characters_must_fit_into_the_vocabulary(kind):
    with pytest.raises(ValueError, match=r"`vocab_size` must .*characters.*, got 12\."):
        train(kind, vocab_size=12)
    needed = 4 + len(set("\u2581".join(SENTENCES)) - {" "})
    assert len(train(kind, vocab_size=needed)) == needed
    with pytest.raises(ValueError, match="`vocab_size` must "):
        train(kind, vocab_size=needed - 1)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "not all be blank, as all sources or all targets"),
        ("a dog", "got the single string 'a dog'"),
        (["a", b"b"], "strings only, got bytes as text 2"),
        (["a", "b\ud800"], "lone surrogate .* in text 2"),
    ],
)
def test_texts_are_checked(texts, message):
    with pytest.raises(ValueError, match=f"`texts` must .*{message}"):
        train("bpe", texts)


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram"])
def test_words_of_any_length_are_cut_to_learn_from_and_counted(kind, caplog):
    """Merging is quadratic in the length of a word. Pieces stay whole."""
    word, (first, rest) = "abcdefghij" * 230, (1000, 300)
    given = [*SENTENCES, f"ein {word} {word[:first]} Hund {word}"]
    cut = [*SENTENCES, f"ein {word[:first]}", word[:first], f"{word[:rest]} {word[:first]} Hund {word[:first]}"]
    cut += [word[:first], word[:rest]]
    options = {"kind": kind, "vocab_size": 320 if kind == "byte_bpe" else 120, "show_progress": False}
    vocabulary = train_tokenizer(given, **options).get_vocab()
    assert "Words of more than 1000 characters were cut to train the vocabulary: 2." in caplog.text
    caplog.clear()
    assert vocabulary == train_tokenizer(cut, **options).get_vocab()
    assert word in train("pretokenized", [f"ein {word} Hund"]).get_vocab()
    assert "were cut" not in caplog.text
