import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_languages import mbart_tokenizer, nllb_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metaphrase.tokenization import TextFrame, TokenizerPair, shorten, train_tokenizer
from metaphrase.tokenization.tokenizer_pair import WordEncoder, mode_lock

SOURCES = ["a small dog runs", "the cat sleeps", "a cat"] * 3
TARGETS = ["ein kleiner Hund läuft", "die Katze schläft", "eine Katze"] * 3


def train_pair(**settings):
    return TokenizerPair.train(SOURCES, TARGETS, show_progress=False, **settings)


def word_tokenizer(template=None, **special):
    """A tokenizer as others make them: words, and the special tokens that the template puts around a text."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "xx", "a", "cat", "dog"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template is not None:
        ids = [(word, words.index(word)) for word in ("<s>", "</s>", "xx")]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | special
    special = {key: value for key, value in special.items() if value is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_a_pair_has_one_vocabulary_or_one_per_side():
    pair = train_pair(kind="char")
    assert pair.is_joint and pair.source is pair.target
    # ASCII characters are bytes.
    assert len(pair.source) == 260 + 1 and "Ã¤" in pair.source.get_vocab()
    assert pair.decode_targets(pair.encode_targets(SOURCES + TARGETS)) == SOURCES + TARGETS
    assert pair.encode_sources(TARGETS) == pair.encode_targets(TARGETS)
    pair = train_pair(joint=False, kind="bpe", vocab_size=30, target_vocab_size=40)
    assert not pair.is_joint and "ä" not in pair.source.get_vocab()
    assert pair.decode_targets(pair.encode_targets(TARGETS)) == TARGETS
    sizes = pair.config_fields()
    assert (sizes["vocab_size"], sizes["decoder_vocab_size"]) == (30, 40)


@pytest.mark.parametrize("joint", [True, False])
def test_saved_pair_loads_equal(tmp_path, joint):
    pair = train_pair(joint=joint, kind="byte_bpe", vocab_size=280)
    before = dict(pair.source.init_kwargs)
    pair.save_pretrained(tmp_path)
    assert pair.source.init_kwargs == before
    loaded = TokenizerPair.from_pretrained(tmp_path)
    assert loaded.is_joint == joint
    assert loaded.encode_sources(SOURCES) == pair.encode_sources(SOURCES)
    assert loaded.encode_targets(TARGETS) == pair.encode_targets(TARGETS)
    assert loaded.config_fields() == pair.config_fields()
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == pair.source.get_vocab()
    assert (tmp_path / "target_tokenizer").exists() != joint
    if not joint:
        target = AutoTokenizer.from_pretrained(tmp_path, subfolder="target_tokenizer")
        assert target.get_vocab() == pair.target.get_vocab() != pair.source.get_vocab()
    if joint:
        assert TokenizerPair.from_pretrained(tmp_path, str(tmp_path)).is_joint
    loaded.save_pretrained(tmp_path / "again")
    assert TokenizerPair.from_pretrained(tmp_path / "again").is_joint == joint


def test_a_separate_target_is_never_lost_or_mistaken(tmp_path):
    train_pair(joint=False, kind="char").save_pretrained(tmp_path / "pair")
    AutoTokenizer.from_pretrained(tmp_path / "pair").save_pretrained(tmp_path / "alone")
    with pytest.raises((OSError, ValueError)):
        TokenizerPair.from_pretrained(tmp_path / "alone")
    pair = TokenizerPair.from_pretrained(tmp_path / "alone", tmp_path / "pair" / "target_tokenizer")
    assert "Ã¤" in pair.target.get_vocab()
    source = AutoTokenizer.from_pretrained(tmp_path / "alone")
    TokenizerPair(source, source).save_pretrained(tmp_path / "joint")
    assert TokenizerPair.from_pretrained(tmp_path / "joint").is_joint
    with pytest.raises(ValueError, match="`folder` must not hold `target_tokenizer/`"):
        train_pair(kind="char").save_pretrained(tmp_path / "pair")


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_missing_special_tokens_are_named(tmp_path, name):
    tokenizer = word_tokenizer("$A </s>", **{name: None})
    with pytest.raises(ValueError, match=f"The source tokenizer must have a `{name}`, got None. Set it with"):
        TokenizerPair(tokenizer, tokenizer)
    with pytest.raises(ValueError, match=f"The target tokenizer must have a `{name}`"):
        TokenizerPair(word_tokenizer(), tokenizer)
    with pytest.raises(ValueError, match=r"`pad_token_id` must be the same on both sides, got 0 and 1"):
        TokenizerPair(word_tokenizer(), word_tokenizer(pad_token="<s>"))
    tokenizer.save_pretrained(tmp_path)
    pair = TokenizerPair.from_pretrained(tmp_path, **{name: "<pad>" if name == "pad_token" else "</s>"})
    assert getattr(pair.source, name) is not None


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        (None, [5, 6, 2]),
        ("$A </s>", [5, 6, 2]),
        ("<s> $A", [1, 5, 6, 2]),
        ("<s> $A </s>", [1, 5, 6, 2]),
        # Some multilingual tokenizers put the language behind the end.
        ("$A </s> xx", [5, 6, 2, 4]),
        # An end-of-sequence token in front ends nothing.
        ("</s> $A", [2, 5, 6, 2]),
    ],
)
def test_every_text_gets_one_end(template, ids):
    pair = TokenizerPair(word_tokenizer(template), word_tokenizer(template))
    assert pair.encode_sources(["a cat"]) == [ids]
    assert pair.encode_targets(["a cat", ""])[0] == ids


def test_nothing_is_truncated_or_padded():
    tokenizer = word_tokenizer("$A </s>", model_max_length=3)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    pair = TokenizerPair(tokenizer, tokenizer)
    assert pair.encode_sources(["a cat a dog a cat", "a"]) == [[5, 6, 5, 7, 5, 6, 2], [5, 2]]


def test_decoding_takes_tensors_arrays_and_lists():
    pair, expected = train_pair(kind="byte"), ["ä b", " c"]
    rows = pair.encode_targets(expected)
    width = max(map(len, rows)) + 2
    labels = [[1, *row] + [-100] * (width - len(row)) for row in rows]
    for ids in (labels, torch.tensor(labels), np.array(labels), [torch.tensor(row) for row in rows]):
        assert pair.decode_targets(ids) == expected
    assert pair.decode_targets([]) == [] and pair.decode_targets([[], [-100]]) == ["", ""]


def test_config_fields_come_from_the_target_and_start_with_padding_without_bos():
    source = train_tokenizer((), kind="byte")
    sizes = {"vocab_size": 260, "decoder_vocab_size": None, "pad_token_id": 0}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    assert TokenizerPair(source, source).config_fields() == sizes | ids
    sizes["decoder_vocab_size"] = 8
    ids = {"bos_token_id": None, "eos_token_id": 4, "decoder_start_token_id": 0}
    assert TokenizerPair(source, word_tokenizer(eos_token="xx")).config_fields() == sizes | ids
    # Ids may have gaps.
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 9}, unk_token="a"))
    gapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    assert TokenizerPair(gapped, gapped).config_fields()["vocab_size"] == 10


@pytest.fixture(scope="module")
def trained():
    return {kind: train_pair(kind=kind) for kind in ("byte", "byte_bpe", "char", "bpe", "unigram", "word")}


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    words=st.lists(st.sampled_from(" ".join(TARGETS).split()), min_size=1, max_size=6).map(" ".join),
)
def test_texts_are_decoded_as_they_were(text, words, trained):
    for kind, pair in trained.items():
        given = [words, text] if kind in ("byte", "byte_bpe", "char", "word") else [words]
        assert pair.decode_targets(pair.encode_targets(given)) == given, kind


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(nllb_tokenizer, ["</s>"]), (mbart_tokenizer, ["</s>", "en_XX"])], ids=["nllb", "mbart"]
)
def test_an_end_may_hold_the_code_of_a_language_and_a_beginning_is_none(tokenizer, end):
    tokenizer = tokenizer()
    pair = TokenizerPair(tokenizer, tokenizer)
    [whole] = pair.encode_sources(["a" * 9])
    frame = TextFrame.of(pair.encode_sources)
    assert pair.source.convert_ids_to_tokens(frame.end) == end and frame.length == 2
    # A mode for targets is a state, which threads must not share.
    assert mode_lock(tokenizer) is mode_lock(nllb_tokenizer())
    assert shorten(whole, 7, frame.end) == [*whole[: 7 - len(end)], *frame.end]
    assert shorten(whole, len(whole), frame.end) == shorten(whole, None, frame.end) == whole
    # No text is left where there is no place.
    assert shorten([5, 6, 7, 2, 3], 2, [2, 3]) == [2, 3] and shorten([5, 2], 2, [2]) == [5, 2]


PARTS = ["ab", "a", "it's", "12", "é", "Ж", "的", ",", "</s>", "<s", "<2de>", "▁", "Ġ"]
PARTS += [*3 * [" "], "  ", "\u00a0", "\t", "\n"]


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe", "unigram"])
def test_ids_of_words_are_those_of_whole_texts(kind):
    letters = ["ab ab it's a 12 é Ж的, <s ▁Ġ </s>", *SOURCES, *TARGETS]
    options = {"vocab_size": 330 if kind == "byte_bpe" else 60, "additional_special_tokens": ["<2de>"]}
    tokenizer = train_tokenizer(letters, kind=kind, show_progress=False, **options)
    pair = TokenizerPair(tokenizer, tokenizer)
    encoder = WordEncoder(tokenizer, pair.encode_sources)
    asked = []
    encoder.encode = lambda texts: asked.append(texts) or pair.encode_sources(texts)

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), max_size=4))
    def check(texts):
        # A padded call leaves its state behind.
        tokenizer(["a", "ab ab"], padding=True, truncation=True, max_length=2)
        assert encoder(texts) == pair.encode_sources(texts)

    check()
    assert {*map(str, asked)} == {"['']"}, "only words are asked for"


def test_a_tokenizer_that_changes_texts_or_has_other_words_encodes_them_whole():
    for tokenizer in (
        word_tokenizer("$A </s>"),
        train_tokenizer(SOURCES, kind="bpe", vocab_size=40, lowercase=True, show_progress=False),
        train_tokenizer(SOURCES, kind="char", show_progress=False),
    ):
        pair, asked = TokenizerPair(tokenizer, tokenizer), []
        encode = lambda texts, asked=asked, pair=pair: asked.append(texts) or pair.encode_sources(texts)  # noqa: E731
        encoder = WordEncoder(tokenizer, encode)
        asked.clear()
        assert encoder(SOURCES) == pair.encode_sources(SOURCES)
        assert asked == [SOURCES]
