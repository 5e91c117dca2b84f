"""Run folders: checks before a run starts or resumes in a folder, and the recipe that it resumes with."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from metaphrase.storage.folders import WriteLock
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpointing.averaging import RECIPE_NAME, is_better_lower
from metaphrase.training.checkpointing.folders import (
    check_whole,
    checkpoints_in,
    last_whole_checkpoint,
    what_is_missing,
)
from metaphrase.training.recipe.checks import check_conflicts
from metaphrase.training.recipe.fields import OWN_FIELDS, group_of
from metaphrase.training.recipe.recipe import METRIC_SCHEDULES, Recipe, saved_recipe

logger = logging.getLogger(__name__)

DATA_REPORT_NAME = "data_report.json"
# The reason of a choice, and the field below it.
_REASON = re.compile(r"^# (.+)\n(\w+):", re.MULTILINE)
# A folder with any of these files holds a model.
_MODEL_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_config.json", "config.json")
_MODEL_NAMES += ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Files that a run replaces.
_RESULT_NAMES = (
    RECIPE_NAME,
    "metrics.json",
    "validation_predictions.txt",
    "test_predictions.txt",
    "trainer_state.json",
)
# Own fields that a resumed run may change. The others decide network, tokenizer, data, optimizer, or what is trained.
_FREE_GROUPS = ("batches", "evaluation", "search")
_FREE = {"data_dir", "pairs_in_buffer", "source_language", "target_language", "validation_text_file"}
_FREE |= {f"{split}{kind}" for split in ("validation", "test") for kind in ("_file", "_source_file", "_target_file")}
_FREE |= {"max_validation_samples", "max_test_samples", "dataset_validation_split", "dataset_test_split"}
_FREE |= {"average_last", "average_best", "r_drop_alpha", "r_drop_start_step"}
# Fields of transformers that a resumed run may not change. The checkpoint's optimizer would silently keep its old settings, and
# the seeds decide which pairs are taken out of training, and their order.
_SETTLED_TRAINING = ("optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay")
_SETTLED_TRAINING += ("adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs")
_SETTLED_TRAINING += ("seed", "data_seed")
# Pairs of fields of which a run has one.
_ALTERNATIVES = (("max_tokens_per_batch", "per_device_train_batch_size"), ("max_steps", "num_train_epochs"))
_ALTERNATIVES += (("average_last", "average_best"),)
# Fields that a run chose for its last weights.
_DECODING = ("num_beams", "length_penalty")
# Fields that may become `skip` after a fault has ended a run.
_FAULTS = ("malformed", "invalid_utf8")


def _model_file_in(folder: Path) -> str | None:
    """Return the name of a file that shows that the folder holds a model; None if there is none."""
    return next((name for name in _MODEL_NAMES if (folder / name).exists()), None)


def discard_model(folder: Path) -> None:
    """Delete the model that a run has left beside its checkpoints, so that another can replace it."""
    for name in _MODEL_NAMES:
        (folder / name).unlink(missing_ok=True)
    # A joint tokenizer cannot be saved beside a separate one.
    shutil.rmtree(folder / TARGET_SUBFOLDER, ignore_errors=True)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs. Make it if needed, and remove it again if it stays empty.

    Raises:
        ValueError: If another run writes to it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with WriteLock(folder, "output_dir"):
        try:
            yield
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to, as far as can be seen without writing.

    Raises:
        ValueError: If the folder, or its nearest parent that exists, is a file or read-only.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"`output_dir` must be a folder, got {folder}: {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise ValueError(
            f"`output_dir` must be a folder that can be written to, got {folder}: {existing} is read-only."
        )


def holds_run(folder: Path) -> bool:
    """Return True if a folder has the recipe or a checkpoint of a run."""
    return (folder / RECIPE_NAME).is_file() or bool(checkpoints_in(folder))


def with_fields_of_run(recipe: Recipe, folder: Path, names: Sequence[str] | None = None) -> Recipe:
    """Return the recipe of a resumed run with the fields that it leaves open as the run had them.

    The run may have chosen them, or lowered its length limits to the token budget.

    Args:
        recipe: The recipe that was given.
        folder: Output folder of the run.
        names: The fields to take over; None for all.

    Raises:
        ValueError: If a field that was given contradicts one of the run.
    """
    resume = recipe.resume_from_checkpoint
    path = (folder if resume is True else Path(resume or "").resolve().parent) / RECIPE_NAME
    if not resume or not path.is_file():
        return recipe
    before = saved_recipe(path)
    answered = {name for pair in _ALTERNATIVES if any(map(recipe.is_set, pair)) for name in pair}
    reasons = {name: reason for reason, name in _REASON.findall(path.read_text(encoding="utf-8"))}
    if before.choose_decoding and "num_beams" in reasons:
        # They are chosen again for the weights of the resumed run.
        answered |= set(_DECODING)
    taken = [name for name in names or before.set_names if not recipe.is_set(name) and name not in answered]
    reasons = {name: reason for name, reason in reasons.items() if name in taken}
    changed = recipe.set_names
    recipe = recipe.replace(**{name: getattr(before, name) for name in taken})
    check_conflicts(recipe, changed)
    # The file keeps its order.
    order = [name for name in before.set_names if recipe.is_set(name) and name not in answered]
    set_names = tuple(dict.fromkeys((*order, *recipe.set_names)))
    reasons |= recipe.reasons
    return recipe.replace(set_names=set_names, reasons=reasons)


def checkpoint_to_resume(recipe: Recipe, folder: Path) -> str | None:
    """Return the checkpoint that a run resumes from; None if it starts from the beginning.

    Args:
        recipe: `resume_from_checkpoint` is a checkpoint, or true for the last one in `folder`.
        folder: Output folder of the run.

    Raises:
        ValueError: If the run would replace content of the folder, the checkpoint is not whole, or the recipe differs from
            that of the checkpoint.
    """
    resume = recipe.resume_from_checkpoint
    if not resume:
        _refuse_content(recipe, folder)
        return None
    if resume is not True:
        check_whole(resume)
        run = Path(resume).resolve().parent
        if run != folder.resolve():
            _refuse_content(recipe, folder)
        _check_same_run(recipe, run)
        return resume
    last = last_whole_checkpoint(folder)
    if last is not None:
        _check_same_run(recipe, folder)
        return last
    if damaged := checkpoints_in(folder):
        # A run from the beginning would replace or delete weights that may be complete.
        problems = "; ".join(what_is_missing(damaged[-1]))
        raise ValueError(
            f"`output_dir` must hold a whole checkpoint to resume from, got {damaged[-1]}: {problems}. "
            "Restore the file; or start a new run in another folder, from these weights by `model_name_or_path`."
        )
    model = _model_file_in(folder)
    if model is None:
        _refuse_results(recipe, folder)
    elif (folder / RECIPE_NAME).is_file():
        _check_same_run(recipe, folder)
    else:
        # No run has written this model, so none could be repeated.
        _refuse_model(folder)
    replaced = "" if model is None else ", and replaces the model that is there"
    logger.warning(
        "%s holds no whole checkpoint to resume from: the run starts from the beginning%s.", folder, replaced
    )
    return None


def _refuse_content(recipe: Recipe, folder: Path) -> None:
    if existing := checkpoints_in(folder):
        raise ValueError(
            f"`output_dir` must not hold the checkpoints of another run, got {folder} with {existing[-1].name}. "
            "Pass --resume to go on from there, or another folder by --output_dir."
        )
    _refuse_model(folder)
    _refuse_results(recipe, folder)


def _refuse_results(recipe: Recipe, folder: Path) -> None:
    """Refuse files that the run would replace, without a data report: a person or another verb has written them."""
    names = list(_RESULT_NAMES)
    tokenizer = recipe.tokenizer_name_or_path
    if tokenizer is None or Path(tokenizer).resolve() != folder.resolve():
        names.append("tokenizer.json")
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is not None and not (folder / DATA_REPORT_NAME).is_file():
        raise ValueError(
            f"`output_dir` must not hold a file that no run has written, got {folder} with {name}, which the run would replace. "
            "Pass another folder by --output_dir."
        )


def _refuse_model(folder: Path) -> None:
    if (name := _model_file_in(folder)) is not None:
        way_out = "Pass another folder by --output_dir"
        if (folder / RECIPE_NAME).is_file():
            way_out += ", or --resume to repeat the run that wrote it, which replaces it"
        raise ValueError(f"`output_dir` must not hold a model, got {folder} with {name}. {way_out}.")


def _check_same_run(recipe: Recipe, folder: Path) -> None:
    """Refuse to resume the run of a folder with a recipe in which a settled field differs.

    Raises:
        ValueError: Naming the first field that would change, and both values.
    """
    path = folder / RECIPE_NAME
    if not path.is_file():
        return
    before, now = _settled_values(saved_recipe(path)), _settled_values(recipe)
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        # The data read so far had no fault.
        is_more_lenient = name.rpartition(".")[2] in _FAULTS and (old, new) == ("error", "skip")
        if _without_folder(name, old) != _without_folder(name, new) and not is_more_lenient:
            raise ValueError(
                f"`{name}` must stay as it was when a run is resumed, got {_shown(new)}, and {_shown(old)} in {path}. "
                "To change it, start a new run in another folder by --output_dir."
            )


def _settled_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values of all fields that may not change. Keys of a mapping become names with a dot."""
    fields = [name for name in OWN_FIELDS if group_of(name) not in _FREE_GROUPS]
    values = {name: getattr(recipe, name) for name in (*fields, *_SETTLED_TRAINING)}
    if recipe.lr_scheduler_type in METRIC_SCHEDULES:
        # The schedule compares values of the metric before and after.
        metric, direction = (recipe.metric_for_best_model or "loss").removeprefix("eval_"), recipe.greater_is_better
        # The default direction of a metric need not be given.
        values["greater_is_better"] = None if direction is not is_better_lower(metric) else direction
        values["metric_for_best_model"] = metric
    return {
        name: value
        for field, inner in values.items()
        for name, value in _flat(field, inner)
        if name.rpartition(".")[2] not in _FREE
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(f"{name}.{key}", inner)


def _without_folder(name: str, value: Any) -> Any:
    # A run may have been moved together with its data, whose folder a saved recipe leaves out.
    is_path = name.endswith(("_file", "_name_or_path")) and isinstance(value, str)
    return PurePath(value).name if is_path else value


def _shown(value: Any) -> str:
    return "null" if value is None else repr(getattr(value, "value", value))
