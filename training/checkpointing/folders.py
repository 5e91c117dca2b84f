"""Checkpoint folders: which of a run are whole, and how one appears and disappears so that a kill leaves nothing by halves."""

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

# What `WholeCheckpoints` adds to transformers' files; under `files` it holds the size of each.
PROGRESS_NAME = "progress.json"
# In the run's folder, so on the same file system. The underscore keeps it from being uploaded with the run.
UNFINISHED_NAME = "_unfinished"
# Before the number of a folder with what was later than a checkpoint that the run went back to. It is not uploaded either.
ABANDONED_NAME = "_abandoned"
# transformers' checkpoint on SIGTERM puts it into the folder while it writes.
SENTINEL_NAME = "checkpoint-is-incomplete.txt"
# What a run needs besides weights to go on exactly.
STATES = ("optimizer", "scheduler", "rng_state")
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_ABANDONED = re.compile(rf"({ABANDONED_NAME}-(\d+))(-after-(\d+))?")
_WEIGHTS = re.compile(r"(.*/)?(model|pytorch_model|adapter_model).*\.(safetensors|bin|distcp)|global_step\d+/.+")
_ZIP = re.compile(r".+\.pth?|(.*/)?(pytorch_model|adapter_model|optimizer|training_args).*\.bin")


def checkpoint_of_step(run_folder: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies, or would."""
    return Path(run_folder) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(_CHECKPOINT.fullmatch(checkpoint.name)[1])


def checkpoints_in(run_folder: str | Path) -> list[Path]:
    """The checkpoints of a run by step, whole or not."""
    if not Path(run_folder).is_dir():
        return []
    found = [path for path in Path(run_folder).iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def is_whole(folder: str | Path) -> bool:
    """Whether a checkpoint was written to its end and nothing of it has been lost since."""
    return not what_is_missing(folder)


def what_is_missing(folder: str | Path) -> list[str]:
    """What keeps a checkpoint from being whole, a phrase for each; nothing if it is.

    One that `WholeCheckpoints` wrote is compared with its own list of files. One of a plain Trainer must have weights and the
    trainer's state, and optimizer, schedule and random states if it or a neighbour has any of them: with `save_only_model` there
    are none. Each file must be readable to its end, as far as its format shows that without reading it all.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return ["there is no such folder"]
    files = _files(folder)
    problems = [f"{SENTINEL_NAME} says that it was not finished"] if SENTINEL_NAME in files else []
    problems += [f"{name} {damage}" for name, path in files.items() if (damage := _damage(name, path))]
    if PROGRESS_NAME not in files:
        return problems + _missing_of_plain_trainer(folder, files)
    try:
        expected = json.loads(files[PROGRESS_NAME].read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return problems or [f"{PROGRESS_NAME} does not list the files"]
    for name, size in expected.items():
        if name not in files:
            problems.append(f"{name} is missing")
            continue
        found = files[name].stat().st_size
        if found != size and (_is_binary(name) or found == 0):
            problems.append(f"{name} has {found} bytes in place of {size}")
    return problems


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _is_binary(name: str) -> bool:
    # Texts, such as the settings of generation, may be edited by hand.
    return name.endswith((".safetensors", ".distcp", ".model", ".spm")) or _ZIP.fullmatch(name) is not None


def _missing_of_plain_trainer(folder: Path, files: dict[str, Path]) -> list[str]:
    problems = [] if TRAINER_STATE_NAME in files else [f"{TRAINER_STATE_NAME} is missing"]
    if not any(_WEIGHTS.fullmatch(name) for name in files):
        problems.append("the weights are missing")
    # DeepSpeed keeps the rest in its own folder, schedule included.
    states = STATES[2:] if any(name.startswith("global_step") for name in files) else STATES
    neighbours = [other for other in checkpoints_in(folder.parent) if other.name != folder.name]
    names = [*files, *(name for other in neighbours for name in _files(other))]
    if any(name.startswith(states) for name in names):
        problems += [f"{state} is missing" for state in states if not any(name.startswith(state) for name in files)]
    return problems


def _damage(name: str, path: Path) -> str | None:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif _ZIP.fullmatch(name):
            zipfile.ZipFile(path).close()
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            if path.name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
                shards = sorted(set(content["weight_map"].values()))
                lost = [shard for shard in shards if not (path.parent / shard).is_file()]
                return f"names {', '.join(lost)}, which is missing" if lost else None
        elif path.suffix == ".distcp" and not (path.parent / ".metadata").is_file():
            return "has no .metadata beside it"
    except (SafetensorError, zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError, OSError):
        return "is cut short or damaged"
    return None


def check_whole(checkpoint: str | Path) -> None:
    """Refuses a checkpoint that is not whole.

    Raises:
        ValueError: Saying what is missing.
    """
    if problems := what_is_missing(checkpoint):
        raise ValueError(
            f"`resume_from_checkpoint` must be a whole checkpoint, got {checkpoint}: {'; '.join(problems)}."
        )


def last_whole_checkpoint(run_folder: str | Path) -> str | None:
    """The whole checkpoint of the highest step, if there is one. A warning names each later one that is not whole.

    A checkpoint that was being replaced when its run was killed gets its name back first, and what was being set aside goes.
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
    """Takes the checkpoints that are later than one of a run, which goes on from that, out of the run.

    They, and the log of the run if that is later too, move to a folder of their own, `_abandoned-1` or the next number; a warning
    names them, and nothing is deleted. For a checkpoint of another run nothing moves. Killed in between, `last_whole_checkpoint`
    or `remove_unfinished` does the rest.
    """
    checkpoint, run_folder = Path(checkpoint).resolve(), Path(run_folder)
    if not _CHECKPOINT.fullmatch(checkpoint.name) or checkpoint.parent != run_folder.resolve():
        return
    step = step_of(checkpoint)
    if any(step_of(other) > step for other in checkpoints_in(run_folder)):
        number = max((int(match[2]) for match in _abandoned_in(run_folder)), default=0) + 1
        # From now on it is settled what moves.
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
        if _has_later_state(run_folder, step):
            later.append(run_folder / TRAINER_STATE_NAME)
        # Several processes may come here at once; each move succeeds for one of them.
        for path in later:
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, moving / path.name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(moving, aside)
            _flush(run_folder)
            names = ", ".join(path.name for path in checkpoints_in(aside))
            logger.warning("The run goes on from step %d: what was later, %s, now lies in %s.", step, names, aside)


def _has_later_state(run_folder: Path, step: int) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((run_folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"] > step
    return False


def unfinished_folder(checkpoint: Path) -> Path:
    """Where a checkpoint is written."""
    return checkpoint.parent / UNFINISHED_NAME / checkpoint.name


def publish_checkpoint(checkpoint: Path, progress: dict[str, Any]) -> None:
    """Gives a checkpoint its name, after all of it and the list of its files have reached the disk.

    One that bears the name already loses it just before. Killed in between, it gets it back from `last_whole_checkpoint` or
    `remove_unfinished`.
    """
    unfinished = unfinished_folder(checkpoint)
    sizes = {name: path.stat().st_size for name, path in _files(unfinished).items() if name != PROGRESS_NAME}
    text = json.dumps({**progress, "files": sizes}, indent=2)
    (unfinished / PROGRESS_NAME).write_text(text + "\n", encoding="utf-8")
    for path in [*unfinished.rglob("*"), unfinished]:
        _flush(path)
    replaced = unfinished.parent / f"replaced-{checkpoint.name}"
    remove_folder(replaced)
    if checkpoint.exists():
        os.rename(checkpoint, replaced)
    os.rename(unfinished, checkpoint)
    _flush(checkpoint.parent)
    remove_folder(replaced)
    _remove_if_empty(unfinished.parent)


def _flush(path: Path) -> None:
    if os.name == "nt":  # It flushes neither folders nor what was opened to be read.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_checkpoint(checkpoint: str | Path) -> None:
    """Deletes a checkpoint, which loses its name first: killed in between, it leaves nothing that looks like one."""
    checkpoint = Path(checkpoint)
    discarded = checkpoint.parent / UNFINISHED_NAME / f"discarded-{checkpoint.name}"
    remove_folder(discarded)
    discarded.parent.mkdir(exist_ok=True)
    os.rename(checkpoint, discarded)
    remove_folder(discarded)
    _remove_if_empty(discarded.parent)


def discard_surplus(run_folder: str | Path, limit: int | None, kept: Iterable[str | Path | None]) -> None:
    """Deletes the oldest checkpoints of a run above `limit`, but none of those that are kept.

    Age is that of the folder and not the step: later steps may be those of an earlier run there, where this one goes on from a
    checkpoint of another folder.
    """
    if limit is None or limit <= 0:
        return
    checkpoints = checkpoints_in(run_folder)
    kept = {Path(path).resolve() for path in kept if path is not None}
    old = [path for path in checkpoints if path.resolve() not in kept]
    old.sort(key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
    surplus = min(len(old), max(0, len(checkpoints) - limit))
    for checkpoint in old[:surplus]:
        logger.info("Deleting %s: `save_total_limit` is %d.", checkpoint, limit)
        discard_checkpoint(checkpoint)


def remove_unfinished(run_folder: str | Path) -> None:
    """Removes what a killed run left behind and says so in the log. No other process may be writing there."""
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
            # Several processes may come here at once; one of them succeeds.
            with contextlib.suppress(FileNotFoundError):
                os.rename(replaced, checkpoint)
                logger.warning("%s was being replaced when its run was killed: it has its name again.", checkpoint)


def remove_folder(folder: Path) -> None:
    """Deletes a folder, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
