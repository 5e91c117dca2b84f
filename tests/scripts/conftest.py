import pickle
import shutil
import threading

import huggingface_hub
import pytest
from hub_stand_in import StandIn
from huggingface_hub import constants
from pushed_folder import FORBIDDEN
from tiny_generator import save_generator, tiny_generator


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # The store of large files is reached by the plain protocol, which needs no second service.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with StandIn() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        huggingface_hub.close_session()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    huggingface_hub.close_session()


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A folder as training leaves it, with all that must not leave the machine."""
    path = save_generator(tiny_generator(joint=False), tmp_path_factory.mktemp("pushed") / "trained")
    contents = {"recipe.yaml": "seed: 1\n", "metrics.json": "{}", "test_predictions.txt": "ein\n", "vmap.txt": "\ta\n"}
    for name, content in contents.items():
        (path / name).write_text(content, encoding="utf-8")
    for name in FORBIDDEN:
        (path / name).parent.mkdir(exist_ok=True)
        is_read = name == "trainer_state.json"
        (path / name).write_bytes(b'{"forbidden": 1}' if is_read else pickle.dumps("forbidden"))
    return path


@pytest.fixture
def folder(template, tmp_path):
    return shutil.copytree(template, tmp_path / "trained")
