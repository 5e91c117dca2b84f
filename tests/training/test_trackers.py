"""Tests of `report_to`: the scores that trackers get, from a resumed run too."""

import struct
import time
from pathlib import Path

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


@pytest.mark.parametrize(("fields", "name"), [({}, "run"), ({"run_name": "mine"}, "mine")])
def test_a_run_has_the_name_of_its_folder_unless_it_is_given_one(fields, name, data, tmp_path):
    assert make_recipe(data, tmp_path / "run", **fields).training_arguments().run_name == name


def test_a_tracker_that_is_not_installed_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"`report_to` must name what is installed, got trackio: .*pip install trackio"
    ):
        train(data, tmp_path / "run", **FIELDS, report_to="trackio")
