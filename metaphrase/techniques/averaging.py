"""Mean of several checkpoints, which loads like any of them (Vaswani et al. 2017, section 6.1, arXiv 1706.03762)."""

import contextlib
import fnmatch
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from metaphrase.errors import MetaphraseError
from metaphrase.storage.folders import check_output, folder_in_one_step, read_json, refuse_outer_links, write_provenance
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, write_weights
from metaphrase.tokenization import TokenizerPair
from metaphrase.training import checkpoints
from metaphrase.training.distributed import load_whole_weights
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.trainer import MetaphraseTrainer

logger = logging.getLogger(__name__)

# Folder of a run that holds the mean of checkpoints until it is loaded.
_AVERAGE_NAME = "_average"
# Files of a single checkpoint that are wrong for the mean: weights, the trainer's state, pickled files, results.
_LEFT_OUT = (".*", "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", TRAINER_STATE_NAME, "README.md")
_LEFT_OUT += (checkpoints.PROGRESS_NAME, checkpoints.ARGUMENTS_NAME, checkpoints.PROVENANCE_NAME)
_LEFT_OUT += ("metrics.json", "*_predictions.txt")
# Fields of a configuration that do not describe the model.
_UNIMPORTANT = ("_name_or_path", "transformers_version")


def average_run(recipe: Recipe, trainer: MetaphraseTrainer, run: Path) -> None:
    """Load the mean of the checkpoints that the recipe selects into the model. All processes must call it.

    Where the mean of the best scores worse than the best of them, because they are too different, the best is loaded.
    """
    metric = None if recipe.average_best is None else recipe.metric_for_best_model or checkpoints.DEFAULT_METRIC
    # Not `average`, which may be a mean that its owner has made.
    average, is_written = run / _AVERAGE_NAME, False
    folders: list[Path | None] = [average]
    if trainer.is_world_process_zero():
        numbers = {"last": recipe.average_last, "best": recipe.average_best}
        # A log file in the folder may belong to another run.
        log = trainer.state.log_history
        try:
            # A run that ended early may have fewer checkpoints. A single one is its own mean.
            folders = select_checkpoints(run, **numbers, metric=metric, log_history=log, or_fewer=True)
            if len(folders) > 1:
                # The best is the last one.
                best = [folders[-1]] if metric is not None else []
                folders, is_written = [average_checkpoints(folders, average, overwrite=True), *best], True
        except Exception as error:
            # On any error: the trained weights are in no file yet, and the other processes wait for the broadcast.
            folders = [None]
            logger.warning(
                "There is no mean of checkpoints: %s The finished model has the weights of step %d, the last one.",
                *(error, trainer.state.global_step),
            )
    folders = [*folders, None][:2]
    broadcast_object_list(folders)
    if folders[0] is not None:
        load_whole_weights(trainer.model, folders[0])
    if folders[1] is not None and _is_worse(trainer, metric, checkpoints.step_of(folders[1])):
        load_whole_weights(trainer.model, folders[1])
    trainer.accelerator.wait_for_everyone()
    if is_written:
        # `save_model` writes the mean to the folder of the run.
        shutil.rmtree(average)


