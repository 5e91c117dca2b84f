"""Cases with a broken recipe: a field of another type or value, an unknown field, or a file that is no recipe."""

import random
from collections.abc import Iterator
from pathlib import Path

import yaml
from cases import VALUES, Case, mutate, run
from small_runs import SMALL
from tiny_generator import SOURCES, TARGETS

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
LEFT_OUT = (
    "dataloader",
    "fsdp",
    "deepspeed",
    "torch_compile",
    "local_rank",
    "use_cpu",
    "ddp",
    "tpu",
    "jit",
    "parallelism",
)
LEFT_OUT += ("hub_", "push_to_hub", "include_num_input", "auto_find", "num_train_epochs", "max_steps", "neftune")


def write_pairs(folder: Path) -> Path:
    """Write a file of pairs, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{source}\t{target}\n" for source, target in zip(SOURCES, TARGETS, strict=True)]
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    return folder / "pairs.tsv"


def train_words(folder: Path, recipe: dict, output: Path) -> list[str]:
    """Write a recipe, and return the command line of a training of a few steps."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"train_file": str(folder / "pairs.tsv")}), encoding="utf-8")
    return ["train", str(path), "--output_dir", str(output)]


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines of trainings and their plans, each with a broken recipe."""
    rng = random.Random(seed)
    write_pairs(folder)
    names = [name for name in (*OWN_FIELDS, *TRAINING_FIELDS) if not any(part in name for part in LEFT_OUT)]
    network = [name for name in MetaphraseConfig(vocab_size=9).to_dict() if "layers" not in name]
    run(train_words(folder, BASE, folder / "whole" / "run"), folder / "whole")
    weights = (folder / "whole" / "run" / "model.safetensors").read_bytes()
    for index in range(number):
        root, recipe = folder / str(index), dict(BASE)
        kind = rng.choices(("field", "network", "bytes", "order"), (12, 3, 4, 1))[0]
        expected, name = {}, kind
        if kind == "field":
            for field in rng.sample(names, rng.choice((1, 1, 2))):
                recipe[field] = rng.choice(VALUES)
                name += f" {field}={str(recipe[field])[:40]!r}"
        elif kind == "network":
            field, value = rng.choice(network), rng.choice(VALUES)
            recipe["model"], name = SMALL | {field: value}, f"network {field}={str(value)[:40]!r}"
        words = train_words(folder, recipe, root / "run")
        if kind == "order":
            lines = Path(words[1]).read_text("utf-8").split("\n")
            # A field of the network stands below its name.
            blocks = "\n".join(lines).replace("\n  ", "\0 ").split("\n")
            rng.shuffle(blocks)
            text = "# a comment\n\n" + "\r\n".join(block for block in blocks if block).replace("\0", "\r\n ") + "\r\n"
            Path(words[1]).write_bytes(text.encode())
            expected = {root / "run" / "model.safetensors": weights}
        elif kind == "bytes":
            mutation, content = mutate(Path(words[1]).read_bytes(), rng)
            Path(words[1]).write_bytes(content)
            name = f"bytes {mutation}"
        elif rng.random() < 0.5:
            words.append("--dry_run")
        yield Case(f"{name} {' '.join(words[4:])}", words, expected)
