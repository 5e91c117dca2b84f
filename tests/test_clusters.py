"""Tests of docs/clusters.md: its files and commands are valid, and train as several processes on one machine do."""

import re
import shlex
import subprocess

import click
import pytest
import yaml
from huggingface_hub.cli.hf import app
from job_server import free_port
from launched_runs import assert_same_weights, launch, words_of, write_commands
from source_files import ROOT
from torch.distributed.run import get_args_parser

from metaphrase.scripts.parsers import parse

PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
BLOCKS = [(kind, text.replace("\\\n", " ")) for kind, text in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)]
NODES = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines() if "--node_rank" in line]
SLURM = [text for language, text in BLOCKS if language == "sbatch"]
[SKY] = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]
[JOB] = [text for language, text in BLOCKS if language == "bash" and text.startswith("hf jobs")]
# Keys of SkyPilot's schema, sky/utils/schemas.py.
SKY_KEYS = {"name", "num_nodes", "resources", "volumes", "file_mounts", "workdir", "setup", "run", "envs", "secrets"}
RESOURCE_KEYS = {"infra", "accelerators", "cpus", "memory", "use_spot", "disk_size", "image_id", "job_recovery"}


def commands_in(text, name):
    """Return the words of each command of a script that begins with a name, up to the end of the shell's command."""
    # A newline ends a command, too, and a comment.
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words, commands = list(lexer), []
    for start in [index for index, word in enumerate(words) if word == name]:
        ends = [index for index, word in enumerate(words) if index > start and word in ("&", "&&", ";")]
        commands.append(words[start + 1 : min([*ends, len(words)])])
    return commands


def run_torchrun(words):
    """Return what torchrun reads from words, of which those of ours are parsed too."""
    numbers = {"$": "1"}
    known = get_args_parser().parse_args([numbers.get(word[:1], word) for word in words])
    assert known.module and known.training_script == "metaphrase.scripts.train"
    return known, parse("train", known.training_script_args)


@pytest.mark.parametrize("line", NODES)
def test_each_machine_has_its_number(line):
    known, ours = run_torchrun(shlex.split(line)[1:])
    assert known.nnodes == "2" and known.node_rank == NODES.index(line) and ours.recipe == ["my_recipe.yaml"]


@pytest.mark.parametrize("script", SLURM)
def test_slurm_scripts_are_bash_and_resume(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--requeue" in script.splitlines()[1] + script.splitlines()[2]
    started = commands_in(script, "torchrun")
    for words in started:
        assert run_torchrun(words)[1].resume and "scontrol show hostnames" in script
    if not started:
        [words] = commands_in(script, "metaphrase")
        assert parse("train", words[1:]).resume


def test_the_task_has_keys_of_skypilot():
    assert SKY.keys() <= SKY_KEYS and SKY["resources"].keys() <= RESOURCE_KEYS
    subprocess.run(["bash", "-n"], input=SKY["run"], text=True, check=True)
    [words] = commands_in(SKY["run"].replace('$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', "HOST"), "torchrun")
    known, ours = run_torchrun(words)
    assert known.master_addr == "HOST" and ours.resume


def test_the_job_is_one_of_hugging_face():
    # The groups load their commands when they are asked for them.
    hf = click.Context(app)
    jobs, buckets = (app.get_command(hf, name) for name in ("jobs", "buckets"))
    words = shlex.split(JOB)
    values = jobs.get_command(hf, "run").make_context("run", words[3:]).params
    *_, shell, option, script = values["command"]
    assert values["image"] == "IMAGE" and values["attempts"] == 3 and (shell, option) == ("bash", "-c")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    [words] = commands_in(script, "torchrun")
    assert run_torchrun(words)[1].resume
    for words in commands_in(script, "hf"):
        assert buckets.get_command(hf, "sync").make_context("sync", words[1:]).params["source"]


def on_loopback(line, words, number):
    """Return the command of a machine of the page for a process on a loopback address of its own."""
    line = line.replace("10.0.0.1", "127.0.0.1").replace("--nproc_per_node 8", "--nproc_per_node 1")
    return line.replace("-m ", f"--local_addr 127.0.0.{number + 1} -m ").replace("my_recipe.yaml", shlex.join(words))


@pytest.mark.slow
def test_two_machines_train_as_one(reference, corpus_folder, tmp_path):
    port = str(free_port())
    words = words_of(corpus_folder, tmp_path / "run")
    lines = [on_loopback(line, words, number).replace("29500", port) for number, line in enumerate(NODES)]
    # A cache that both machines fill at once.
    launch(*lines, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert_same_weights(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("script", SLURM)
def test_slurm_scripts_train_and_go_on(script, reference, corpus_folder, tmp_path):
    starts_one = "torchrun" in script
    one_task = 'exec "${@:2}"'
    many_tasks = 'for k in 0 1; do SLURM_PROCID=$k SLURM_LOCALID=$k "${@:2}" & done; wait'
    path = write_commands(
        tmp_path / "bin",
        srun=one_task if starts_one else many_tasks,
        scontrol="echo 127.0.0.1",
        metaphrase='exec python -m metaphrase "$@"',
    )
    variables = {"NNODES": "1", "NTASKS": "2", "JOB_ID": "7", "STEP_ID": "0", "JOB_NODELIST": "localhost"}
    variables = {f"SLURM_{name}": value for name, value in variables.items()} | {"PATH": path}
    script = script.replace("29500", str(free_port())).replace("--nproc_per_node 8", "--nproc_per_node 2")
    for steps in (3, 6):
        words = words_of(corpus_folder, tmp_path / "run", max_steps=steps, lr_scheduler_type="constant")
        text = script.replace("my_recipe.yaml --output_dir /shared/runs/my_recipe", shlex.join(words))
        launch(text, **variables)
    whole = words_of(corpus_folder, tmp_path / "whole", lr_scheduler_type="constant")
    launch(f"torchrun --nproc_per_node 2 --master_port {free_port()} -m metaphrase.scripts.train {shlex.join(whole)}")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_machines_without_a_shared_folder_save_and_resume_on_each(reference, corpus_folder, tmp_path):
    for steps in (3, 6):
        port, lines = str(free_port()), []
        for number, line in enumerate(NODES):
            fields = {"save_on_each_node": True, "max_steps": steps, "resume_from_checkpoint": True}
            words = words_of(corpus_folder, tmp_path / str(number), **fields, lr_scheduler_type="constant")
            lines.append(on_loopback(line, words, number).replace("29500", port))
        launch(*lines)
    assert_same_weights(tmp_path / "1" / "checkpoint-6", tmp_path / "0")
    assert_same_weights(tmp_path / "1", tmp_path / "0")


@pytest.mark.slow
def test_machines_with_other_data_or_checkpoints_are_refused(corpus_folder, data, tmp_path):
    train = data / "train.tsv"
    train.write_text("".join(reversed(train.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")
    port = str(free_port())
    words = [words_of(folder, tmp_path / "run") for folder in (corpus_folder, data)]
    lines = [on_loopback(line, words[number], number).replace("29500", port) for number, line in enumerate(NODES)]
    for text in launch(*lines, fails=True):
        assert "All processes must have the same data, versions and checkpoint" in text
    assert not list(tmp_path.glob("run/checkpoint-*"))
