"""Tests of `report_to`: the scores that trackers get, from a resumed run too."""

import struct
import sys
import time
from importlib.machinery import ModuleSpec
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from small_experiments import make_recipe, train
from transformers.integrations import integration_utils

# Two evaluations, and a logged loss for each step.
FIELDS = {
    "max_steps": 4,
    "eval_steps": 2,
    "save_steps": 2,
    "vocab_size": None,
    "tokenizer_kind": "char",
    "test_file": None,
}
FIELDS |= {"max_decoded_samples": 2, "metrics": ["exact_match"]}
LOGGED = {"train/loss", "train/learning_rate", "eval/loss", "eval/exact_match"}


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values of all TensorBoard files below a folder, by name and step."""
    from tensorboardX.proto.event_pb2 import Event

    values: dict[str, dict[int, float]] = {}
    for path in folder.rglob("events.out.tfevents.*"):
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            # A record has its length, a checksum of 4 bytes, an event, and another checksum.
            (length,) = struct.unpack_from("<Q", content, offset)
            event = Event.FromString(content[offset + 12 : offset + 12 + length])
            for value in event.summary.value:
                values.setdefault(value.tag, {})[event.step] = value.simple_value
            offset += length + 16
    return values


def test_tensorboard_gets_all_of_a_resumed_run_without_set_up(data, tmp_path):
    pytest.importorskip("tensorboardX", reason="The writer of TensorBoard's files is not installed.")
    folder = tmp_path / "run"
    train(data, folder, **FIELDS | {"max_steps": 2}, report_to="tensorboard")
    # Names of the files hold the second.
    time.sleep(1)
    train(data, folder, **FIELDS, report_to="tensorboard", resume_from_checkpoint="true")
    values = scalars(folder)
    assert values.keys() >= LOGGED
    assert set(values["train/loss"]) == {1, 2, 3, 4} and set(values["eval/exact_match"]) == {2, 4}


@pytest.fixture
def stand_in(monkeypatch):
    """Return a function that installs a module which records all calls."""

    def install(name: str) -> MagicMock:
        module = MagicMock(name=name, __spec__=ModuleSpec(name, None), __version__="9.0")
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)
        return module

    return install


@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow"])
def test_other_trackers_get_the_same_under_the_name_of_the_folder(name, stand_in, data, tmp_path, monkeypatch):
    module = stand_in(name)
    if name == "mlflow":
        module.utils.validation.MAX_PARAM_VAL_LENGTH = module.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
        module.active_run.side_effect = chain([None], repeat(MagicMock()))
        begin, logged = module.start_run, module.log_metrics
    else:
        module.run = None
        begin, logged = module.init, module.log
    if name == "wandb":
        module.init.side_effect = lambda **_: setattr(module, "run", MagicMock())
        for part in ("sdk", "sdk.lib", "sdk.lib.config_util"):
            monkeypatch.setitem(sys.modules, f"wandb.{part}", MagicMock(ConfigError=KeyError))
    train(data, tmp_path / "my_run", **FIELDS, report_to=name)
    [call] = begin.call_args_list
    assert call.kwargs["run_name" if name == "mlflow" else "name"] == "my_run"
    names = {key for call in logged.call_args_list for key in (call.args or [call.kwargs.get("metrics")])[0]}
    expected = {key.removeprefix("train/").replace("eval/", "eval_") for key in LOGGED} if name == "mlflow" else LOGGED
    assert names >= expected


def test_a_given_name_stays(data, tmp_path):
    assert make_recipe(data, tmp_path / "run", run_name="mine").training_arguments().run_name == "mine"


def test_a_tracker_that_is_not_installed_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"`report_to` must name what is installed, got trackio: .*pip install trackio"
    ):
        train(data, tmp_path / "run", **FIELDS, report_to="trackio")
