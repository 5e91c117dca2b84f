"""What comes along when a folder is converted: tokenizers, settings of generation, a licence; and what does not."""

import json
import shutil

import pytest
from converted_models import bart_like, draw
from safetensors import SafetensorError
from tiny_generator import SOURCES, TARGETS, tiny_pair
from transformers import AutoTokenizer

from metaphrase.conversion import convert
from metaphrase.conversion.folders import _tokenizer_class
from metaphrase.scripts import convert as verb
from metaphrase.scripts.console import run
from metaphrase.tokenization import TokenizerPair


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    """A folder with a BART, and the model."""
    folder = tmp_path_factory.mktemp("bart") / "bart"
    model = bart_like("bart", draw("bart", 100), tie_word_embeddings=True).eval()
    model.save_pretrained(folder)
    return folder, model


def test_tokenizers_and_generation_settings_come_along(bart, tmp_path):
    folder, _ = bart
    source = tmp_path / "theirs"
    shutil.copytree(folder, source)
    pair = tiny_pair()
    pair.save_pretrained(source)
    (source / "LICENSE").write_text("free", encoding="utf-8")
    settings = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
    settings |= {"num_beams": 3, "forced_bos_token_id": 7, "max_length": 11}
    (source / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="bart")
    for name in ("ours", "again"):
        assert TokenizerPair.from_pretrained(tmp_path / name).encode_sources(SOURCES) == pair.encode_sources(SOURCES)
        assert (tmp_path / name / "LICENSE").read_text(encoding="utf-8") == "free"
        written = json.loads((tmp_path / name / "generation_config.json").read_text(encoding="utf-8"))
        assert written["num_beams"] == 3 and written["forced_bos_token_id"] == 7 and written["max_length"] == 11


def test_tokenizer_that_named_no_class_is_that_of_its_family(bart, tmp_path):
    folder, _ = bart
    source = tmp_path / "theirs"
    shutil.copytree(folder, source)
    pair = tiny_pair()
    pair.save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["tokenizer_class"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    convert(source, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "RobertaTokenizer"
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")).__name__ == "RobertaTokenizer"


def test_tokenizer_class_may_be_named_in_the_configuration_alone(bart, tmp_path):
    folder, _ = bart
    source = tmp_path / "theirs"
    shutil.copytree(folder, source)
    tiny_pair().save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["tokenizer_class"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(config | {"tokenizer_class": "BertTokenizer"}), encoding="utf-8")
    convert(source, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "BertTokenizer"


@pytest.mark.parametrize(
    ("model_type", "named", "expected"),
    [
        ("bart", None, "RobertaTokenizer"),
        ("mbart", "MBart50Tokenizer", "MBart50Tokenizer"),
        # transformers reads the tokenizers of this family as they are, whatever class is named.
        ("umt5", "T5Tokenizer", "TokenizersBackend"),
        ("marian", None, "MarianTokenizer"),
        ("metaphrase", "TokenizersBackend", "TokenizersBackend"),
        ("metaphrase", None, None),
    ],
)
def test_tokenizer_class_is_the_one_that_transformers_finds(model_type, named, expected):
    assert _tokenizer_class(model_type, named) == expected


def test_nothing_of_a_training_comes_along(bart, tmp_path):
    folder, _ = bart
    source = tmp_path / "theirs"
    shutil.copytree(folder, source)
    pair = tiny_pair(False)
    pair.save_pretrained(source)
    (source / "target_vocab.json").write_text("{}", encoding="utf-8")
    shutil.copytree(folder, source / "checkpoint-5")
    pair.source.save_pretrained(source / "checkpoint-5")
    (source / "target_tokenizer" / "notes.md").write_text("mine", encoding="utf-8")
    convert(source, tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir() if path.is_dir()} == {"target_tokenizer"}
    assert (tmp_path / "ours" / "target_vocab.json").is_file()
    assert not (tmp_path / "ours" / "target_tokenizer" / "notes.md").exists()
    assert TokenizerPair.from_pretrained(tmp_path / "ours").encode_targets(TARGETS) == pair.encode_targets(TARGETS)


def test_a_full_disk_is_told_in_a_line(bart, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr("metaphrase.conversion.weight_files.save_file", fail)
    assert run(verb.main, "convert", [str(bart[0]), str(tmp_path / "ours")]) == 2
    assert "model.safetensors could not be written: Error while serializing: No space" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_settings_of_older_days_are_in_the_configuration(bart, tmp_path):
    folder, _ = bart
    source = tmp_path / "theirs"
    shutil.copytree(folder, source)
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(config | {"num_beams": 4, "max_length": 13}), encoding="utf-8")
    convert(source, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "generation_config.json").read_text(encoding="utf-8"))
    assert written["num_beams"] == 4 and written["max_length"] == 13 and written["forced_eos_token_id"] == 2
    assert "d_model" not in written and "architectures" not in written
