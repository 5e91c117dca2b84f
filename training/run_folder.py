"""Run folders: whether a run may begin in a folder or go on there, and with what recipe."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from metaphrase.storage.write_lock import WriteLock
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpointing.averaging import RECIPE_NAME, is_better_lower
from metaphrase.training.checkpointing.folders import check_whole, checkpoints_in, last_whole_checkpoint, remove_folder
from metaphrase.training.recipe.recipe import LED_BY_METRIC, OWN_FIELDS, Recipe, load_recipe

logger = logging.getLogger(__name__)

DATA_REPORT_NAME = "data_report.json"
# Any of these tells that a folder holds a model, be it of a run or of another origin.
MODEL_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_CONFIG_NAME)
MODEL_NAMES += (CONFIG_NAME,)
# A run that goes on may change these of our own fields: how it is evaluated and shown, how much it takes at a time, and what it
# adds to the loss or makes of the weights. The rest decides network, tokenizer, data, optimizer, or what is trained.
FREE_GROUPS = ("batches", "evaluation")
FREE = ("data_dir", "pairs_in_buffer", "source_language", "target_language", "validation_text_file")
FREE += tuple(
    name
    for split in ("validation", "test")
    for name in (f"{split}_file", f"{split}_source_file", f"{split}_target_file", f"max_{split}_samples")
)
FREE += ("dataset_validation_split", "dataset_test_split", "average_last", "average_best")
FREE += ("r_drop_alpha", "r_drop_start_step", "exponential_average_decay", "exponential_average_warmup")
# Of transformers' fields it may change all but these. The checkpoint's optimizer brings its own settings, which would be used in
# place of other ones without a word; and the seeds decide which pairs are taken out of training, and their order.
SETTLED_TRAINING = ("optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay")
SETTLED_TRAINING += ("adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs")
SETTLED_TRAINING += ("seed", "data_seed")
# These may become `skip`, when a fault has ended a run.
FAULTS = ("malformed", "invalid_utf8")


def model_file_in(folder: Path) -> str | None:
    """Name of a file that tells that the folder holds a model, None if there is none."""
    return next((name for name in MODEL_NAMES if (folder / name).exists()), None)


def discard_model(folder: Path) -> None:
    """Deletes the model that a run has left beside its checkpoints, in the place of which another shall come."""
    for name in MODEL_NAMES:
        (folder / name).unlink(missing_ok=True)
    # A joint tokenizer cannot be saved beside it.
    remove_folder(folder / TARGET_SUBFOLDER)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, which is made if it is not there, and goes again if nothing is written to it.

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


def check_place(folder: Path) -> None:
    """Refuses a folder that nothing can be written to, as far as that can be seen without writing.

    Raises:
        ValueError: If it, or what it would lie in, is a file or may not be written to.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not place.is_dir():
        raise ValueError(f"`output_dir` must be a folder, got {folder}: {place} is a file.")
    if not os.access(place, os.W_OK):
        raise ValueError(f"`output_dir` must be a folder that can be written to, got {folder}: {place} is read-only.")


def resumes(recipe: Recipe) -> bool:
    """Whether a run is to go on, and not to begin."""
    return str(recipe.resume_from_checkpoint or "no").lower() not in ("false", "no")


def keep_lowered_limits(recipe: Recipe, folder: Path) -> None:
    """Gives the recipe of a stream that goes on the lengths of its run, where it names none.

    A budget of tokens had lowered them, which may be another one now. Lengths may not change.

    Args:
        recipe: Changed in place.
        folder: Where the run writes.
    """
    if not recipe.streaming or not resumes(recipe):
        return
    resume = str(recipe.resume_from_checkpoint)
    path = (folder if resume.lower() in ("true", "yes") else Path(resume).resolve().parent) / RECIPE_NAME
    if not path.is_file():
        return
    before = load_recipe(path, is_checked=False)
    for name in ("max_source_length", "max_target_length"):
        if not recipe.is_set(name):
            setattr(recipe, name, getattr(before, name))


