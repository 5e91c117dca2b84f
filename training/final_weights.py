"""Final weights of a run: the mean of checkpoints, or an adapter merged into its model."""

import logging
import math
import shutil
from pathlib import Path

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from metaphrase.tokenization import TokenizerPair
from metaphrase.training.adapters import is_adapted, merge_lora
from metaphrase.training.checkpointing.averaging import (
    DEFAULT_METRIC,
    average_checkpoints,
    scores_in,
    select_checkpoints,
)
from metaphrase.training.checkpointing.folders import step_of
from metaphrase.training.checkpointing.sharding import load_whole_weights
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.trainer import MetaphraseTrainer

logger = logging.getLogger(__name__)

# Folder of a run that holds the mean until it is loaded.
_AVERAGE_NAME = "_average"


def check_averaged(recipe: Recipe, trainer: MetaphraseTrainer) -> None:
    """Refuse, before training, a mean of checkpoints whose weights are not whole.

    Raises:
        ValueError: Naming the field.
    """
    for name in ("average_last", "average_best"):
        if getattr(recipe, name) is not None and not trainer.has_whole_checkpoints:
            raise ValueError(
                f"`{name}` must come with checkpoints of whole weights, got settings by which each process saves its share. Set "
                "`fsdp_state_dict_type` to FULL_STATE_DICT, or for DeepSpeed `zero3_save_16bit_model` to true."
            )


def average_run(recipe: Recipe, trainer: MetaphraseTrainer, run: Path) -> None:
    """Load the mean of the checkpoints that the recipe selects into the model. All processes must call it.

    Where the mean of the best scores worse than the best of them, because they are too different, the best is loaded.

    Args:
        recipe: Without `average_last` and `average_best`, nothing is done.
        trainer: The trainer after training.
        run: The folder with the checkpoints.
    """
    if recipe.average_last is None and recipe.average_best is None:
        return
    metric = None if recipe.average_best is None else recipe.metric_for_best_model or DEFAULT_METRIC
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
    if folders[1] is not None and _is_worse(trainer, metric, step_of(folders[1])):
        load_whole_weights(trainer.model, folders[1])
    trainer.accelerator.wait_for_everyone()
    if is_written:
        # `save_model` writes the mean to the folder of the run.
        shutil.rmtree(average)


def _is_worse(trainer: MetaphraseTrainer, metric: str, step: int) -> bool:
    """Return True if the model scores worse on the validation pairs than it did at a step. All processes must call it."""
    arguments = trainer.args
    is_loss_alone, arguments.prediction_loss_only = arguments.prediction_loss_only, not trainer.decodes
    # Unlike `evaluate`, it leaves the log of the run alone.
    metrics = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval").metrics
    arguments.prediction_loss_only = is_loss_alone
    now = scores_in([{**metrics, "step": step}], metric).get(step, -math.inf)
    before = scores_in(trainer.state.log_history, metric)[step]
    if now < before:
        logger.info(
            "The mean of the best checkpoints scores %.2f in %s, and the best of them %.2f: the best is the finished model.",
            *(abs(now), metric, abs(before)),
        )
    return now < before


def save_final(trainer: MetaphraseTrainer, tokenizers: TokenizerPair, run: Path) -> PreTrainedModel:
    """Save the model, with its adapter merged, and return it. All processes must call it."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not is_adapted(model):
        trainer.save_model()
        return trainer.whole_model()
    trainer.save_model(str(run / "adapter"))
    model = trainer.whole_model()
    if trainer.is_world_process_zero():
        model = merge_lora(model, run)
        tokenizers.save_pretrained(run)
    return model
