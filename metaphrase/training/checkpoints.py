"""Checkpoints and output directories of runs: what is whole, what a run replaces or deletes, and what a resumed run compares."""

import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from metaphrase.errors import MetaphraseError
from metaphrase.storage.folders import ENSEMBLE_NAME, write_json, write_lock
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.recipe.fields import DECODING, OWN_FIELDS, check_conflicts, group_of
from metaphrase.training.recipe.recipe import Recipe, is_better_lower, saved_recipe

logger = logging.getLogger(__name__)

DEFAULT_METRIC = "eval_bleu"
RECIPE_NAME = "recipe.yaml"
# Folder of the stages of a run, below its output directory.
STAGES_NAME = "stages"
# Names the averaged checkpoints. A folder with this file may be overwritten.
PROVENANCE_NAME = "average.json"
# `MetaphraseTrainer` adds this file to those of transformers. Its `files` holds the size of each file.
PROGRESS_NAME = "progress.json"
# Arguments of the trainer. transformers writes them as a pickle, `training_args.bin`, which checkpoints of earlier versions hold.
ARGUMENTS_NAME = "training_args.json"
# A folder in the run's folder, on the same file system. transformers does not upload names with an underscore.
UNFINISHED_NAME = "_unfinished"
# Users may edit text files, such as the generation configuration.
_EDITABLE = (".json", ".txt", ".jinja", ".md", ".py", ".yaml")
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(_CHECKPOINT.fullmatch(checkpoint.name)[1])


