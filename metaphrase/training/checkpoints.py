"""Checkpoints of a run: which are whole, how they get and lose their names, what a resumed run compares, and their mean."""

import contextlib
import fnmatch
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from metaphrase.storage.folders import (
    check_output,
    folder_in_one_step,
    read_json,
    refuse_outer_links,
    write_provenance,
)
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, write_weights
from metaphrase.tokenization import TokenizerPair

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
        raise ValueError(
            f"`resume_from_checkpoint` must be a whole checkpoint, got {checkpoint}: {'; '.join(problems)}. Restore the file; or "
            "start a new run in another folder, from these weights by `model_name_or_path`."
        )


def check_last(checkpoint: str | Path, run_dir: str | Path) -> None:
    """Refuse to resume from a checkpoint of a run before its last whole one."""
    checkpoint, run_dir = Path(checkpoint).resolve(), Path(run_dir).resolve()
    last = last_whole_checkpoint(run_dir)
    if checkpoint.parent == run_dir and last is not None and step_of(checkpoint) < step_of(Path(last)):
        raise ValueError(
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
        ValueError: If a setting differs.
    """
    path = Path(checkpoint) / PROGRESS_NAME
    if not path.is_file():
        logger.warning("%s holds no %s: the run goes on, but not bit for bit.", checkpoint, PROGRESS_NAME)
        return None
    progress = json.loads(path.read_text(encoding="utf-8"))
    for name, present in settings.items():
        before = progress.get(name)
        if None not in (before, present) and before != present:
            raise ValueError(
                f"`{name}` must stay as before when a run is resumed, got {present}, before {before}. Restore it, or start a new "
                "run from the weights by `model_name_or_path`. With `ignore_data_skip: true`, the data may differ."
            )
    different = [f"{name} {progress[name]}, now {now}" for name, now in layout.items() if progress.get(name) != now]
    if different:
        logger.warning("The run resumes at another position in the data: before, it had %s.", "; ".join(different))
    return progress


# The mean of several checkpoints, which loads like any of them (Vaswani et al. 2017, section 6.1, arXiv 1706.03762)

DEFAULT_METRIC = "eval_bleu"
LOWER_IS_BETTER = ("loss", "perplexity", "ter", "wer", "cer")
RECIPE_NAME = "recipe.yaml"
# Names the averaged checkpoints. A folder with this file may be overwritten.
PROVENANCE_NAME = "average.json"
# Files of a single checkpoint that are wrong for the mean: weights, the trainer's state, pickled files, results.
LEFT_OUT = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", TRAINER_STATE_NAME, PROGRESS_NAME)
LEFT_OUT += (ARGUMENTS_NAME, PROVENANCE_NAME, "metrics.json", "*_predictions.txt", "README.md", ".*")
# Fields of a configuration that do not describe the model.
_UNIMPORTANT = ("_name_or_path", "transformers_version")


def select_checkpoints(
    run_dir: str | os.PathLike,
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    log_history: Sequence[Mapping] | None = None,
    or_fewer: bool = False,
) -> list[Path]:
    """Return the folders of the last or the best checkpoints that a run still has, the last or the best one at the end.

    Args:
        run_dir: The output directory.
        last: Number of checkpoints to take by step.
        best: Number of checkpoints to take by score; of equals, the later ones.
        metric: Name of the score in the trainer's log; `eval_` may be left out.
        log_history: The trainer's log; by default read from the latest `trainer_state.json` of the run.
        or_fewer: Take all checkpoints if there are fewer.

    Raises:
        ValueError: If not exactly one of `last` and `best` is given, or there are too few checkpoints or scores.
    """
    field, number = ("last", last) if best is None else ("best", best)
    if (last is None) == (best is None) or number < 1:
        raise ValueError(f"Exactly one of `last` and `best` must be given, and be at least 1, got {last} and {best}.")
    run_dir = Path(run_dir)
    by_step = {step_of(path): path for path in checkpoints_in(run_dir)}
    scores = dict.fromkeys(by_step, 0.0)
    if best is not None:
        if log_history is None:
            paths = [folder / TRAINER_STATE_NAME for folder in (run_dir, *by_step.values())]
            states = [read_json(path) for path in paths if path.is_file()]
            log_history = max(states, key=lambda state: state.get("global_step", 0), default={}).get("log_history", [])
        scores = {
            step: score for step, score in scores_in(log_history, metric or DEFAULT_METRIC).items() if step in by_step
        }
    if len(scores) < number and not (or_fewer and scores):
        what = "checkpoints" if best is None else f"checkpoints with a score in `{metric or DEFAULT_METRIC}`"
        raise ValueError(
            f"`{field}` must be at most the number of {what}, {len(scores)} in {run_dir}, got {number}. "
            "A run keeps as many checkpoints as `save_total_limit` says."
        )
    return [by_step[step] for step in sorted(scores, key=lambda step: (scores[step], step))[-number:]]


def is_better_lower(metric: str) -> bool:
    """True if a metric is a loss, a perplexity or an error rate, also of a task or with `eval_` before it."""
    return metric.rpartition("_")[2] in LOWER_IS_BETTER


def scores_in(log: Iterable[Mapping], metric: str) -> dict[int, float]:
    """Return a metric of each step in a trainer's log, with a sign so that higher is better. NaN is left out."""
    sign, name = -1 if is_better_lower(metric) else 1, f"eval_{metric.removeprefix('eval_')}"
    return {entry["step"]: sign * entry[name] for entry in log if name in entry and not math.isnan(entry[name])}


def average_checkpoints(
    folders: Sequence[str | os.PathLike], output: str | os.PathLike, *, overwrite: bool = False
) -> Path:
    """Write the folder `output` with the mean of all weights, and the other files of the last folder's model, and return it.

    Sums are in float64, and the mean has the checkpoints' own type. Integers are those of the last checkpoint. One file of the
    mean is in memory at a time. Tokenizers, generation configuration and code come from the last folder, and the recipe from
    there or from its run. The folder gets its name when it is complete.

    Raises:
        ValueError: If the folders do not hold the same model, or `output` exists and is no average that `overwrite` permits to
            replace.
    """
    folders, output = [Path(folder) for folder in folders], Path(output)
    if len({folder.resolve() for folder in folders}) < max(len(folders), 2):
        names = ", ".join(map(str, folders)) or "none"
        raise ValueError(f"`folders` must be at least two, and different, got {names}.")
    check = partial(check_output, output, folders, overwrite, PROVENANCE_NAME, "averaged")
    check()
    with contextlib.ExitStack() as files:
        checkpoints = [WeightFiles(folder, files) for folder in folders]
        for checkpoint in checkpoints[:-1]:
            _check_equal(checkpoint, checkpoints[-1])
        with folder_in_one_step(output, check) as unfinished:
            _copy_rest(checkpoints[-1], unfinished)
            _write_means(checkpoints, unfinished)
            names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
            write_provenance(unfinished / PROVENANCE_NAME, averaged=names)
    logger.info("Averaged %d checkpoints: %s.", len(folders), ", ".join(map(str, folders)))
    return output


def _check_equal(checkpoint: WeightFiles, last: WeightFiles) -> None:
    """Check that two checkpoints have the same configuration, the same weights, and tokenizers of the same tokens, if any."""
    folders = checkpoint.folder, last.folder
    where = f"in {folders[0]} and in {folders[1]}"
    for what, first, second in (
        (f"of {CONFIG_NAME}", *(read_json(files.folder / CONFIG_NAME) for files in (checkpoint, last))),
        ("of the weights", checkpoint.kinds, last.kinds),
    ):
        for name in sorted(first.keys() | second.keys()):
            values = first.get(name, "nothing"), second.get(name, "nothing")
            if name not in _UNIMPORTANT and values[0] != values[1]:
                raise ValueError(f"`{name}` {what} must be the same {where}, got {values[0]} and {values[1]}.")
    if all((folder / "tokenizer_config.json").is_file() for folder in folders):
        first, second = map(TokenizerPair.from_pretrained, folders)
        for side in ("source", "target"):
            if getattr(first, side).get_vocab() != getattr(second, side).get_vocab():
                raise ValueError(f"The {side} vocabulary must be the same {where}: their tokens differ.")


def _copy_rest(checkpoint: WeightFiles, output: Path) -> None:
    """Copy the other files of the model."""
    folder = checkpoint.folder
    for path in sorted(folder.iterdir()):
        if path in checkpoint.paths or path.name == SAFE_WEIGHTS_INDEX_NAME:
            continue
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            refuse_outer_links(folder, path.iterdir(), "folders")
            shutil.copytree(path, output / path.name)
        elif path.is_file() and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in LEFT_OUT):
            refuse_outer_links(folder, [path], "folders")
            shutil.copyfile(path, output / path.name)
    for recipe in (folder / RECIPE_NAME, folder.parent / RECIPE_NAME):
        if recipe.is_file():
            shutil.copyfile(recipe, output / RECIPE_NAME)
            break


def _write_means(checkpoints: Sequence[WeightFiles], output: Path) -> None:
    """Write the means in files of about the size of the last checkpoint's."""
    last, changed = checkpoints[-1], []

    def mean(name: str) -> torch.Tensor:
        tensor = last.read(name)
        if last.kinds[name].is_floating_point:
            # In float64, the mean of equal numbers is exact.
            total = sum(checkpoint.read(name).double() for checkpoint in checkpoints)
            return (total / len(checkpoints)).to(tensor.dtype)
        if not all(torch.equal(tensor, checkpoint.read(name)) for checkpoint in checkpoints[:-1]):
            changed.append(name)
        return tensor

    planned = {name: PlannedTensor(kind.nbytes, partial(mean, name)) for name, kind in last.kinds.items()}
    write_weights(output, planned, max(path.stat().st_size for path in last.paths))
    if changed:
        logger.warning("Whole numbers that differ are those of %s: %s.", last.folder, ", ".join(changed))
