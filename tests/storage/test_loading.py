"""Tests of loading: damaged weights and settings are an error of one line that names the file, in every subcommand."""

import json
import re
import shutil

import pytest
import torch
from other_families import other_model
from safetensors.torch import load_file, save_file
from tiny_generator import tiny_pair

from metaphrase.inference import Generator
from metaphrase.scripts.__main__ import run
from metaphrase.storage.loading import check_model_folder, load_pretrained
from metaphrase.storage.weight_files import is_finite
from metaphrase.training.model_setup import load_base
from metaphrase.training.recipe.recipe import Recipe

LOST = "model.decoder.layers.0.mlp.up_proj.weight"
SUBCOMMANDS = {
    "generate": ["MODEL", "--input", "FILE"],
    "evaluate": ["MODEL", "--source", "FILE", "--target", "FILE", "--output", "NEW"],
    "attention": ["MODEL", "--source", "a", "--format", "pharaoh"],
    "explain": ["MODEL", "--source", "a", "--output", "NEW"],
    "convert": ["MODEL", "NEW", "--to", "bart"],
    "export": ["MODEL", "NEW", "--format", "ctranslate2"],
    "average": ["TWIN", "MODEL", "--output", "NEW"],
    "push": ["MODEL", "user/name", "--dry_run"],
    "train": ["FILE", "FILE", "--model_name_or_path", "MODEL", "--output_dir", "NEW", "--use_cpu", "--max_steps", "1"],
}