def checkpoints_in(run_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, in the order of their steps."""
    paths = Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((path for path in paths if _CHECKPOINT.fullmatch(path.name) and path.is_dir()), key=step_of)


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
    problems = []
    for name, size in sizes.items():
        path = Path(folder) / name
        present = path.stat().st_size if path.is_file() else None
        is_edited = present and name.endswith(_EDITABLE) and name != TRAINER_STATE_NAME
        if present is None:
            problems.append(f"{name} is missing")
        elif present != size and not is_edited:
            problems.append(f"{name} has {present} bytes in place of {size}")
    return problems


def check_whole(checkpoint: str | Path, run_dir: str | Path | None = None) -> None:
    """Refuse to resume from a checkpoint that is not whole, or from one of the run before its last whole one."""
    if problems := what_is_missing(checkpoint):
        raise MetaphraseError(
            f"`resume_from_checkpoint` must be a whole checkpoint, got {checkpoint}: {'; '.join(problems)}. Restore the file; or "
            "start a new run in another folder, from these weights by `model_name_or_path`."
        )
    checkpoint = Path(checkpoint).resolve()
    is_own = run_dir is not None and checkpoint.parent == Path(run_dir).resolve()
    last = last_whole_checkpoint(run_dir) if is_own else None
    if last is not None and step_of(checkpoint) < step_of(Path(last)):
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
    files = [path for path in sorted(unfinished.rglob("*")) if path.is_file() and path.name != PROGRESS_NAME]
    sizes = {path.relative_to(unfinished).as_posix(): path.stat().st_size for path in files}
    write_json(unfinished / PROGRESS_NAME, {**progress, "files": sizes})
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


def read_progress(checkpoint: str | Path, settings: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any] | None:
    """Return a checkpoint's `progress.json`, or None for a checkpoint of a plain Trainer, and compare it with the resumed run.

    Args:
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
    if not (Path(checkpoint) / "scheduler.pt").is_file():
        logger.warning("%s holds no optimizer (`save_only_model`): its moments and the rate begin anew.", checkpoint)
    for name, present in settings.items():
        before = progress.get(name)
        if None not in (before, present) and before != present:
            raise MetaphraseError(
                f"`{name}` must stay as before when a run is resumed, got {present}, before {before}. Restore it, or start a new "
                "run from the weights by `model_name_or_path`. With `ignore_data_skip: true`, the data may differ."
            )
    different = [f"{name} {progress.get(name)}, now {now}" for name, now in layout.items() if progress.get(name) != now]
    if different:
        logger.warning("The run resumes at another position in the data: before, it had %s.", "; ".join(different))
    return progress


def scores_in(log: Iterable[Mapping], metric: str) -> dict[int, float]:
    """Return a metric of each step in a trainer's log, with a sign so that higher is better. NaN is left out."""
    sign, name = -1 if is_better_lower(metric) else 1, f"eval_{metric.removeprefix('eval_')}"
    return {entry["step"]: sign * entry[name] for entry in log if name in entry and not math.isnan(entry[name])}


# Output directories

DATA_REPORT_NAME = "data_report.json"
# The reason of a choice, and the field below it.
_REASON = re.compile(r"^# (.+)\n(\w+):", re.MULTILINE)
# A folder with any of these files holds a model.
_MODEL_NAMES: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin", "adapter_config.json", "config.json")
_MODEL_NAMES += ("model.safetensors.index.json", "pytorch_model.bin.index.json", ENSEMBLE_NAME)
# Files that a run replaces.
_RESULT_NAMES: tuple[str, ...] = (RECIPE_NAME, "metrics.json", "validation_predictions.txt", "test_predictions.txt")
_RESULT_NAMES += ("trainer_state.json", "tokenizer.json")
# Own fields that a resumed run may change. The others decide network, tokenizer, data, optimizer, or what is trained.
_FREE_GROUPS = ("batches", "evaluation", "search")
_FREE = {"data_dir", "pairs_in_buffer", "source_language", "target_language", "validation_text_file"}
_FREE |= {f"{split}{kind}" for split in ("validation", "test") for kind in ("_file", "_source_file", "_target_file")}
_FREE |= {"max_validation_samples", "max_test_samples", "dataset_validation_split", "dataset_test_split"}
_FREE |= {"average_last", "average_best", "r_drop_alpha", "r_drop_start_step"}
# A fault may have ended the run. The pairs are compared by themselves.
_FREE |= {"malformed", "invalid_utf8"}
# Fields of transformers that a resumed run may not change. The checkpoint's optimizer would silently keep its old settings, and
# the seeds decide which pairs are taken out of training, and their order.
_SETTLED_TRAINING: tuple[str, ...] = ("optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay")
_SETTLED_TRAINING += ("adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs")
_SETTLED_TRAINING += ("seed", "data_seed")
# Pairs of fields of which a run has one.
_ALTERNATIVES = (
    ("max_tokens_per_batch", "per_device_train_batch_size"),
    ("max_steps", "num_train_epochs"),
    ("average_last", "average_best"),
)


def discard_model(folder: Path) -> None:
    """Delete the model that a run has left beside its checkpoints, so that another can replace it."""
    for name in _MODEL_NAMES:
        (folder / name).unlink(missing_ok=True)
    # A joint tokenizer cannot be saved beside a separate one.
    shutil.rmtree(folder / TARGET_SUBFOLDER, ignore_errors=True)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs. Make it if needed, and remove it again if it stays empty."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with write_lock(folder, "output_dir"):
        try:
            yield
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()


def holds_run(folder: Path) -> bool:
    """Return True if a folder has the recipe or a checkpoint of a run."""
    return (folder / RECIPE_NAME).is_file() or bool(checkpoints_in(folder))


def with_fields_of_run(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe of a resumed run with the fields that it leaves open as the run in the folder had them.

    Raises:
        MetaphraseError: If a field that was given contradicts one of the run.
    """
    resume = recipe.resume_from_checkpoint
    path = (folder if resume is True else Path(resume or "").resolve().parent) / RECIPE_NAME
    if not resume or not path.is_file():
        return recipe
    before = saved_recipe(path)
    reasons = {name: reason for reason, name in _REASON.findall(path.read_text(encoding="utf-8"))}
    answered = {name for pair in _ALTERNATIVES if any(map(recipe.is_set, pair)) for name in pair}
    if before.choose_decoding and "num_beams" in reasons:
        # They are chosen again for the weights of the resumed run.
        answered |= set(DECODING)
    names = [name for name in before.set_names if name not in answered]
    taken = {name: getattr(before, name) for name in names if recipe.is_open(name)}
    reasons = {name: reason for name, reason in reasons.items() if name in taken} | dict(recipe.reasons)
    # The file keeps its order.
    order = tuple(dict.fromkeys((*names, *recipe.set_names)))
    merged = recipe.replace(**taken, set_names=order, reasons=reasons)
    check_conflicts(merged, recipe.set_names)
    return merged


def checkpoint_to_resume(recipe: Recipe, folder: Path) -> str | None:
    """Return the checkpoint that a run resumes from; None if it starts from the beginning.

    `resume_from_checkpoint` of the recipe is a checkpoint, or true for the last one in the folder.

    Raises:
        MetaphraseError: If the run would replace content of the folder, the checkpoint is not whole, or the recipe differs from
            that of the checkpoint.
    """
    resume = recipe.resume_from_checkpoint
    if not resume:
        refuse_content(recipe, folder)
        return None
    if resume is not True:
        check_whole(resume, folder)
        run = Path(resume).resolve().parent
        if run != folder.resolve():
            refuse_content(recipe, folder)
        check_same_run(recipe, run)
        return resume
    checkpoint = last_whole_checkpoint(folder)
    if checkpoint is None:
        # A run from the beginning would replace or delete weights that may be complete.
        for damaged in checkpoints_in(folder)[-1:]:
            check_whole(damaged)
        if not all((folder / name).is_file() for name in (RECIPE_NAME, DATA_REPORT_NAME)):
            refuse_content(recipe, folder)
        logger.warning("%s holds no whole checkpoint to resume from: the run starts from the beginning.", folder)
    check_same_run(recipe, folder)
    return checkpoint


def refuse_content(recipe: Recipe, folder: Path) -> None:
    """Refuse a folder with a model, with checkpoints, or with files that the run would replace and no run has written."""
    names = [path.name for path in checkpoints_in(folder)[-1:]]
    # A run that was stopped before its first checkpoint has left a report of its data.
    names += _MODEL_NAMES if (folder / DATA_REPORT_NAME).is_file() else (*_MODEL_NAMES, *_RESULT_NAMES)
    is_own_tokenizer = Path(recipe.tokenizer_name_or_path or "/").resolve() == folder.resolve()
    for name in names:
        if (folder / name).exists() and not (name == "tokenizer.json" and is_own_tokenizer):
            raise MetaphraseError(
                f"`output_dir` must not hold a model, a checkpoint or a file that the run would replace, got {folder} with "
                f"{name}. Pass another folder by --output_dir, or --resume to go on with the run that wrote it."
            )


def check_same_run(recipe: Recipe, folder: Path) -> None:
    """Refuse a recipe that differs from that of the run in a folder in a field which a resumed run may not change."""
    path = folder / RECIPE_NAME
    if not path.is_file():
        return
    before, now = _settled_values(saved_recipe(path)), _settled_values(recipe)
    for name in sorted(before.keys() | now.keys()):
        if (old := before.get(name)) != (new := now.get(name)):
            raise MetaphraseError(
                f"`{name}` must stay as it was when a run is resumed, got {new!r}, and {old!r} in {path}. "
                "To change it, start a new run in another folder by --output_dir."
            )


def _settled_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values of all fields that may not change. Keys of a mapping become names with a dot."""
    names = [name for name in OWN_FIELDS if group_of(name) not in _FREE_GROUPS] + [*_SETTLED_TRAINING]
    values, pending = {}, [(name, getattr(recipe, name)) for name in names]
    for name, value in pending:
        if isinstance(value, dict):
            pending += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif name.rpartition(".")[2] not in _FREE:
            # A run may have been moved together with its data, whose folder a saved recipe leaves out.
            is_path = name.endswith(("_file", "_name_or_path")) and isinstance(value, str)
            values[name] = PurePath(value).name if is_path else value
    return values
