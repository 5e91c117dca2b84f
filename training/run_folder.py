"""Run folders: whether a run may begin in a folder or go on there, and with what recipe."""

import logging
from pathlib import Path

from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.averaging import RECIPE_NAME
from metaphrase.training.checkpoint_folders import check_whole, checkpoints_in, last_whole_checkpoint, remove_folder
from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)

# Any of these tells that a folder holds a model, be it of a run or of another origin.
MODEL_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_CONFIG_NAME)
MODEL_NAMES += (CONFIG_NAME,)


def model_file_in(folder: Path) -> str | None:
    """Name of a file that tells that the folder holds a model, None if there is none."""
    return next((name for name in MODEL_NAMES if (folder / name).exists()), None)


def discard_model(folder: Path) -> None:
    """Deletes the model that a run has left beside its checkpoints, in the place of which another shall come."""
    for name in MODEL_NAMES:
        (folder / name).unlink(missing_ok=True)
    # A joint tokenizer cannot be saved beside it.
    remove_folder(folder / TARGET_SUBFOLDER)


def checkpoint_to_resume(recipe: Recipe, folder: Path) -> str | None:
    """The checkpoint that a run goes on from, None where it starts from the beginning.

    Args:
        recipe: Its `resume_from_checkpoint` is a checkpoint, or says whether the last one in `folder` is taken.
        folder: Where the run writes.

    Raises:
        ValueError: If the folder holds what the run would replace, or the checkpoint is not whole.
    """
    resume = str(recipe.resume_from_checkpoint or "no")
    if resume.lower() in ("false", "no"):
        if existing := checkpoints_in(folder):
            raise ValueError(
                f"`output_dir` must not hold the checkpoints of another run, got {folder} with {existing[-1].name}. "
                "Pass --resume to go on from there, or choose another folder."
            )
        _refuse_model(folder)
        return None
    if resume.lower() not in ("true", "yes"):
        check_whole(resume)
        if Path(resume).resolve().parent != folder.resolve():
            _refuse_model(folder)
        return resume
    last = last_whole_checkpoint(folder)
    if last is None:
        model = model_file_in(folder)
        if model is not None and not (folder / RECIPE_NAME).is_file():
            # No run has written it, so there is none that could be repeated.
            _refuse_model(folder)
        replaced = "" if model is None else ", and replaces the model that is there"
        logger.warning(
            "%s holds no whole checkpoint to resume from: the run starts from the beginning%s.", folder, replaced
        )
    return last


def _refuse_model(folder: Path) -> None:
    if (name := model_file_in(folder)) is None:
        return
    way_out = "Choose another folder."
    if checkpoints_in(folder):
        way_out = "Choose another folder, or pass --resume to go on from the last checkpoint there."
    elif (folder / RECIPE_NAME).is_file():
        way_out = "Choose another folder, or pass --resume to repeat the run that wrote it, which replaces it."
    raise ValueError(f"`output_dir` must not hold a model, got {folder} with {name}. {way_out}")
