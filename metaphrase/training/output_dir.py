"""Output directories: checks before a run starts or resumes in one, and the recipe that it resumes with."""

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from metaphrase.errors import MetaphraseError
from metaphrase.storage.folders import ENSEMBLE_NAME, WriteLock
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpoints import RECIPE_NAME, check_whole, checkpoints_in, last_whole_checkpoint
from metaphrase.training.recipe.fields import DECODING, OWN_FIELDS, check_conflicts, group_of
from metaphrase.training.recipe.recipe import METRIC_SCHEDULES, Recipe, saved_recipe

logger = logging.getLogger(__name__)

DATA_REPORT_NAME = "data_report.json"
# The reason of a choice, and the field below it.
_REASON = re.compile(r"^# (.+)\n(\w+):", re.MULTILINE)
# A folder with any of these files holds a model.
_MODEL_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_config.json", "config.json")
_MODEL_NAMES += ("model.safetensors.index.json", "pytorch_model.bin.index.json", ENSEMBLE_NAME)
# Files that a run replaces.
_RESULT_NAMES = (RECIPE_NAME, "metrics.json", "validation_predictions.txt", "test_predictions.txt")
_RESULT_NAMES += ("trainer_state.json", "tokenizer.json")
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
# Fields that may become `skip` after a fault has ended a run.
_FAULTS = ("malformed", "invalid_utf8")


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
    with WriteLock(folder, "output_dir"):
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
    reasons = {name: reason for name, reason in reasons.items() if name in taken} | recipe.reasons
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
        _refuse_content(recipe, folder)
        return None
    if resume is not True:
        check_whole(resume)
        run = Path(resume).resolve().parent
        if run != folder.resolve():
            _refuse_content(recipe, folder)
        _check_same_run(recipe, run)
        return resume
    checkpoint = last_whole_checkpoint(folder)
    if checkpoint is None:
        # A run from the beginning would replace or delete weights that may be complete.
        for damaged in checkpoints_in(folder)[-1:]:
            check_whole(damaged)
        if not all((folder / name).is_file() for name in (RECIPE_NAME, DATA_REPORT_NAME)):
            _refuse_content(recipe, folder)
        logger.warning("%s holds no whole checkpoint to resume from: the run starts from the beginning.", folder)
    _check_same_run(recipe, folder)
    return checkpoint


def _refuse_content(recipe: Recipe, folder: Path) -> None:
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


def _check_same_run(recipe: Recipe, folder: Path) -> None:
    """Refuse to resume the run of a folder with a recipe in which a settled field differs."""
    path = folder / RECIPE_NAME
    if not path.is_file():
        return
    before, now = _settled_values(saved_recipe(path)), _settled_values(recipe)
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        # The data read so far had no fault.
        is_more_lenient = name.rpartition(".")[2] in _FAULTS and (old, new) == ("error", "skip")
        if old != new and not is_more_lenient:
            raise MetaphraseError(
                f"`{name}` must stay as it was when a run is resumed, got {new!r}, and {old!r} in {path}. "
                "To change it, start a new run in another folder by --output_dir."
            )


def _settled_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values of all fields that may not change. Keys of a mapping become names with a dot."""
    names = [name for name in OWN_FIELDS if group_of(name) not in _FREE_GROUPS] + [*_SETTLED_TRAINING]
    if recipe.lr_scheduler_type in METRIC_SCHEDULES:
        # The schedule compares values of the metric before and after.
        names += ["metric_for_best_model", "greater_is_better"]
    values = dict(item for name in names for item in _flat(name, getattr(recipe, name)))
    return {name: value for name, value in values.items() if name.rpartition(".")[2] not in _FREE}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif name.endswith(("_file", "_name_or_path")) and isinstance(value, str):
        # A run may have been moved together with its data, whose folder a saved recipe leaves out.
        yield name, PurePath(value).name
    else:
        yield name, value