@pytest.fixture
def folder(cli_model, tmp_path):
    return shutil.copytree(cli_model, tmp_path / "model")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The folders of small models of other families, with tokenizers."""
    root = tmp_path_factory.mktemp("saved")
    for family in ("bart", "marian"):
        other_model(family).save_pretrained(root / family)
        tiny_pair().save_pretrained(root / family)
    return root


def run_subcommand(subcommand, folder, tmp_path):
    if subcommand == "export":
        pytest.importorskip("ctranslate2")
    (tmp_path / "text").write_text("a\n", encoding="utf-8")
    words = {"MODEL": folder, "TWIN": tmp_path / "twin", "NEW": tmp_path / "new", "FILE": tmp_path / "text"}
    return run(subcommand, [str(words.get(word, word)) for word in SUBCOMMANDS[subcommand]])


# Weights


def change_weights(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def damage_index(folder, text="{}"):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)


DAMAGES = {
    "lost": (
        lambda folder: change_weights(folder, lambda tensors: tensors.pop(LOST)),
        rf"must hold whole weights, got \S+model, where these are missing: {LOST}\.",
    ),
    "reshaped": (
        lambda folder: change_weights(folder, lambda tensors: tensors.update({LOST: tensors[LOST][1:].clone()})),
        rf"The weight `{LOST}` of \S+model must have the shape \(\d+, \d+\), got \(\d+, \d+\)",
    ),
    "cut": (cut, r"must hold whole weights, got \S+model: "),
    "empty index": (damage_index, r"index\.json must name \.safetensors files beside it, got none"),
    "brackets": (lambda folder: damage_index(folder, "[" * 100_000), r"index\.json` must be readable"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_model_that_is_not_whole_is_not_used(damage, folder):
    make, message = DAMAGES[damage]
    make(folder)
    with pytest.raises(ValueError, match=message):
        Generator.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        load_base(Recipe(train_file="a", model_name_or_path=str(folder)))


@pytest.mark.parametrize("subcommand", ["generate", "export", "average", "train"])
def test_weights_that_are_not_finite_are_refused(subcommand, folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "twin")
    change_weights(folder, lambda tensors: tensors[LOST].__setitem__((1, 2), float("nan")))
    assert run_subcommand(subcommand, folder, tmp_path) == 2
    message = f"The weight `{LOST}` of {folder} must hold finite numbers, got NaN or infinity."
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_weights_that_float16_cannot_hold_are_refused_and_others_are_those_saved(folder):
    change_weights(folder, lambda tensors: tensors[LOST].__setitem__((1, 2), 1e5))
    model = load_pretrained(folder, trust_remote_code=False)
    assert torch.equal(model.state_dict()[LOST], load_file(folder / "model.safetensors")[LOST])
    with pytest.raises(ValueError, match=rf"`{LOST}` of \S+ must hold finite numbers"):
        load_pretrained(folder, dtype=torch.float16, trust_remote_code=False)


def test_other_families_may_make_weights_anew(others, tmp_path):
    # BART's head is its embedding, and a bias that no checkpoint need hold is zero.
    folder = shutil.copytree(others / "bart", tmp_path / "bart")
    change_weights(folder, lambda tensors: tensors.pop("final_logits_bias"))
    assert (load_pretrained(folder, trust_remote_code=False).final_logits_bias == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype):
    for size in (1, 7, 1000):
        weight = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
        assert is_finite(weight) and is_finite(weight[:0]) and is_finite(torch.ones(3, dtype=torch.int64))
        for index in {0, size // 2, size - 1}:
            for value in (torch.nan, torch.inf, -torch.inf):
                changed = weight.clone()
                changed[index] = value
                assert not is_finite(changed) and not is_finite(changed.expand(2, size).T)


@pytest.mark.parametrize("is_in_index", [False, True])
def test_no_pickle_is_ever_opened(folder, is_in_index, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("A pickle was opened."))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    if is_in_index:
        names = dict.fromkeys(weights, "pytorch_model.bin")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    message = "must name .safetensors files" if is_in_index else "`metaphrase convert` reads pytorch_model.bin, too"
    assert run_subcommand("attention", folder, tmp_path) == 2
    assert message in capsys.readouterr().err
    for load in (load_pretrained, Generator.from_pretrained):
        with pytest.raises(ValueError, match=re.escape(message)):
            load(folder, trust_remote_code=False)


# Settings

CONTENTS = {
    "empty": b"",
    "list": b"[]",
    "brackets": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no UTF-8": b'{"a": "\xff\xe9"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
}


def change(folder, file, **fields):
    """Set fields of a file, which need not exist. None stands for null."""
    path = folder / file
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(old | fields), encoding="utf-8")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_damaged_file_is_named(file, folder):
    path = folder / file
    for content in (*CONTENTS.values(), path.read_bytes()[: path.stat().st_size // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^[^\n]*`{re.escape(file)}`[^\n]*$"):
            Generator.from_pretrained(folder)


@pytest.mark.parametrize("subcommand", [subcommand for subcommand in SUBCOMMANDS if subcommand != "average"])
def test_every_subcommand_names_the_broken_field_before_it_reads_weights(subcommand, folder, tmp_path, capsys):
    (folder / "model.safetensors").write_bytes(b"no weights")
    change(folder, "generation_config.json", forced_bos_token_id={})
    assert run_subcommand(subcommand, folder, tmp_path) == 2
    path = str(folder / "generation_config.json")
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"metaphrase {subcommand}: error: `forced_bos_token_id` in {path!r} must be ")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        *(("config.json", *wrong) for wrong in (("model_type", {}), ("dropout", {}), ("encoder_layers", 20_000))),
        *(("generation_config.json", *wrong) for wrong in (("num_beams", 1.5), ("temperature", float("nan")))),
        *(("generation_config.json", *wrong) for wrong in (("top_p", {"a": 1}), ("do_sample", "never"))),
        *(
            ("generation_config.json", *wrong)
            for wrong in (("early_stopping", "always"), ("decoder_start_token_id", -1))
        ),
    ],
)
@pytest.mark.parametrize("family", ["metaphrase", "bart"])
def test_field_with_a_wrong_value_is_named(family, file, field, value, folder, others, tmp_path):
    if family == "bart":
        folder = shutil.copytree(others / "bart", tmp_path / "bart")
    change(folder, "generation_config.json", forced_bos_token_id=None, num_beams=None)
    change(folder, "tokenizer_config.json", model_max_length=None)
    # Null stands for the default.
    check_model_folder(folder)
    change(folder, file, **{field: value})
    with pytest.raises(ValueError, match=rf"^[^\n]*{file}'[^\n]*$") as caught:
        check_model_folder(folder)
    assert field in str(caught.value) or file == "config.json"


def test_ids_that_index_the_embedding_must_be_its_rows(others, tmp_path):
    folder = shutil.copytree(others / "marian", tmp_path / "marian")
    rule = r"in '\S+config.json' must be an id of the vocabulary, from 0 to \d+, got"
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    change(folder, "config.json", eos_token_id=[0, size - 1])
    check_model_folder(folder)
    change(folder, "config.json", eos_token_id=[0, size])
    with pytest.raises(ValueError, match=rf"^`eos_token_id` {rule} \[0, {size}\]"):
        check_model_folder(folder)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": 0}
    del fields["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    # The default of Marian's class.
    with pytest.raises(ValueError, match=rf"^`decoder_start_token_id` {rule} 58100"):
        check_model_folder(folder)
