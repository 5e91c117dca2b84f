import os
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import Seq2SeqTrainingArguments

from metaphrase.choices.memory import Sharding

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes" / "accelerate"
FILES = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}
LAUNCHERS = {"MULTI_GPU": "multi_gpu", "FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed"}


def launch_arguments(name):
    """What `accelerate launch` makes of a file."""
    words = ["--config_file", str(FILES[name]), "--main_process_port", "0", "train.py", "recipe.yaml", "--use_cpu"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments


@pytest.fixture
def environment():
    """Sets what the launcher of a file would set for the processes that it starts, until the test ends."""

    def launch(name):
        arguments = launch_arguments(name)
        is_deepspeed = arguments.use_deepspeed
        os.environ.update(prepare_deepspeed_cmd_env(arguments)[1] if is_deepspeed else prepare_multi_gpu_env(arguments))

    with patch.dict(os.environ):
        yield launch


@pytest.mark.parametrize("name", FILES)
def test_accelerate_takes_the_file_and_starts_its_processes(name):
    settings = yaml.safe_load(FILES[name].read_text())
    config = load_config_from_file(str(FILES[name]))
    assert config.num_processes == settings["num_processes"] == (2 if "cpu_2_processes" in name else 8)
    arguments = launch_arguments(name)
    assert arguments.num_processes == config.num_processes
    # Only these launchers start several processes, and --cpu is stronger than all of them.
    launcher = LAUNCHERS[settings["distributed_type"]]
    assert [flag for flag in LAUNCHERS.values() if getattr(arguments, flag)] == [launcher]
    assert not arguments.cpu and arguments.training_script_args == ["recipe.yaml", "--use_cpu"]
    assert arguments.mixed_precision == "no"
    known = set(vars(launch_command_parser().parse_args(["train.py"])))
    for group in ("fsdp_config", "deepspeed_config"):
        for key, value in settings.get(group, {}).items():
            # accelerate itself puts unknown keys of a group aside without a word.
            assert key in known, key
            assert getattr(arguments, key) == value


@pytest.mark.parametrize(
    ("name", "engine", "stage"),
    [
        ("ddp.yaml", "ddp", 0),
        ("fsdp2.yaml", "fsdp", 3),
        ("deepspeed_zero2.yaml", "deepspeed", 2),
        ("deepspeed_zero3.yaml", "deepspeed", 3),
        ("deepspeed_zero3_offload.yaml", "deepspeed", 3),
    ],
)
def test_estimate_reads_what_the_launcher_sets(name, engine, stage, environment, tmp_path):
    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    environment(name)
    sharding = Sharding.of(arguments, devices=8)
    assert (sharding.engine, sharding.stage, sharding.devices) == (engine, stage, 8)
    assert sharding.is_offloaded == ("offload" in name)
