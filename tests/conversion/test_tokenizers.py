"""Tests of files copied by a conversion: tokenizers, generation settings and licence."""

import json
import shutil

import pytest
from converted_models import draw, encoder_decoder_like
from small_runs import read
from tiny_generator import SOURCES, TARGETS, tiny_pair
from transformers import AutoTokenizer

from metaphrase.conversion import convert
from metaphrase.conversion.folders import _tokenizer_class
from metaphrase.tokenization import TokenizerPair


@pytest.fixture
def source(bart, tmp_path):
    """A folder with a BART and a tokenizer."""
    folder = shutil.copytree(bart[0], tmp_path / "theirs")
    tiny_pair().save_pretrained(folder)
    return folder


def change(path, removed=(), **fields):
    """Change some fields of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({name: content[name] for name in content if name not in removed}), encoding="utf-8")


def test_tokenizers_and_generation_settings_come_along(source, tmp_path):
    (source / "LICENSE").write_text("free", encoding="utf-8")
    change(source / "generation_config.json", num_beams=3, forced_bos_token_id=7, max_length=11)
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="bart")
    for name in ("ours", "again"):
        pair = TokenizerPair.from_pretrained(tmp_path / name)
        assert pair.encode_sources(SOURCES) == tiny_pair().encode_sources(SOURCES)
        assert (tmp_path / name / "LICENSE").read_text(encoding="utf-8") == "free"
        written = read(tmp_path / name / "generation_config.json")
        assert written["num_beams"] == 3 and written["forced_bos_token_id"] == 7 and written["max_length"] == 11


@pytest.mark.parametrize("named", [None, "BertTokenizer"])
def test_tokenizer_without_a_class_takes_that_of_the_configuration_or_family(named, source, tmp_path):
    change(source / "tokenizer_config.json", removed=["tokenizer_class"])
    change(source / "config.json", tokenizer_class=named)
    convert(source, tmp_path / "ours")
    expected = named or "RobertaTokenizer"
    assert read(tmp_path / "ours" / "tokenizer_config.json")["tokenizer_class"] == expected
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")).__name__ == expected


def test_tokenizer_of_an_encoder_decoder_is_that_of_its_encoder(tmp_path):
    encoder_decoder_like("roberta", draw("roberta", 0)).save_pretrained(tmp_path / "theirs")
    tiny_pair().save_pretrained(tmp_path / "theirs")
    change(tmp_path / "theirs" / "tokenizer_config.json", removed=["tokenizer_class"])
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert read(tmp_path / "ours" / "tokenizer_config.json")["tokenizer_class"] == "RobertaTokenizer"


@pytest.mark.parametrize(
    ("model_type", "named"),
    [("bart", None), ("bart", "BertTokenizer"), ("umt5", "T5Tokenizer"), ("umt5", None), ("t5", "TokenizersBackend")],
)
def test_tokenizer_class_is_the_one_that_transformers_takes(model_type, named, source):
    removed = ["tokenizer_class"] if named is None else []
    change(source / "tokenizer_config.json", removed, **({} if named is None else {"tokenizer_class": named}))
    change(source / "config.json", model_type=model_type)
    assert type(AutoTokenizer.from_pretrained(source)).__name__ == _tokenizer_class(model_type, named)


def test_nothing_of_a_training_comes_along(source, bart, tmp_path):
    pair = tiny_pair(False)
    pair.save_pretrained(source)
    for name in ("target_vocab.json", "bpe.codes"):
        (source / name).write_text("{}", encoding="utf-8")
    shutil.copytree(bart[0], source / "checkpoint-5")
    pair.source.save_pretrained(source / "checkpoint-5")
    (source / "target_tokenizer" / "notes.md").write_text("mine", encoding="utf-8")
    convert(source, tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir() if path.is_dir()} == {"target_tokenizer"}
    assert all((tmp_path / "ours" / name).is_file() for name in ("target_vocab.json", "bpe.codes"))
    assert not (tmp_path / "ours" / "target_tokenizer" / "notes.md").exists()
    assert TokenizerPair.from_pretrained(tmp_path / "ours").encode_targets(TARGETS) == pair.encode_targets(TARGETS)


def test_settings_of_older_days_are_in_the_configuration(source, tmp_path):
    (source / "generation_config.json").unlink()
    change(source / "config.json", num_beams=4, max_length=13)
    convert(source, tmp_path / "ours")
    written = read(tmp_path / "ours" / "generation_config.json")
    assert written["num_beams"] == 4 and written["max_length"] == 13 and written["forced_eos_token_id"] == 2
    assert "d_model" not in written and "architectures" not in written
