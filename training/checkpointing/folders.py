"""Checkpoint folders of a run: which are whole, and how they appear and disappear so that a kill leaves no half checkpoint."""

import contextlib
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

logger = logging.getLogger(__name__)

# `WholeCheckpoints` adds this file to those of transformers. Its `files` holds the size of each file.
PROGRESS_NAME = "progress.json"
# Arguments of the trainer. transformers writes them as a pickle, `training_args.bin`, which checkpoints of earlier versions hold.
ARGUMENTS_NAME = "training_args.json"
# A folder in the run's folder, on the same file system. transformers does not upload names with an underscore.
UNFINISHED_NAME = "_unfinished"
# Prefix of a folder with the checkpoints after the one that the run went back to.
ABANDONED_NAME = "_abandoned"
# Users may edit text files, such as the generation configuration.
_EDITABLE = (".json", ".txt", ".jinja", ".md", ".py", ".yaml")
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_ABANDONED = re.compile(rf"({ABANDONED_NAME}-(\d+))(-after-(\d+))?")
_WEIGHTS = re.compile(r"(.*/)?(model|pytorch_model|adapter_model).*\.(safetensors|bin|distcp)|global_step\d+/.+")
_ZIP = re.compile(r".+\.pth?|(.*/)?(pytorch_model|adapter_model|optimizer|training_args).*\.bin")