def checkpoint_to_resume(recipe: Recipe, folder: Path) -> str | None:
    """The checkpoint that a run goes on from, None where it starts from the beginning.

    Args:
        recipe: Its `resume_from_checkpoint` is a checkpoint, or says whether the last one in `folder` is taken.
        folder: Where the run writes.

    Raises:
        ValueError: If the folder holds what the run would replace, the checkpoint is not whole, or the recipe would not be true
            of it.
    """
    if not resumes(recipe):
        _refuse_what_is_there(folder)
        return None
    resume = str(recipe.resume_from_checkpoint)
    if resume.lower() not in ("true", "yes"):
        check_whole(resume)
        if Path(resume).resolve().parent != folder.resolve():
            _refuse_what_is_there(folder)
        check_same_run(recipe, Path(resume).resolve().parent)
        return resume
    last = last_whole_checkpoint(folder)
    if last is None:
        model = model_file_in(folder)
        if model is not None and not (folder / RECIPE_NAME).is_file():
            # No run has written it, so there is none that could be repeated.
            _refuse_model(folder)
        if model is not None:
            check_same_run(recipe, folder)
        else:
            _refuse_recipe(folder)
        replaced = "" if model is None else ", and replaces the model that is there"
        logger.warning(
            "%s holds no whole checkpoint to resume from: the run starts from the beginning%s.", folder, replaced
        )
        return None
    check_same_run(recipe, folder)
    return last


def _refuse_what_is_there(folder: Path) -> None:
    _refuse_checkpoints(folder)
    _refuse_model(folder)
    _refuse_recipe(folder)


def _refuse_recipe(folder: Path) -> None:
    """A run writes its recipe and its account of the data into its folder: one without the other is somebody's own."""
    if (folder / RECIPE_NAME).is_file() and not (folder / DATA_REPORT_NAME).is_file():
        raise ValueError(
            f"`output_dir` must not hold a recipe that no run has written, got {folder} with {RECIPE_NAME}, which the run would "
            "replace. Choose another folder."
        )


def _refuse_checkpoints(folder: Path) -> None:
    if existing := checkpoints_in(folder):
        raise ValueError(
            f"`output_dir` must not hold the checkpoints of another run, got {folder} with {existing[-1].name}. "
            "Pass --resume to go on from there, or choose another folder."
        )


def _refuse_model(folder: Path) -> None:
    if (name := model_file_in(folder)) is None:
        return
    way_out = "Choose another folder."
    if checkpoints_in(folder):
        way_out = "Choose another folder, or pass --resume to go on from the last checkpoint there."
    elif (folder / RECIPE_NAME).is_file():
        way_out = "Choose another folder, or pass --resume to repeat the run that wrote it, which replaces it."
    raise ValueError(f"`output_dir` must not hold a model, got {folder} with {name}. {way_out}")


def check_same_run(recipe: Recipe, folder: Path) -> None:
    """Refuses to resume the run of a folder with another recipe than the one there, as far as what it says is settled.

    Raises:
        ValueError: Naming the first field that would change, and both values.
    """
    path = folder / RECIPE_NAME
    if not path.is_file():
        return
    before, now = _settled_values(load_recipe(path, is_checked=False)), _settled_values(recipe)
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        # What has been read so far was without fault, and stays.
        is_more_lenient = name.rpartition(".")[2] in FAULTS and (old, new) == ("error", "skip")
        if _without_place(name, old) != _without_place(name, new) and not is_more_lenient:
            raise ValueError(
                f"`{name}` must stay as it was when a run is resumed, got {_shown(new)}, and {_shown(old)} in {path}. "
                "To change it, start a new run in another folder."
            )


def _settled_values(recipe: Recipe) -> dict[str, Any]:
    """The values of all fields that may not change, those below a mapping under names with a dot."""
    own = [name for name in OWN_FIELDS if Recipe.group_of(name) not in FREE_GROUPS]
    values = {name: getattr(recipe, name) for name in (*own, *SETTLED_TRAINING)}
    if recipe.lr_scheduler_type in LED_BY_METRIC:
        # Its values so far would be compared with those of another one.
        metric, direction = (recipe.metric_for_best_model or "loss").removeprefix("eval_"), recipe.greater_is_better
        # What the metric says by itself need not be given.
        values["greater_is_better"] = None if direction is not is_better_lower(metric) else direction
        values["metric_for_best_model"] = metric
    return {
        name: value
        for field, inner in values.items()
        for name, value in _flat(field, inner)
        if name.rpartition(".")[2] not in FREE
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(f"{name}.{key}", inner)


def _without_place(name: str, value: Any) -> Any:
    # A run may have been moved together with its data; a saved recipe is silent about their folder.
    is_path = name.endswith(("_file", "_name_or_path")) and isinstance(value, str)
    return PurePath(value).name if is_path else value


def _shown(value: Any) -> str:
    return "null" if value is None else repr(getattr(value, "value", value))
