import json
import shutil
from pathlib import Path
from typing import Any

import torch
from small_runs import SMALL
from transformers import AutoModelForSeq2SeqLM

from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe, load_recipe

BASE = {"preset": "metaphrase-tiny", "vocab_size": 600, "max_steps": 6, "logging_steps": 1}
BASE |= {f"{event}_strategy": "steps" for event in ("eval", "save")} | {"eval_steps": 3, "save_steps": 3}
BASE |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "label_smoothing_factor": 0.1}
BASE |= {"generation_max_length": 12, "disable_tqdm": True, "use_cpu": True}


def make_recipe(data: Path, output: Path, **fields: Any) -> Recipe:
    """Return the recipe of a small run. Fields with the value None are left out."""
    fields = {**BASE, "train_file": "train.tsv", "validation_file": "validation.tsv", "test_file": "test.tsv", **fields}
    if fields.get("model_name_or_path") is not None:
        # A model to fine-tune has its dimensions and its vocabulary.
        fields |= dict.fromkeys(("preset", "vocab_size"))
    words = ["--data_dir", str(data), "--output_dir", str(output)]
    for name, value in {f"model.{key}": value for key, value in SMALL.items()}.items():
        if fields.get("model_name_or_path") is None:
            words += [f"--{name}", str(value)]
    for name, value in fields.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return load_recipe(None, words)


# One optimizer step and a checkpoint, without any evaluation.
ONE_STEP = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "test_file": None, "validation_file": None}


def train(data: Path, output: Path, **fields: Any) -> dict:
    return Experiment(make_recipe(data, output, **fields)).train()


def assert_resumed_equal(data: Path, run: Path, **fields: Any) -> Path:
    """Require that a copy of a run without its last checkpoint ends with the same bytes, and return the copy."""
    cut = shutil.copytree(run, run.with_name("cut"))
    shutil.rmtree(max(cut.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))
    (cut / "model.safetensors").unlink()
    train(data, cut, **fields, resume_from_checkpoint="true")
    assert (cut / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    return cut


def read_log(folder: Path, name: str = "eval_loss") -> list[dict]:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry for entry in state["log_history"] if name in entry]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