def _is_worse(trainer: MetaphraseTrainer, metric: str, step: int) -> bool:
    """Return True if the model scores worse on the validation pairs than it did at a step. All processes must call it."""
    arguments = trainer.args
    is_loss_alone, arguments.prediction_loss_only = arguments.prediction_loss_only, not trainer.decodes
    # Else `bf16_full_eval` would round the weights in place.
    trainer.is_in_train = True
    # Unlike `evaluate`, it leaves the log of the run alone.
    metrics = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval").metrics
    arguments.prediction_loss_only, trainer.is_in_train = is_loss_alone, False
    now = checkpoints.scores_in([{**metrics, "step": step}], metric).get(step, -math.inf)
    before = checkpoints.scores_in(trainer.state.log_history, metric)[step]
    if now < before:
        logger.info(
            "The mean of the best checkpoints scores %.2f in %s, and the best of them %.2f: the best is the finished model.",
            *(abs(now), metric, abs(before)),
        )
    return now < before


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
        last: Number of checkpoints to take by step.
        best: Number of checkpoints to take by score; of equals, the later ones.
        metric: Name of the score in the trainer's log; `eval_` may be left out.
        log_history: The trainer's log; by default read from the latest `trainer_state.json` of the run.
        or_fewer: Take all checkpoints if there are fewer.

    Raises:
        MetaphraseError: If not exactly one of `last` and `best` is given, or there are too few checkpoints or scores.
    """
    field, number = ("last", last) if best is None else ("best", best)
    if (last is None) == (best is None) or number < 1:
        raise MetaphraseError(f"Either `last` or `best` must be given, at least 1, got {last} and {best}.")
    run_dir, metric = Path(run_dir), metric or checkpoints.DEFAULT_METRIC
    by_step = {checkpoints.step_of(path): path for path in checkpoints.checkpoints_in(run_dir)}
    scores = dict.fromkeys(by_step, 0.0)
    if best is not None:
        if log_history is None:
            paths = [folder / TRAINER_STATE_NAME for folder in (run_dir, *by_step.values())]
            states = [read_json(path) for path in paths if path.is_file()]
            log_history = max(states, key=lambda state: state.get("global_step", 0), default={}).get("log_history", [])
        scores = {step: score for step, score in checkpoints.scores_in(log_history, metric).items() if step in by_step}
    if len(scores) < number and not (or_fewer and scores):
        what = "checkpoints" if best is None else f"checkpoints with a score in `{metric}`"
        raise MetaphraseError(
            f"`{field}` must be at most the number of {what}, {len(scores)} in {run_dir}, got {number}. "
            "A run keeps as many checkpoints as `save_total_limit` says."
        )
    return [by_step[step] for step in sorted(scores, key=lambda step: (scores[step], step))[-number:]]


def average_checkpoints(
    folders: Sequence[str | os.PathLike], output: str | os.PathLike, *, overwrite: bool = False
) -> Path:
    """Write the folder `output` with the mean of all weights, and the other files of the last folder's model, and return it.

    Sums are in float64, and the mean has the checkpoints' own type. Integers are those of the last checkpoint. One file of the
    mean is in memory at a time. Tokenizers, generation configuration and code come from the last folder, and the recipe from
    there or from its run. The folder gets its name when it is complete.

    Raises:
        MetaphraseError: If the folders do not hold the same model, or `output` exists and is no average that `overwrite` permits
            to replace.
    """
    folders, output = [Path(folder) for folder in folders], Path(output)
    if len({folder.resolve() for folder in folders}) < max(len(folders), 2):
        names = ", ".join(map(str, folders)) or "none"
        raise MetaphraseError(f"`folders` must be at least two, and different, got {names}.")
    check = partial(check_output, output, folders, overwrite, checkpoints.PROVENANCE_NAME, "averaged")
    check()
    with contextlib.ExitStack() as files:
        models = [WeightFiles(folder, files) for folder in folders]
        for checkpoint in models[:-1]:
            _check_equal(checkpoint, models[-1])
        with folder_in_one_step(output, check) as unfinished:
            _copy_rest(models[-1], unfinished)
            # Files of about the size of the last checkpoint's.
            last, changed = models[-1], []
            planned = {
                name: PlannedTensor(kind.nbytes, partial(_mean, models, name, changed))
                for name, kind in last.kinds.items()
            }
            write_weights(unfinished, planned, max(path.stat().st_size for path in last.paths))
            names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
            write_provenance(unfinished / checkpoints.PROVENANCE_NAME, averaged=names)
    if changed:
        logger.warning("Whole numbers that differ are those of %s: %s.", last.folder, ", ".join(changed))
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
                raise MetaphraseError(f"`{name}` {what} must be the same {where}, got {values[0]} and {values[1]}.")
    if all((folder / "tokenizer_config.json").is_file() for folder in folders):
        first, second = map(TokenizerPair.from_pretrained, folders)
        for side in ("source", "target"):
            if getattr(first, side).get_vocab() != getattr(second, side).get_vocab():
                raise MetaphraseError(f"The {side} vocabulary must be the same {where}: their tokens differ.")


def _copy_rest(checkpoint: WeightFiles, output: Path) -> None:
    folder = checkpoint.folder
    for path in sorted(folder.iterdir()):
        if path in checkpoint.paths or path.name == SAFE_WEIGHTS_INDEX_NAME:
            continue
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            refuse_outer_links(folder, path.iterdir(), "folders")
            shutil.copytree(path, output / path.name)
        elif path.is_file() and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT_OUT):
            refuse_outer_links(folder, [path], "folders")
            shutil.copyfile(path, output / path.name)
    for recipe in (folder / checkpoints.RECIPE_NAME, folder.parent / checkpoints.RECIPE_NAME):
        if recipe.is_file():
            shutil.copyfile(recipe, output / checkpoints.RECIPE_NAME)
            break


def _mean(models: Sequence[WeightFiles], name: str, changed: list[str]) -> torch.Tensor:
    """Return the mean of a weight, or else the last checkpoint's. Names of whole numbers that differ go to `changed`."""
    tensor = models[-1].read(name)
    if tensor.is_floating_point():
        # In float64, the mean of equal numbers is exact.
        return (sum(files.read(name).double() for files in models) / len(models)).to(tensor.dtype)
    if not all(torch.equal(tensor, files.read(name)) for files in models[:-1]):
        changed.append(name)
    return tensor
