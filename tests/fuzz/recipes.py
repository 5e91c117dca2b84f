"""Cases with a broken recipe: a field of another type or value, an unknown field, or a file that is no recipe.

A run that succeeds must leave finite weights that `generate` reads. A run that is refused must not pass as a dry run.
"""

import functools
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cases import VALUES, Case, Result, mutate, run, write_world
from safetensors.torch import load_file
from small_runs import SMALL
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.recipe.fields import OWN_FIELDS, TRAINING_FIELDS

BASE = {
    "tokenizer_kind": "char",
    "preset": "metaphrase-tiny",
    "model": SMALL,
    "num_train_epochs": 1,
    "report_to": "none",
}
BASE |= {"per_device_train_batch_size": 4, "use_cpu": True, "num_validation": 1, "generation_max_length": 8, "seed": 3}
# These mean other machines, other processes, or much work.
LEFT_OUT = ("dataloader", "fsdp", "deepspeed", "torch_compile", "local_rank", "use_cpu", "ddp", "tpu", "jit", "hub_")
LEFT_OUT += ("parallelism", "push_to_hub", "include_num_input", "auto_find", "num_train_epochs", "max_steps", "neftune")
# A run of four updates, with a checkpoint, logs and scores.
RUN = BASE | {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "logging_steps": 1}
NUMBERS = [
    *range(-1, 4),
    *(0.5, 0.1, 0.999, 1.5, -0.1, 1e-9, 5e-324, 1e3, 1e10, 1e30, 1e308, math.inf, -math.inf, math.nan),
]
NAMES = {"optim": OptimizerNames, "lr_scheduler_type": SchedulerType, "save_strategy": SaveStrategy}
NAMES |= {"eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy}


def train_words(folder: Path, recipe: dict, output: Path) -> list[str]:
    """Write a recipe, and return the command line of a training of a few steps."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"train_file": str(folder / "pairs.tsv")}), encoding="utf-8")
    return ["train", str(path), "--output_dir", str(output)]


def check_run(folder: Path, words: list[str], result: Result) -> str:
    """Return what is wrong with a run that has ended, or "" if nothing is."""
    output = Path(words[3])
    if result.status != 0:
        # The divergence of a run shows only when it runs.
        if " finite" in result.messages:
            return ""
        dry = run([*words[:3], str(folder / "dry"), *words[4:], "--dry_run"], folder)
        return "" if dry.status == 2 else f"the dry run accepts: {result.messages[-500:]}"
    weights = [load_file(path) for path in output.rglob("*.safetensors")]
    if any(not weight.isfinite().all() for file in weights for weight in file.values()):
        return "the weights are not finite"
    end = run(
        ["generate", str(output), "--input", str(folder.parent / "in"), "--output", str(folder / "targets")], folder
    )
    return "" if end.status == 0 else f"generate fails: {end.messages[-500:]}"


def type_of(item: Any) -> str:
    """Return the type of a field, ours or of transformers."""
    return str(getattr(item, "annotation", None) or item.type)


def draw(name: str, item: Any, rng: random.Random) -> Any:
    """Return a value of the type of a field, in or out of its range."""
    kind = type_of(item)
    if name in NAMES:
        return rng.choice(list(NAMES[name])).value
    if "bool" in kind:
        return rng.random() < 0.5
    value = rng.choice(NUMBERS)
    # A number without a fraction is an integer in YAML.
    return int(value) if "float" not in kind and math.isfinite(value) and rng.random() < 0.9 else value


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines of trainings and their plans, each with a broken recipe."""
    rng = random.Random(seed)
    write_world(folder)
    names = [name for name in (*OWN_FIELDS, *TRAINING_FIELDS) if not any(part in name for part in LEFT_OUT)]
    fields = {name: (OWN_FIELDS | TRAINING_FIELDS)[name] for name in names}
    drawn = [name for name, item in fields.items() if name in NAMES or re.search("int|float|bool", type_of(item))]
    network = [name for name in MetaphraseConfig(vocab_size=9).to_dict() if "layers" not in name]
    for index in range(number):
        root, recipe = folder / str(index), dict(BASE)
        kind = rng.choices(("field", "network", "bytes", "run"), (12, 3, 4, 4))[0]
        name, options = kind, []
        if kind == "field":
            for field in rng.sample(names, rng.choice((1, 1, 2))):
                recipe[field] = rng.choice(VALUES)
                name += f" {field}={str(recipe[field])[:40]!r}"
        elif kind == "network":
            field, value = rng.choice(network), rng.choice(VALUES)
            recipe["model"], name = SMALL | {field: value}, f"network {field}={str(value)[:40]!r}"
        elif kind == "run":
            recipe, chosen = dict(RUN), rng.sample(drawn, rng.choice((1, 2, 3)))
            values = {field: draw(field, fields[field], rng) for field in chosen}
            name += f" {values}"
            if rng.random() < 0.3:
                options = [word for field, value in values.items() for word in (f"--{field}", str(value))]
            else:
                recipe |= values
        words = train_words(folder, recipe, root / "run") + options
        if kind == "bytes":
            mutation, content = mutate(Path(words[1]).read_bytes(), rng)
            Path(words[1]).write_bytes(content)
            name = f"bytes {mutation}"
        elif kind != "run" and rng.random() < 0.5:
            words.append("--dry_run")
        broken = [field for field in recipe if recipe[field] is not BASE.get(field)]
        check = None if "--dry_run" in words else functools.partial(check_run, root, words)
        yield Case(f"{name} {' '.join(words[4:])}", words, check=check, fields=broken)
