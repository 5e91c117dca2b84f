"""Tests of loading: missing, truncated or misshapen weights are an error."""

import json
import shutil

import pytest
import torch
from other_families import other_model
from safetensors.torch import load_file, save_file

from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.scripts.__main__ import run
from metaphrase.storage.loading import load_whole
from metaphrase.storage.weight_files import is_finite
from metaphrase.training.model_setup import load_base
from metaphrase.training.recipe.recipe import Recipe

LOST = "model.decoder.layers.0.mlp.up_proj.weight"


VERBS = {
    "generate": ["MODEL", "--input", "FILE"],
    "evaluate": ["MODEL", "--source", "FILE", "--target", "FILE", "--output", "NEW"],
    "export": ["MODEL", "NEW", "--format", "ctranslate2"],
    "average": ["TWIN", "MODEL", "--output", "NEW"],
    "train": ["FILE", "FILE", "--model_name_or_path", "MODEL", "--output_dir", "NEW", "--use_cpu", "--max_steps", "1"],
}


@pytest.fixture
def folder(cli_model, tmp_path):
    return shutil.copytree(cli_model, tmp_path / "model")


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose(folder):
    change(folder, lambda tensors: tensors.pop(LOST))


def reshape(folder):
    change(folder, lambda tensors: tensors.update({LOST: tensors[LOST][1:].clone()}))


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def damage_index(folder, text="{}"):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)


def write_brackets(folder):
    damage_index(folder, "[" * 100_000)


DAMAGES = {
    lose: rf"must hold whole weights, got \S+model, where these are missing: {LOST}\.",
    reshape: rf"The weight `{LOST}` of \S+model must have the shape \(\d+, \d+\), got \(\d+, \d+\)",
    cut: r"must hold whole weights, got \S+model: ",
    damage_index: r"index\.json must be an index of weights, with a `weight_map`, and is damaged",
    write_brackets: r"index\.json must be ",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_model_that_is_not_whole_is_not_used(damage, folder):
    damage(folder)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        Generator.from_pretrained(folder)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        load_base(Recipe(train_file="a", model_name_or_path=str(folder)))


@pytest.mark.parametrize("engine", ["ctranslate2", "onnx"])
def test_model_that_is_not_whole_is_not_exported(engine, folder, capsys):
    pytest.importorskip({"ctranslate2": "ctranslate2", "onnx": "onnxscript"}[engine])
    lose(folder)
    output = folder.parent / "exported"
    assert run("export", [str(folder), str(output), "--format", engine]) == 2
    assert f"where these are missing: {LOST}." in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("verb", ["generate", "evaluate", "export", "average", "train"])
def test_weights_that_are_not_finite_are_refused(verb, value, folder, tmp_path, capsys):
    if verb == "export":
        pytest.importorskip("ctranslate2")
    shutil.copytree(folder, tmp_path / "twin")
    change(folder, lambda tensors: tensors[LOST].__setitem__((1, 2), value))
    (tmp_path / "text").write_text("a\n", encoding="utf-8")
    words = {"MODEL": folder, "TWIN": tmp_path / "twin", "NEW": tmp_path / "new", "FILE": tmp_path / "text"}
    assert run(verb, [str(words.get(word, word)) for word in VERBS[verb]]) == 2
    message = f"The weight `{LOST}` of {folder} must hold finite numbers, got NaN or infinity."
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_weights_that_are_not_finite_are_not_converted(tmp_path):
    model = other_model("bart")
    model.model.decoder.layers[0].fc1.weight.data[1, 2] = torch.nan
    model.save_pretrained(tmp_path / "bart")
    with pytest.raises(ValueError, match=r"`model.decoder.layers.0.fc1.weight` of \S+bart must hold finite numbers"):
        convert(tmp_path / "bart", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_that_float16_cannot_hold_are_refused(folder):
    change(folder, lambda tensors: tensors[LOST].__setitem__((1, 2), 1e5))
    load_whole(folder, trust_remote_code=False)
    with pytest.raises(ValueError, match=rf"`{LOST}` of \S+ must hold finite numbers"):
        load_whole(folder, dtype=torch.float16, trust_remote_code=False)


def test_whole_model_is_what_was_saved(cli_model):
    model = load_whole(cli_model, trust_remote_code=False)
    assert torch.equal(model.state_dict()[LOST], load_file(f"{cli_model}/model.safetensors")[LOST])


def test_other_families_may_make_weights_anew(tmp_path):
    # BART's head is its embedding, and a bias that no checkpoint need hold is zero.
    other_model("bart").save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("final_logits_bias"))
    assert (load_whole(tmp_path, trust_remote_code=False).final_logits_bias == 0).all()


def test_configuration_of_another_type_is_one_line(folder, capsys):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"hidden_size": "32"}
    (folder / "config.json").write_text(json.dumps(config))
    assert run("attention", [str(folder), "--source", "a", "--format", "pharaoh"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"metaphrase attention: error: {str(folder / 'config.json')!r} must hold usable fields: ")
    assert "'hidden_size'" in said and "'32'" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype):
    for size in (1, 7, 67, 1000):
        weight = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
        assert is_finite(weight) and is_finite(weight[:0]) and is_finite(torch.ones(3, dtype=torch.int64))
        for index in {0, size // 2, size - 1}:
            for value in (torch.nan, torch.inf, -torch.inf):
                changed = weight.clone()
                changed[index] = value
                assert not is_finite(changed) and not is_finite(changed.expand(2, size).T)


def as_pickle(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


@pytest.mark.parametrize("kind", ["alone", "in the index", "empty index"])
def test_no_pickle_is_ever_opened(folder, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("A pickle was opened."))
    names = dict.fromkeys(as_pickle(folder), "pytorch_model.bin") if kind != "empty index" else {}
    if kind == "empty index":
        (folder / "model.safetensors").unlink()
    if kind != "alone":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    words = [str(folder), "--source", "a", "--target", "b", "--output", str(tmp_path / "a.png")]
    assert run("attention", words) == 2
    assert "A pickle such as pytorch_model.bin is never opened" in capsys.readouterr().err
    for load in (load_whole, Generator.from_pretrained):
        with pytest.raises(ValueError, match=r"A pickle such as pytorch_model\.bin is never opened"):
            load(folder, trust_remote_code=False)
