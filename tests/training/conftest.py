import shutil

import pytest
from small_experiments import ONE_STEP, train

from metaphrase.choices import estimate


@pytest.fixture(autouse=True)
def few_timed_steps(monkeypatch):
    """Time two steps of each network, since the speed decides nothing here."""
    monkeypatch.setattr(estimate, "TIMED_STEPS", 2)


@pytest.fixture(scope="session")
def run_of_one_step(corpus_folder, tmp_path_factory):
    """The folder of a run of `ONE_STEP`, not to be changed."""
    folder = tmp_path_factory.mktemp("one_step") / "run"
    train(corpus_folder, folder, **ONE_STEP)
    return folder


@pytest.fixture
def trained(run_of_one_step, tmp_path):
    return shutil.copytree(run_of_one_step, tmp_path / "run")
