"""Checkpoints of a run: which are whole, how they get and lose their names, and what a resumed run compares."""

import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from metaphrase.errors import MetaphraseError

logger = logging.getLogger(__name__)

# `MetaphraseTrainer` adds this file to those of transformers. Its `files` holds the size of each file.
PROGRESS_NAME = "progress.json"
# Arguments of the trainer. transformers writes them as a pickle, `training_args.bin`, which checkpoints of earlier versions hold.
ARGUMENTS_NAME = "training_args.json"
# A folder in the run's folder, on the same file system. transformers does not upload names with an underscore.
UNFINISHED_NAME = "_unfinished"
# Users may edit text files, such as the generation configuration.
_EDITABLE = (".json", ".txt", ".jinja", ".md", ".py", ".yaml")
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def checkpoint_of_step(run_dir: str | Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, whether it exists or not."""
    return Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(_CHECKPOINT.fullmatch(checkpoint.name)[1])


def checkpoints_in(run_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, in the order of their steps."""
    if not Path(run_dir).is_dir():
        return []
    folders = [path for path in Path(run_dir).iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of)


def what_is_missing(folder: str | Path) -> list[str]:
    """Return a phrase for each file that is missing or damaged in a checkpoint; an empty list if it is whole.

    A checkpoint of `MetaphraseTrainer` is compared with its own list of files and their sizes. A plain Trainer writes its state
    last.
    """
    progress = Path(folder) / PROGRESS_NAME
    if not progress.is_file():
        return [] if (Path(folder) / TRAINER_STATE_NAME).is_file() else [f"{TRAINER_STATE_NAME} is missing"]
    try:
        sizes = json.loads(progress.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError):
        return [f"{PROGRESS_NAME} is cut short or damaged"]
    problems, files = [], _files(Path(folder))
    for name, size in sizes.items():
        present = files[name].stat().st_size if name in files else None
        if present is None:
            problems.append(f"{name} is missing")
        elif present != size and not (present and name.endswith(_EDITABLE) and name != TRAINER_STATE_NAME):
            problems.append(f"{name} has {present} bytes in place of {size}")
    return problems


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def check_whole(checkpoint: str | Path) -> None:
    """Refuse to resume from a checkpoint that is not whole."""
    if problems := what_is_missing(checkpoint):
        raise MetaphraseError(
            f"`resume_from_checkpoint` must be a whole checkpoint, got {checkpoint}: {'; '.join(problems)}. Restore the file; or "
            "start a new run in another folder, from these weights by `model_name_or_path`."
        )


def check_last(checkpoint: str | Path, run_dir: str | Path) -> None:
    """Refuse to resume from a checkpoint of a run before its last whole one."""
    checkpoint, run_dir = Path(checkpoint).resolve(), Path(run_dir).resolve()
    last = last_whole_checkpoint(run_dir)
    if checkpoint.parent == run_dir and last is not None and step_of(checkpoint) < step_of(Path(last)):
        raise MetaphraseError(
            f"`resume_from_checkpoint` must be the last checkpoint of its run, got {checkpoint.name}, and there is {last}, "
            "which would belong to another course of the run. Move later checkpoints away first."
        )


def last_whole_checkpoint(run_dir: str | Path) -> str | None:
    """Return the whole checkpoint of the highest step, or None. A warning names each later one that is not whole."""
    for checkpoint in reversed(checkpoints_in(run_dir)):
        problems = what_is_missing(checkpoint)
        if not problems:
            return str(checkpoint)
        logger.warning("%s is not whole and is passed over: %s.", checkpoint, "; ".join(problems))
    return None


def publish_checkpoint(checkpoint: Path, progress: dict[str, Any]) -> None:
    """Give a checkpoint in the folder `UNFINISHED_NAME` its name, after all its files and their list have reached the disk.

    A checkpoint of that name, such as a damaged one, is deleted just before.
    """
    unfinished = checkpoint.parent / UNFINISHED_NAME / checkpoint.name
    sizes = {name: path.stat().st_size for name, path in _files(unfinished).items() if name != PROGRESS_NAME}
    text = json.dumps({**progress, "files": sizes}, indent=2)
    (unfinished / PROGRESS_NAME).write_text(text + "\n", encoding="utf-8")
    for path in [*unfinished.rglob("*"), unfinished]:
        _flush(path)
    if checkpoint.exists():
        discard_checkpoint(checkpoint)
    os.rename(unfinished, checkpoint)
    _flush(checkpoint.parent)
    with contextlib.suppress(OSError):  # It is not empty.
        unfinished.parent.rmdir()


def _flush(path: Path) -> None:
    if os.name == "nt":  # Windows flushes neither folders nor files opened for reading.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_checkpoint(checkpoint: str | Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill leaves no half checkpoint."""
    checkpoint = Path(checkpoint)
    discarded = checkpoint.parent / UNFINISHED_NAME / f"discarded-{checkpoint.name}"
    discarded.parent.mkdir(exist_ok=True)
    os.rename(checkpoint, discarded)
    shutil.rmtree(discarded)
    with contextlib.suppress(OSError):  # It is not empty.
        discarded.parent.rmdir()


def discard_surplus(run_dir: str | Path, limit: int | None, protected: Iterable[str | Path | None]) -> None:
    """Delete the oldest checkpoints of a run above `limit`, except those in `protected`.

    Age is that of the folder, not the step: a run that resumed from another folder may find later steps of an earlier run here.
    """
    if limit is None or limit <= 0:
        return
    checkpoints = checkpoints_in(run_dir)
    protected = {Path(path).resolve() for path in protected if path is not None}
    old = [path for path in checkpoints if path.resolve() not in protected]
    old.sort(key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
    for checkpoint in old[: max(0, len(checkpoints) - limit)]:
        discard_checkpoint(checkpoint)


# Progress


def read_progress(checkpoint: str | Path, settings: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any] | None:
    """Return a checkpoint's `progress.json`, or None for a checkpoint of a plain Trainer, and compare it with the resumed run.

    Args:
        checkpoint: The checkpoint to resume from.
        settings: Values that must be equal. None is unknown.
        layout: Values that decide which pairs the first N batches of an epoch hold. A warning names those that differ.

    Raises:
        MetaphraseError: If a setting differs.
    """
    path = Path(checkpoint) / PROGRESS_NAME
    if not path.is_file():
        logger.warning("%s holds no %s: the run goes on, but not bit for bit.", checkpoint, PROGRESS_NAME)
        return None
    progress = json.loads(path.read_text(encoding="utf-8"))
    for name, present in settings.items():
        before = progress.get(name)
        if None not in (before, present) and before != present:
            raise MetaphraseError(
                f"`{name}` must stay as before when a run is resumed, got {present}, before {before}. Restore it, or start a new "
                "run from the weights by `model_name_or_path`. With `ignore_data_skip: true`, the data may differ."
            )
    different = [f"{name} {progress[name]}, now {now}" for name, now in layout.items() if progress.get(name) != now]
    if different:
        logger.warning("The run resumes at another position in the data: before, it had %s.", "; ".join(different))
    return progress


# Scores in the log

DEFAULT_METRIC = "eval_bleu"
LOWER_IS_BETTER = ("loss", "perplexity", "ter", "wer", "cer")
RECIPE_NAME = "recipe.yaml"
# Names the averaged checkpoints. A folder with this file may be overwritten.
PROVENANCE_NAME = "average.json"


def is_better_lower(metric: str) -> bool:
    """True if a metric is a loss, a perplexity or an error rate, also of a task or with `eval_` before it."""
    return metric.rpartition("_")[2] in LOWER_IS_BETTER


def scores_in(log: Iterable[Mapping], metric: str) -> dict[int, float]:
    """Return a metric of each step in a trainer's log, with a sign so that higher is better. NaN is left out."""
    sign, name = -1 if is_better_lower(metric) else 1, f"eval_{metric.removeprefix('eval_')}"
    return {entry["step"]: sign * entry[name] for entry in log if name in entry and not math.isnan(entry[name])}
