"""Tokenizers that need sentencepiece, Marian's and M2M100's, made here and carried along by a conversion."""

import json
import sys

import pytest
from converted_models import bart_like, draw
from sentencepiece_models import train_model, write_marian_tokenizer
from tiny_generator import SOURCES, TARGETS
from transformers import AutoTokenizer, M2M100Tokenizer, MarianTokenizer, PLBartTokenizer, pipeline

from metaphrase.conversion import convert
from metaphrase.evaluation.evaluate import evaluate_generator
from metaphrase.inference import Generator, cross_attention
from metaphrase.tokenization import TokenizerPair, set_languages


@pytest.fixture
def opus_mt(tmp_path):
    """A folder as the OPUS-MT models have it, in which no class is named."""
    folder = tmp_path / "theirs"
    vocabulary = write_marian_tokenizer(folder, SOURCES, TARGETS)
    last = vocabulary["<pad>"]
    ids = {"pad_token_id": last, "decoder_start_token_id": last, "eos_token_id": 0, "forced_eos_token_id": 0}
    ids["max_position_embeddings"] = 64
    theirs = bart_like("marian", draw("marian", 300), vocab_size=len(vocabulary), tie_word_embeddings=True, **ids)
    theirs.save_pretrained(folder)
    return folder


def test_marian_tokenizer_comes_along(opus_mt, tmp_path):
    convert(opus_mt, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="marian")
    given = TokenizerPair.from_pretrained(opus_mt)
    assert type(given.source) is MarianTokenizer
    sources, targets = given.encode_sources(SOURCES), given.encode_targets(TARGETS)
    assert given.decode_targets(targets) == TARGETS and sources != targets
    for name in ("ours", "again"):
        pair = TokenizerPair.from_pretrained(tmp_path / name)
        assert type(pair.source) is MarianTokenizer
        assert pair.encode_sources(SOURCES) == sources and pair.encode_targets(TARGETS) == targets
        written = Generator.from_pretrained(tmp_path / name, device="cpu").generate(
            SOURCES, num_beams=2, max_new_tokens=4
        )
        piped = pipeline("translation", model=str(tmp_path / name))(SOURCES, num_beams=2, max_new_tokens=4)
        assert [result["translation_text"] for result in piped] == written


@pytest.fixture
def m2m_100(tmp_path):
    """The folder of a converted model of many languages, and the tokenizer that it was converted with."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    pieces = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces += [piece for piece in train_model(SOURCES, folder / "sentencepiece.bpe.model") if piece not in pieces]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"))
    # The codes have ids behind the vocabulary.
    size = max(tokenizer.lang_code_to_id.values()) + 1
    theirs = bart_like("m2m_100", draw("m2m_100", 300), vocab_size=size, max_position_embeddings=40)
    theirs.save_pretrained(folder)
    # Without a configuration of its own: the class is then known by the family alone.
    convert(folder, tmp_path / "ours")
    return tmp_path / "ours", tokenizer


def test_m2m_100_tokenizer_knows_its_languages(m2m_100):
    folder, tokenizer = m2m_100
    pair = TokenizerPair.from_pretrained(folder)
    assert type(pair.source) is M2M100Tokenizer
    options = set_languages(pair, "en", "de")
    english, german = tokenizer.get_lang_id("en"), tokenizer.get_lang_id("de")
    assert options == {"forced_bos_token_id": german}
    assert pair.encode_sources(["the dog"])[0][0] == english and pair.encode_targets(["der"])[0][0] == german
    generator = Generator.from_pretrained(folder, device="cpu", source_lang="en", target_lang="de")
    written = generator.generate(SOURCES, num_beams=2, max_new_tokens=4)
    piped = pipeline("translation_en_to_de", model=str(folder), num_beams=2, max_new_tokens=4)
    assert [result["translation_text"] for result in piped(SOURCES)] == written
    assert [result["translation_text"] for result in piped(SOURCES, tgt_lang="fr", src_lang="en")] != written
    with pytest.raises(ValueError, match="`tgt_lang` must be a language that the M2M100Tokenizer knows, got 'd'"):
        piped(SOURCES, tgt_lang="d", src_lang="en")
    for code in ("d", "__de__", "xx"):
        with pytest.raises(ValueError, match=f"`source_lang` must be a language that the .* knows, got '{code}'"):
            set_languages(pair, source_lang=code)


def test_m2m_100_needs_the_language_of_targets_before_any_work(m2m_100, monkeypatch):
    generator = Generator.from_pretrained(m2m_100[0], device="cpu", source_lang="en")
    assert len(generator.generate(SOURCES, max_new_tokens=2)) == len(SOURCES)
    assert len(cross_attention(generator, SOURCES[0], max_new_tokens=2).target_tokens) == 2
    said = "`target_lang` must be given for a M2M100Tokenizer, which has many languages, got None"
    with pytest.raises(ValueError, match=said):
        generator.tokenizers.encode_targets(TARGETS)
    monkeypatch.setattr(Generator, "generate", lambda *arguments, **options: pytest.fail("sources were decoded"))
    with pytest.raises(ValueError, match=said):
        evaluate_generator(generator, SOURCES, TARGETS, metrics=["chrf"])


def test_plbart_tokenizer_knows_its_languages(tmp_path):
    """It writes the codes of programming languages with underscores around them."""
    train_model([*SOURCES, "java en"], tmp_path / "sentencepiece.bpe.model")
    tokenizer = PLBartTokenizer(str(tmp_path / "sentencepiece.bpe.model"))
    codes = tokenizer.lang_code_to_id
    assert set_languages(TokenizerPair(tokenizer, tokenizer), "java", "en_XX") == {
        "decoder_start_token_id": codes["__en_XX__"]
    }
    assert tokenizer("a dog")["input_ids"][-1] == codes["__java__"]
    piece = next(piece for piece in map(tokenizer.sp_model.id_to_piece, range(5, 20)) if piece.isalpha())
    with pytest.raises(ValueError, match=f"`source_lang` must be a language that the .* knows, got '{piece}'"):
        set_languages(TokenizerPair(tokenizer, tokenizer), source_lang=piece)


def test_without_sentencepiece_the_error_names_the_extra(opus_mt, tmp_path, monkeypatch):
    convert(opus_mt, tmp_path / "ours")

    def refuse(*arguments, **options):
        raise ImportError("MarianTokenizer requires the SentencePiece library but it was not found.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ImportError, match=r"needs sentencepiece, .* pip install metaphrase\[sentencepiece\]"):
        TokenizerPair.from_pretrained(tmp_path / "ours")


def test_class_is_known_where_transformers_does_not_name_it(opus_mt, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules["metaphrase.conversion.folders"].TOKENIZER_MAPPING_NAMES, "marian", None)
    convert(opus_mt, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written == {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
