"""Cases with a broken file in a run folder: a run that resumes, an average, and a checkpoint that generates."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from cases import Case, mutate, run, write_world
from recipes import BASE, train_words

from metaphrase.training.checkpointing.folders import what_is_missing

RECIPE = BASE | {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "num_validation": 0}


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines, each with a copy of a run folder that has one broken file."""
    rng = random.Random(seed)
    write_world(folder)
    words = train_words(folder, RECIPE, folder / "whole" / "run")
    run(words, folder / "whole")
    weights = (folder / "whole" / "run" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "whole" / "run" / "checkpoint-4")
    for index in range(number):
        root = folder / str(index)
        copy = Path(shutil.copytree(folder / "whole" / "run", root / "run", copy_function=os.link))
        last = copy / "checkpoint-3"
        file = rng.choice([path for path in sorted(rng.choice((copy, last)).rglob("*")) if path.is_file()])
        content, kind = file.read_bytes(), rng.choice(("broken", "broken", "missing", "none"))
        file.unlink()
        if kind == "none":
            file.write_bytes(content)
        elif kind != "missing":
            kind, content = mutate(content, rng)
            file.write_bytes(content)
        verb = rng.choice(("train", "train", "average", "generate"))
        expected = {}
        if verb == "train":
            words = [*train_words(folder, RECIPE, copy), "--resume"]
            if kind == "none" or (file.is_relative_to(last) and kind == "missing" and what_is_missing(last)):
                # A checkpoint that is not complete is passed over.
                expected = {copy / "model.safetensors": weights}
        elif verb == "average":
            words = ["average", str(copy), "--last", "2", "--output", str(root / "out")]
        else:
            words = ["generate", str(last), "--input", str(folder / "in"), "--output", str(root / "out")]
        yield Case(f"{verb}: {file.relative_to(copy)}: {kind}", words, expected)
