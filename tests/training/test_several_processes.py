import json
import re

import pytest
from pronunciations import PRONUNCIATIONS
from small_runs import write_pairs
from two_processes import Server

from metaphrase.choices import completion
from metaphrase.training.distributed import variables_of_slurm
from metaphrase.training.recipe.recipe import load_recipe

SIZES = [f"--model.{stack}_layers=1" for stack in ("encoder", "decoder")]
SMALL = [word for size in SIZES for word in size.split("=")] + ["--model.hidden_size", "16"]
WORDS = ["--train_file", "pairs.tsv", "--output_dir", "run", "--use_cpu", "--disable_tqdm"]


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.tsv", PRONUNCIATIONS[:300])
    return tmp_path


def test_the_first_clock_ends_both_processes_in_time(server, folder):
    words = [*WORDS, *SMALL, "--time_budget", "8s", "--num_beams", "1"]
    statuses, logs = server.run(folder, "train_by_another_clock", *words, launcher="srun")
    assert statuses == [0, 0], logs
    rates = [re.findall(r"^update (\d+): \[(.*)\]$", log, re.MULTILINE) for log in logs]
    assert rates[0] == rates[1] and len(rates[0]) > 1
    assert "The model lies in run" in logs[0] and "The model lies in run" not in logs[1]
    state = json.loads((folder / "run" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == int(rates[0][-1][0]) < state["max_steps"]
    assert json.loads((folder / "run" / "metrics.json").read_text(encoding="utf-8"))["scores"]


def test_two_processes_choose_as_one_does(server, folder):
    statuses, logs = server.run(folder, "choose", *WORDS)
    assert statuses == [0, 0], logs
    first, second = (json.loads(log.splitlines()[-1]) for log in logs)
    assert first == second
    experiment, _ = completion.complete(load_recipe(None, WORDS), is_dry_run=True)
    alone = experiment.recipe.to_dict()
    assert first["recipe"].keys() == alone.keys()
    counted = {name for name in alone if alone[name] != first["recipe"][name]}
    assert counted <= {"learning_rate", "max_steps", "warmup_steps", "eval_steps", "save_steps", "logging_steps"}
    assert experiment.prepare().encoded["train"]["input_ids"][:] == first["ids"]


def test_an_error_of_the_first_process_ends_both_and_is_shown_once(server, folder):
    statuses, logs = server.run(folder, "fail", *WORDS, *SMALL, "--max_steps", "2")
    assert statuses == [0, 0] and all("exit status 2" in log for log in logs), logs
    assert "".join(logs).count("error:") == 1 and "metaphrase train: error: the disk of the first" in logs[0]


def test_a_recipe_runs_in_a_group_of_the_launcher(server, folder):
    statuses, logs = server.run(folder, "train_in_python", *WORDS, *SMALL, "--max_steps", "2", "--num_beams", "1")
    assert statuses == [0, 0], logs
    assert logs[0].splitlines()[-1] == logs[1].splitlines()[-1]


STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "12345", "SLURM_NTASKS": "9", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[07-08,12],cpu1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}


def test_a_task_of_slurm_has_the_variables_of_torchrun():
    expected = {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu07"}
    assert variables_of_slurm(STEP) == expected | {"MASTER_PORT": "27345"}
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert variables_of_slurm(STEP | given) == expected | given
    # Two steps of a job may share a machine.
    assert variables_of_slurm(STEP | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] == "27346"
    for nodes, first in (("node1", "node1"), ("a,b", "a"), ("rack[1-2]node[3,5]-ib", "rack1node3-ib")):
        assert variables_of_slurm(STEP | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_other_processes_of_slurm_stay_alone():
    shell = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    changes = {"SLURM_NTASKS": "1"}, {"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}
    for variables in ({}, shell, *(STEP | change for change in changes)):
        assert not variables_of_slurm(variables)
