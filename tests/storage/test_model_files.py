"""Tests of broken settings in a model folder: each is an error of one line that names the file, in every verb."""

import json
import re
import shutil

import pytest
from other_families import other_model
from tiny_generator import save_generator, tiny_generator, tiny_pair

from metaphrase.inference import Generator
from metaphrase.scripts.__main__ import run
from metaphrase.storage.loading import load_whole
from metaphrase.storage.model_files import check_model_folder

CONTENTS = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "text": b'"x"',
    "brackets": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no UTF-8": b'{"a": "\xff\xe9"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
}
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
VERBS = {
    "generate": ["MODEL", "--input", "FILE"],
    "evaluate": ["MODEL", "--source", "FILE", "--target", "FILE", "--output", "NEW"],
    "attention": ["MODEL", "--source", "a", "--format", "pharaoh"],
    "explain": ["MODEL", "--source", "a", "--text"],
    "convert": ["MODEL", "NEW", "--to", "bart"],
    "export": ["MODEL", "NEW", "--format", "ctranslate2"],
    "push": ["MODEL", "user/name", "--dry_run"],
    "train": ["FILE", "FILE", "--model_name_or_path", "MODEL", "--output_dir", "NEW", "--use_cpu", "--max_steps", "1"],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of small models by family, with their tokenizers."""
    root = tmp_path_factory.mktemp("saved")
    folders = {"metaphrase": save_generator(tiny_generator(), root / "metaphrase")}
    for family in ("t5", "bart", "marian"):
        other_model(family).save_pretrained(root / family)
        tiny_pair().save_pretrained(root / family)
        folders[family] = root / family
    return folders


@pytest.fixture
def copied(saved, tmp_path):
    """A function that copies the folder of a family."""
    return lambda family: shutil.copytree(saved[family], tmp_path / "model")


def change(folder, file, **fields):
    """Set fields of a file, which need not exist. None stands for null."""
    path = folder / file
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(old | fields), encoding="utf-8")


@pytest.mark.parametrize("family", ["metaphrase", "t5", "bart", "marian"])
def test_whole_folders_are_accepted(family, saved):
    check_model_folder(saved[family])
    assert load_whole(saved[family], trust_remote_code=False).config.model_type == family


@pytest.mark.parametrize("damage", [*CONTENTS, "cut in half", "a folder", "a link to nothing"])
@pytest.mark.parametrize("file", FILES)
def test_damaged_file_is_named(file, damage, copied):
    folder = copied("metaphrase")
    path = folder / file
    content = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "a link to nothing":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(CONTENTS.get(damage, content[: len(content) // 2]))
    with pytest.raises(ValueError, match=rf"^[^\n]*`{re.escape(file)}`[^\n]*$"):
        Generator.from_pretrained(folder)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_broken_field_before_it_reads_weights(verb, copied, tmp_path, capsys):
    if verb == "export":
        pytest.importorskip("ctranslate2")
    folder = copied("metaphrase")
    (folder / "model.safetensors").write_bytes(b"no weights")
    change(folder, "generation_config.json", forced_bos_token_id={})
    (tmp_path / "text").write_text("a\n", encoding="utf-8")
    words = {"MODEL": folder, "NEW": tmp_path / "new", "FILE": tmp_path / "text"}
    assert run(verb, [str(words.get(word, word)) for word in VERBS[verb]]) == 2
    path = str(folder / "generation_config.json")
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"metaphrase {verb}: error: `forced_bos_token_id` in {path!r} must be ")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "model_type", {}),
        ("config.json", "dtype", "x"),
        ("config.json", "dropout", {}),
        ("generation_config.json", "num_beams", 1.5),
        ("generation_config.json", "num_beams", "4"),
        ("generation_config.json", "max_new_tokens", 2**70),
        ("generation_config.json", "temperature", float("nan")),
        ("generation_config.json", "top_p", {"a": 1}),
        ("generation_config.json", "do_sample", "never"),
        ("generation_config.json", "early_stopping", "always"),
        ("generation_config.json", "decoder_start_token_id", -1),
        ("generation_config.json", "forced_bos_token_id", {}),
    ],
)
@pytest.mark.parametrize("family", ["metaphrase", "bart"])
def test_field_with_a_wrong_value_is_named(family, file, field, value, copied):
    folder = copied(family)
    change(folder, file, **{field: value})
    with pytest.raises(ValueError, match=rf"^[^\n]*{file}'[^\n]*$") as caught:
        check_model_folder(folder)
    assert field in str(caught.value) or file == "config.json"


def test_ids_that_index_the_embedding_must_be_its_rows(copied):
    folder = copied("marian")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rule = r"in '\S+config.json' must be an id of the vocabulary, from 0 to \d+, got"
    change(folder, "config.json", pad_token_id=-1)
    with pytest.raises(ValueError, match=rf"^`pad_token_id` {rule} -1"):
        check_model_folder(folder)
    change(folder, "config.json", pad_token_id=0, eos_token_id=[0, 10**6])
    with pytest.raises(ValueError, match=rf"^`eos_token_id` {rule} \[0, 1000000\]"):
        check_model_folder(folder)
    del fields["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    # The default of Marian's class.
    with pytest.raises(ValueError, match=rf"^`decoder_start_token_id` {rule} 58100"):
        check_model_folder(folder)


def test_null_stands_for_the_default(copied):
    folder = copied("metaphrase")
    change(folder, "generation_config.json", forced_bos_token_id=None, num_beams=None)
    change(folder, "tokenizer_config.json", model_max_length=None)
    check_model_folder(folder)


@pytest.mark.parametrize("content", ["[]", "null", "7", '"x"', "[" * 1000, '{"scores": []}', '{"log_history": 7}', "{"])
@pytest.mark.parametrize("file", ["metrics.json", "trainer_state.json", "recipe.yaml"])
def test_push_names_the_broken_file_of_the_card(file, content, copied, capsys):
    folder = copied("metaphrase")
    (folder / file).write_text(content, encoding="utf-8")
    # Each file has other fields.
    is_accepted = (content == "null" and file == "recipe.yaml") or ("scores" in content and file != "metrics.json")
    is_accepted |= "log_history" in content and file != "trainer_state.json"
    assert run("push", [str(folder), "user/name", "--dry_run"]) == (0 if is_accepted else 2)
    assert is_accepted or file in capsys.readouterr().err.splitlines()[-1]
