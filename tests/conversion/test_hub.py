"""Tests of the conversion of a checkpoint on the Hub. A folder takes the place of the Hub."""

import json
import shutil

import torch
from converted_models import bart_like, draw
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from subcommands import execute

from metaphrase.conversion import checkpoints
from metaphrase.scripts import convert as verb
from metaphrase.scripts.__main__ import run


def test_checkpoint_on_the_hub_is_converted(tmp_path, monkeypatch):
    hub, cache, calls = tmp_path / "hub", tmp_path / "cache", []

    def download(name, revision, **patterns):
        calls.append((name, revision))
        files = [path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, **patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / file, cache / file)
        return str(cache)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    theirs = bart_like("bart", draw("bart", 101), tie_word_embeddings=True)
    theirs.save_pretrained(hub)
    torch.save(theirs.state_dict(), hub / "pytorch_model.bin")
    (hub / "tf_model.h5").write_bytes(b"another")
    (hub / "checkpoint-10").mkdir()
    (hub / "checkpoint-10" / "model.safetensors").write_bytes(b"of a run")
    execute(verb, ["somebody/bart", str(tmp_path / "ours"), "--revision", "v1"])
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(written["model.encoder.embed_tokens.weight"], theirs.get_input_embeddings().weight)
    provenance = json.loads((tmp_path / "ours" / "conversion.json").read_text(encoding="utf-8"))
    assert provenance["source"] == "somebody/bart" and calls == [("somebody/bart", "v1")]
    # Weights in a second format, and those that a run left behind, are not even fetched.
    assert {path.name for path in cache.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    # Many older models have nothing else.
    (hub / "model.safetensors").unlink()
    (cache / "model.safetensors").unlink()
    execute(verb, ["somebody/bart", str(tmp_path / "old"), "--revision", "v1"])
    old = load_file(tmp_path / "old" / "model.safetensors")
    assert old.keys() == written.keys() and all(torch.equal(old[name], written[name]) for name in old)


def test_without_a_hub_and_without_a_folder_the_error_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert run("convert", ["no/such/folder", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert "`source` must be a folder that exists, or a name on the Hub, got 'no/such/folder'" in said