def checkpoint_of_step(run_folder: str | Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, whether it exists or not."""
    return Path(run_folder) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(_CHECKPOINT.fullmatch(checkpoint.name)[1])


def checkpoints_in(run_folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, in the order of their steps."""
    if not Path(run_folder).is_dir():
        return []
    folders = [path for path in Path(run_folder).iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of)


def what_is_missing(folder: str | Path) -> list[str]:
    """Return a phrase for each thing that is missing or damaged in a checkpoint; an empty list if it is whole.

    A checkpoint of `WholeCheckpoints` is compared with its own list of files. A plain Trainer's must have weights and the
    trainer's state, which is written last. Damage is found as far as a format shows it without reading the whole file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return ["there is no such folder"]
    files = _files(folder)
    problems = [f"{name} {damage}" for name, path in files.items() if (damage := _damage(name, path))]
    if PROGRESS_NAME not in files:
        problems += [] if TRAINER_STATE_NAME in files else [f"{TRAINER_STATE_NAME} is missing"]
        return problems + ([] if any(map(_WEIGHTS.fullmatch, files)) else ["the weights are missing"])
    if any(problem.startswith(PROGRESS_NAME) for problem in problems):
        return problems
    for name, size in json.loads(files[PROGRESS_NAME].read_text(encoding="utf-8"))["files"].items():
        if name not in files:
            problems.append(f"{name} is missing")
            continue
        present = files[name].stat().st_size
        if present != size and not (present and name.endswith(_EDITABLE)):
            problems.append(f"{name} has {present} bytes in place of {size}")
    return problems


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _damage(name: str, path: Path) -> str | None:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif _ZIP.fullmatch(name):
            zipfile.ZipFile(path).close()
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            if name == PROGRESS_NAME:
                content["files"].items()
            if path.name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
                shards = sorted(set(content["weight_map"].values()))
                lost = [shard for shard in shards if not (path.parent / shard).is_file()]
                return f"names {', '.join(lost)}, which is missing" if lost else None
        elif path.suffix == ".distcp" and not (path.parent / ".metadata").is_file():
            return "has no .metadata beside it"
    except (
        SafetensorError,
        zipfile.BadZipFile,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        RecursionError,
    ):
        return "is cut short or damaged"
    return None


def check_whole(checkpoint: str | Path) -> None:
    """Check that a checkpoint to resume from is whole.

    Raises:
        ValueError: If something is missing or damaged.
    """
    if problems := what_is_missing(checkpoint):
        raise ValueError(
            f"`resume_from_checkpoint` must be a whole checkpoint, got {checkpoint}: {'; '.join(problems)}."
        )


def last_whole_checkpoint(run_folder: str | Path) -> str | None:
    """Return the whole checkpoint of the highest step, or None. A warning names each later one that is not whole.

    First it completes what a killed run had begun: replacing a checkpoint, or setting later ones aside.
    """
    _put_back_replaced(Path(run_folder))
    _finish_setting_aside(Path(run_folder))
    for checkpoint in reversed(checkpoints_in(run_folder)):
        problems = what_is_missing(checkpoint)
        if not problems:
            return str(checkpoint)
        logger.warning("%s is not whole and is passed over: %s.", checkpoint, "; ".join(problems))
    return None


def set_later_aside(checkpoint: str | Path, run_folder: str | Path) -> None:
    """Move the checkpoints after the one that the run resumes from out of the run.

    They and the log of the run move to a folder `_abandoned-1` or the next number. A warning names them. For a checkpoint of
    another run nothing moves. After a kill, `last_whole_checkpoint` or `remove_unfinished` completes it.
    """
    checkpoint, run_folder = Path(checkpoint).resolve(), Path(run_folder)
    if not _CHECKPOINT.fullmatch(checkpoint.name) or checkpoint.parent != run_folder.resolve():
        return
    step = step_of(checkpoint)
    if any(step_of(path) > step for path in checkpoints_in(run_folder)):
        number = max((int(match[2]) for match in _abandoned_in(run_folder)), default=0) + 1
        # This name settles which checkpoints move.
        (run_folder / f"{ABANDONED_NAME}-{number}-after-{step}").mkdir()
        _flush(run_folder)
        _finish_setting_aside(run_folder)


def _abandoned_in(run_folder: Path) -> list[re.Match]:
    names = sorted(path.name for path in run_folder.iterdir()) if run_folder.is_dir() else []
    return [match for match in map(_ABANDONED.fullmatch, names) if match]


def _finish_setting_aside(run_folder: Path) -> None:
    for match in _abandoned_in(run_folder):
        if match[4] is None:
            continue
        step, moving, aside = int(match[4]), run_folder / match[0], run_folder / match[1]
        later = [checkpoint for checkpoint in checkpoints_in(run_folder) if step_of(checkpoint) > step]
        # Several processes may run this at once; each move succeeds in one of them.
        for path in [*later, run_folder / TRAINER_STATE_NAME]:
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, moving / path.name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(moving, aside)
            _flush(run_folder)
            names = ", ".join(path.name for path in checkpoints_in(aside))
            logger.warning("The run goes on from step %d: what was later, %s, now lies in %s.", step, names, aside)


def unfinished_folder(checkpoint: Path) -> Path:
    """Return the folder where a checkpoint is written before it gets its name."""
    return checkpoint.parent / UNFINISHED_NAME / checkpoint.name


def publish_checkpoint(checkpoint: Path, progress: dict[str, Any]) -> None:
    """Give a checkpoint its name, after all its files and their list have reached the disk.

    An existing checkpoint of that name is renamed just before. After a kill in between, `last_whole_checkpoint` or
    `remove_unfinished` gives it its name back.
    """
    unfinished = unfinished_folder(checkpoint)
    sizes = {name: path.stat().st_size for name, path in _files(unfinished).items() if name != PROGRESS_NAME}
    text = json.dumps({**progress, "files": sizes}, indent=2)
    (unfinished / PROGRESS_NAME).write_text(text + "\n", encoding="utf-8")
    for path in [*unfinished.rglob("*"), unfinished]:
        _flush(path)
    replaced = unfinished.parent / f"replaced-{checkpoint.name}"
    if checkpoint.exists():
        os.rename(checkpoint, replaced)
    os.rename(unfinished, checkpoint)
    _flush(checkpoint.parent)
    remove_folder(replaced)
    with contextlib.suppress(OSError):
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
    remove_folder(discarded)
    with contextlib.suppress(OSError):
        discarded.parent.rmdir()


def discard_surplus(run_folder: str | Path, limit: int | None, protected: Iterable[str | Path | None]) -> None:
    """Delete the oldest checkpoints of a run above `limit`, except those in `protected`.

    Age is that of the folder, not the step: a run that resumed from another folder may find later steps of an earlier run here.
    """
    if limit is None or limit <= 0:
        return
    checkpoints = checkpoints_in(run_folder)
    protected = {Path(path).resolve() for path in protected if path is not None}
    old = [path for path in checkpoints if path.resolve() not in protected]
    old.sort(key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
    surplus = min(len(old), max(0, len(checkpoints) - limit))
    for checkpoint in old[:surplus]:
        discard_checkpoint(checkpoint)


def remove_unfinished(run_folder: str | Path) -> None:
    """Remove what a killed run left behind, with a warning. No other process may be writing there."""
    _put_back_replaced(Path(run_folder))
    _finish_setting_aside(Path(run_folder))
    folder = Path(run_folder) / UNFINISHED_NAME
    if folder.is_dir():
        names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        remove_folder(folder)
        logger.warning("Removed what a run that was killed had left in %s: %s.", folder, names)


def _put_back_replaced(run_folder: Path) -> None:
    for replaced in sorted((run_folder / UNFINISHED_NAME).glob(f"replaced-{PREFIX_CHECKPOINT_DIR}-*")):
        checkpoint = run_folder / replaced.name.removeprefix("replaced-")
        if not checkpoint.exists():
            # Several processes may run this at once; one of them succeeds.
            with contextlib.suppress(FileNotFoundError):
                os.rename(replaced, checkpoint)
                logger.warning("%s was being replaced when its run was killed: it has its name again.", checkpoint)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)
