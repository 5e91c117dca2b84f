import pytest
from small_experiments import ONE_STEP, make_recipe, train
from transformers.integrations import integration_utils

LOGGED = {"train/loss", "train/learning_rate", "eval/loss", "eval/exact_match"}


def test_tensorboard_gets_all_of_a_resumed_run_without_set_up(data, trained):
    pytest.importorskip("tensorboardX", reason="The writer of TensorBoard's files is not installed.")
    fields = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "validation_file": "validation.tsv"}
    fields |= {"max_decoded_samples": 2, "metrics": ["exact_match"], "resume_from_checkpoint": "true"}
    train(data, trained, **ONE_STEP | fields, report_to="tensorboard")
    [events] = [path.read_bytes() for path in trained.rglob("events.out.tfevents.*")]
    assert all(name.encode() in events for name in LOGGED)


@pytest.mark.parametrize(("fields", "name"), [({}, "run"), ({"run_name": "mine"}, "mine")])
def test_a_run_has_the_name_of_its_folder_unless_it_is_given_one(fields, name, data, tmp_path):
    assert make_recipe(data, tmp_path / "run", **fields).training_arguments().run_name == name


def test_a_tracker_that_is_not_installed_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: False)
    with pytest.raises(RuntimeError, match="pip install trackio"):
        train(data, tmp_path / "run", **ONE_STEP, report_to="trackio")
