"""Runs of several processes, started by the commands that users type."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from small_runs import SMALL
from source_files import ROOT

FIELDS = {f"{split}_file": f"{split}.tsv" for split in ("train", "validation", "test")}
FIELDS |= {f"{event}_strategy": "steps" for event in ("eval", "save")} | {"eval_steps": 3, "save_steps": 3}
FIELDS |= {"max_steps": 6, "logging_steps": 1, "learning_rate": 3e-3, "adam_epsilon": 1e-4, "preset": "metaphrase-tiny"}
FIELDS |= {"tokenizer_kind": "byte", "max_tokens_per_batch": 256, "metrics": "bleu", "generation_max_length": 12}
FIELDS |= {"use_cpu": True, "choose_decoding": False, "ddp_timeout": 60, "model.dropout": 0.1}
FIELDS |= {f"model.{name}": value for name, value in SMALL.items()}


def words_of(data, output, **fields):
    """Return the words after the recipe's name, in which the later of equal fields holds."""
    fields = {"data_dir": data, "output_dir": output} | FIELDS | fields
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def launch(*commands, fails=False, **variables):
    """Carry out command lines at once, in a shell, and return what each has written."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT, "env": environment}
    started = [subprocess.Popen(["bash", "-c", command], **options) for command in commands]
    texts = [process.communicate(timeout=400)[0] for process in started]
    for process, text in zip(started, texts, strict=True):
        assert (process.returncode != 0) == fails, text[-5000:]
    return texts


def assert_same_weights(actual, expected):
    first, second = (load_file(folder / "model.safetensors") for folder in (actual, expected))
    assert first.keys() == second.keys()
    for name, weight in second.items():
        torch.testing.assert_close(first[name], weight, rtol=0, atol=1e-4, msg=name)


def write_commands(folder, **scripts):
    """Write shell scripts that stand in for commands, and return a PATH with them."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    bash = Path(shutil.which("bash")).parent
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), str(bash), os.environ["PATH"]])
