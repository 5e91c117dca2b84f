"""Tests of the conversion of a checkpoint on the Hub, with a local server in place of the Hub."""

import hashlib
import json
import threading
from http.server import ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
from converted_models import bart_like, draw
from hub_stand_in import QuietHandler
from huggingface_hub import constants
from safetensors.torch import load_file
from subcommands import execute

from metaphrase.scripts import convert as verb
from metaphrase.scripts.__main__ import run


class DownloadHandler(QuietHandler):
    """Answers the calls that downloading makes."""

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(path)
        if path == "/api/models/somebody/bart/revision/v1":
            siblings = [{"rfilename": name} for name in hub.files]
            content = {"id": "somebody/bart", "sha": hub.commit, "siblings": siblings}
            return self.answer(200, content)
        if path == f"/api/models/somebody/bart/tree/{hub.commit}":
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.files.items()
            ]
            return self.answer(200, files)
        name = path.removeprefix(f"/somebody/bart/resolve/{hub.commit}/")
        if name not in hub.files:
            return self.answer(404, {}, X_Error_Code="RepoNotFound")
        content = hub.files[name]
        tag = hashlib.sha1(content).hexdigest()
        self.answer(200, content, ETag=f'"{tag}"', X_Repo_Commit=hub.commit)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), DownloadHandler) as server:
        server.files, server.asked, server.commit = {}, [], "a" * 40
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.close_session()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    huggingface_hub.close_session()


def test_checkpoint_on_the_hub_is_converted(hub, tmp_path):
    theirs = bart_like("bart", draw("bart", 101), tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "theirs")
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    hub.files["pytorch_model.bin"] = b"a pickle"
    hub.files["tf_model.h5"] = b"another"
    hub.files["checkpoint-10/model.safetensors"] = b"of a run"
    execute(verb, ["somebody/bart", str(tmp_path / "ours"), "--revision", "v1"])
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(written["model.encoder.embed_tokens.weight"], theirs.get_input_embeddings().weight)
    provenance = json.loads((tmp_path / "ours" / "conversion.json").read_text(encoding="utf-8"))
    assert provenance["source"] == "somebody/bart"
    # Weights in a second format, and those that a run left behind, are not even fetched.
    assert not any(path.endswith((".bin", ".h5")) or "checkpoint-10" in path for path in hub.asked)
    assert "/api/models/somebody/bart/revision/v1" in hub.asked
    # Many older models have nothing else.
    del hub.files["model.safetensors"]
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    hub.files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    hub.commit = "b" * 40
    execute(verb, ["somebody/bart", str(tmp_path / "old"), "--revision", "v1"])
    old = load_file(tmp_path / "old" / "model.safetensors")
    assert old.keys() == written.keys() and all(torch.equal(old[name], written[name]) for name in old)


def test_checkpoint_that_is_not_there_is_one_line(hub, tmp_path, capsys):
    assert run("convert", ["somebody/else", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("metaphrase convert: error: ") and "somebody/else" in said and "Traceback" not in said
    assert not (tmp_path / "ours").exists()


def test_without_a_hub_and_without_a_folder_the_error_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert run("convert", ["no/such/folder", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert "`source` must be a folder that exists, or a name on the Hub, got 'no/such/folder'" in said
