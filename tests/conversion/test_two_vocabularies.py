import json

import pytest
from converted_models import bart_like, draw
from sentencepiece_models import train_model
from tiny_generator import SOURCES, TARGETS
from transformers import AutoTokenizer, FSMTTokenizer, MarianTokenizer, pipeline

from metaphrase.conversion import convert
from metaphrase.conversion.ctranslate2 import export_ctranslate2
from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair, words_of_source

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def pieces_of(text):
    """The letters of each word, of which the last has a mark."""
    return [piece for word in text.split() for piece in (*word[:-1], f"{word[-1]}</w>")]


def vocabulary_of(texts):
    return sorted({piece for text in texts for piece in pieces_of(text)})


def write_vocabulary(path, tokens):
    ids = {token: index for index, token in enumerate(tokens)}
    path.write_text(json.dumps(ids), encoding="utf-8")
    return ids


@pytest.fixture
def fsmt(tmp_path):
    """A folder with files as transformers' conversion from fairseq writes them, with letters for pieces."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    source, target = (
        write_vocabulary(folder / f"vocab-{side}.json", [*SPECIAL, *vocabulary_of(texts)])
        for side, texts in (("src", SOURCES), ("tgt", TARGETS))
    )
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    settings = {"langs": ["en", "de"], "tokenizer_class": "FSMTTokenizer", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    sizes = {"src_vocab_size": len(source), "tgt_vocab_size": len(target), "vocab_size": len(target)}
    theirs = bart_like("fsmt", draw("fsmt", 300), tie_word_embeddings=False, max_position_embeddings=40, **sizes)
    theirs.save_pretrained(folder)
    return folder


def write_marian_tokenizer(folder, sizes):
    folder.mkdir()
    for side, texts, name in (("source", SOURCES, "vocab.json"), ("target", TARGETS, "target_vocab.json")):
        pieces = [piece for piece in train_model(texts, folder / f"{side}.spm") if piece not in SPECIAL]
        # Padding is the last of each.
        write_vocabulary(folder / name, ["</s>", "<unk>", *pieces[: sizes[side] - 3], "<pad>"])
    settings = {"source_lang": "en", "target_lang": "de", "separate_vocabs": True, "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_fsmt_encodes_and_decodes_each_side_by_its_own_vocabulary(fsmt, tmp_path):
    convert(fsmt, tmp_path / "ours")
    theirs = FSMTTokenizer.from_pretrained(fsmt)
    known = [*SPECIAL, *vocabulary_of(TARGETS)]
    TokenizerPair.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "saved")
    for name in ("ours", "saved"):
        pair = TokenizerPair.from_pretrained(tmp_path / name)
        sources, targets = pair.encode_sources(SOURCES), pair.encode_targets(TARGETS)
        assert sources == theirs(SOURCES)["input_ids"]
        assert targets == [[known.index(piece) for piece in (*pieces_of(text), "</s>")] for text in TARGETS]
        assert pair.decode_targets(targets) == TARGETS
        assert [theirs.decode(row, skip_special_tokens=True) for row in targets] == TARGETS
        assert pair.source.decode(sources[0], skip_special_tokens=True) == SOURCES[0]
        assert words_of_source(pair.source, SOURCES[2], sources[2]) == (["a", "cat"], [0, 1, 1, 1, None])
        assert pair.config_fields()["decoder_vocab_size"] == len(known)


def test_fsmt_is_generated_with_exported_and_converted_back(fsmt, tmp_path):
    convert(fsmt, tmp_path / "ours")
    options = {"num_beams": 2, "early_stopping": True, "max_new_tokens": 4}
    generator = Generator.from_pretrained(tmp_path / "ours", device="cpu")
    written = generator.generate(SOURCES, **options)
    assert any(written)
    piped = pipeline("translation", model=str(tmp_path / "ours"))(SOURCES, **options)
    assert [result["translation_text"] for result in piped] == written
    pytest.importorskip("ctranslate2")
    export_ctranslate2(tmp_path / "ours", tmp_path / "exported")
    engine = Generator.from_pretrained(tmp_path / "exported", engine="ctranslate2", device="cpu")
    assert engine.generate(SOURCES, **options) == written
    convert(tmp_path / "ours", tmp_path / "again", to="fsmt")
    again, given = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "again", fsmt))
    assert again(SOURCES)["input_ids"] == given(SOURCES)["input_ids"]
    assert again.decode([4, 5]) == given.decode([4, 5])


def test_marian_with_two_vocabularies_is_two_tokenizers(tmp_path):
    folder = write_marian_tokenizer(tmp_path / "marian", {"source": 20, "target": 20})
    theirs = MarianTokenizer.from_pretrained(folder)
    TokenizerPair.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    for place in (folder, tmp_path / "saved"):
        pair = TokenizerPair.from_pretrained(place)
        assert not pair.is_joint and pair.target.get_vocab() == theirs.target_encoder
        targets = pair.encode_targets(TARGETS)
        assert pair.encode_sources(SOURCES) == theirs(SOURCES)["input_ids"]
        assert targets == theirs(text_target=TARGETS)["input_ids"]
        assert pair.decode_targets(targets) == [theirs.decode(row, skip_special_tokens=True) for row in targets]
    # With two ids for padding, it stays one tokenizer with its own mode for targets.
    folder = write_marian_tokenizer(tmp_path / "other", {"source": 20, "target": 25})
    pair, theirs = TokenizerPair.from_pretrained(folder), MarianTokenizer.from_pretrained(folder)
    assert pair.is_joint and pair.encode_sources(SOURCES) == theirs(SOURCES)["input_ids"]
    assert pair.encode_targets(TARGETS) == theirs(text_target=TARGETS)["input_ids"]
