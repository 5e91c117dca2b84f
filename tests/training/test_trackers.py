"""Tests of `report_to`: the scores that trackers get, from a resumed run too."""

import time

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


def test_tensorboard_gets_all_of_a_resumed_run_without_set_up(data, tmp_path):
    pytest.importorskip("tensorboardX", reason="The writer of TensorBoard's files is not installed.")
    folder = tmp_path / "run"
    train(data, folder, **FIELDS | {"max_steps": 2}, report_to="tensorboard")
    # Names of the files hold the second.
    time.sleep(1)
    train(data, folder, **FIELDS, report_to="tensorboard", resume_from_checkpoint="true")
    events = [path.read_bytes() for path in folder.rglob("events.out.tfevents.*")]
    assert len(events) == 2
    assert all(name.encode() in content for name in LOGGED for content in events)


@pytest.mark.parametrize(("fields", "name"), [({}, "run"), ({"run_name": "mine"}, "mine")])
def test_a_run_has_the_name_of_its_folder_unless_it_is_given_one(fields, name, data, tmp_path):
    assert make_recipe(data, tmp_path / "run", **fields).training_arguments().run_name == name


def test_a_tracker_that_is_not_installed_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: False)
    with pytest.raises(RuntimeError, match="pip install trackio"):
        train(data, tmp_path / "run", **FIELDS, report_to="trackio")
