"""The best checkpoint of a run: where it lies, and what it is by when a run goes on with another metric.

The place in the data that a checkpoint notes, and whether it leads to the same pairs in the run that goes on from it.
"""

import json
import logging
import math
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback

from metaphrase.data.fingerprints import data_fingerprint
from metaphrase.training.checkpointing.folders import PROGRESS_NAME, checkpoint_of_step

logger = logging.getLogger(__name__)


class BestCheckpoint:
    """For a Trainer: names the best checkpoint, and chooses it anew where a resumed run asks for the best by another metric."""

    def _name_best(self, run: Path, newest: Path | None = None) -> None:
        if self.state.best_global_step:
            best = checkpoint_of_step(run, self.state.best_global_step)
            if best == newest or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _best_criterion(self) -> dict[str, Any]:
        """By what the best is told: a value of one metric compares with none of another."""
        metric = self.args.metric_for_best_model
        return {
            "metric_for_best_model": None if metric is None else metric.removeprefix("eval_"),
            "greater_is_better": None if metric is None else bool(self.args.greater_is_better),
        }

    def _choose_best_anew(self, run: Path, progress: dict[str, Any] | None) -> None:
        """Sets the best and the patience of early stopping anew, if the checkpoint's were by another metric or direction."""
        criterion, state = self._best_criterion(), self.state
        metric = criterion["metric_for_best_model"]
        best = state.best_model_checkpoint
        is_as_scored = best is None or self._is_loaded_as_scored(Path(best))
        if metric is None or (self._is_same_criterion(progress) and is_as_scored):
            return
        folders = {step: checkpoint_of_step(run, step) for step, _ in self._scores()}
        known = {step for step, folder in folders.items() if folder.is_dir() and self._is_loaded_as_scored(folder)}
        scores = {step: score for step, score in self._scores() if step in known}
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        if scores:
            # Of equals the first, as a Trainer chooses.
            state.best_global_step = (max if criterion["greater_is_better"] else min)(scores, key=scores.get)
            state.best_metric = scores[state.best_global_step]
            self._name_best(run)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                callback.early_stopping_patience_counter = 0
        logger.warning(
            "The run goes on with another `metric_for_best_model`%s, %s, where %s is better: by that, %s so far, and the "
            "patience of early stopping begins anew.",
            "" if is_as_scored else " or without the averages that were scored",
            metric,
            "more" if criterion["greater_is_better"] else "less",
            f"checkpoint-{state.best_global_step} is the best" if scores else "no checkpoint is known to be the best",
        )

    def _is_loaded_as_scored(self, checkpoint: Path) -> bool:
        """Whether loading a checkpoint as the best gives the weights that its score is of."""
        return True

    def _is_same_criterion(self, progress: dict[str, Any] | None) -> bool:
        criterion, best = self._best_criterion(), self.state.best_metric
        if progress is not None and "metric_for_best_model" in progress:
            return {name: progress[name] for name in criterion} == criterion
        # Earlier versions, and transformers, do not note it, but the best value is among the logged ones.
        scores = [score for _, score in self._scores()]
        is_unset = best is None or not math.isfinite(best)
        return is_unset or (bool(scores) and best == (max if criterion["greater_is_better"] else min)(scores))

    def _scores(self) -> list[tuple[int, float]]:
        """Steps with what the log says of the metric, as far as it is a number."""
        name = f"eval_{self._best_criterion()['metric_for_best_model']}"
        logged = [(entry["step"], entry[name]) for entry in self.state.log_history if name in entry]
        return [(step, score) for step, score in logged if not math.isnan(score)]


# What decides which pairs share a batch of a given number of pairs.
BATCHES_BY_NUMBER = (
    "per_device_train_batch_size",
    "train_sampling_strategy",
    "length_column_name",
    "dataloader_drop_last",
)
# What earlier versions did without noting it.
_BEFORE = {"length_multiple": 1}


class DataPlace:
    """For a Trainer: reads `progress.json`, and compares what it says of the data with what is there now."""

    _steps_per_epoch: int | None = None

    def _read_progress(self, checkpoint: Path) -> dict[str, Any] | None:
        """What a checkpoint says of how far it came, `None` if it is one of transformers' own."""
        if not any(checkpoint.glob("optimizer*")) and not any(checkpoint.glob("global_step*")):
            logger.warning("%s holds no optimizer: that and the schedule begin anew.", checkpoint)
        if not (checkpoint / PROGRESS_NAME).is_file():
            logger.warning("%s holds no %s: the run goes on, but not bit for bit.", checkpoint, PROGRESS_NAME)
            return None
        return json.loads((checkpoint / PROGRESS_NAME).read_text(encoding="utf-8"))

    def _check_data(self, progress: dict[str, Any]) -> None:
        """Raises a ValueError if the pairs are others than those that the checkpoint was trained on."""
        # Earlier versions noted nothing, and not every stream knows its files.
        before, present = progress.get("data"), self._data_fingerprint
        if before is not None and present is not None and before != present:
            raise ValueError(
                "The training pairs must stay as they were when a run is resumed, since it goes on at a place among them, got "
                f"{_size(present)}, of which some are not the same as those before, {_size(before)}. "
                "Bring back the data as it was, or start a new run from the weights by `model_name_or_path`; with "
                "`ignore_data_skip: true` this one goes on with an epoch of the pairs that are there now."
            )

    @cached_property
    def _data_fingerprint(self) -> dict[str, Any] | None:
        return data_fingerprint(self.train_dataset)

    def _has_same_epochs(self, progress: dict[str, Any]) -> bool:
        """Whether a number of batches leads to the same place as it did; if not, that is said."""
        # What else earlier versions did not note counts as the same.
        progress = _BEFORE | progress
        present = {name: value for name, value in self._layout_of_epochs().items() if name in progress}
        if different := [
            f"{name} {progress[name]}, now {present[name]}" for name in present if progress[name] != present[name]
        ]:
            logger.warning(
                "The run does not go on at the same place in the data: before, it had %s.", "; ".join(different)
            )
        return not different

    def _layout_of_epochs(self) -> dict[str, int | str | None]:
        """What decides where a number of batches leads in the data."""
        strategy = str(getattr(self.args.train_sampling_strategy, "value", self.args.train_sampling_strategy))
        column = self.args.length_column_name if strategy == "group_by_length" else None
        # The first may have been lowered for want of memory.
        by_number = (self._train_batch_size, strategy, column, self.args.dataloader_drop_last)
        return {
            "num_processes": self.args.world_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "steps_per_epoch": self._steps_per_epoch,
            **dict(zip(BATCHES_BY_NUMBER, by_number, strict=True)),
        }


def _size(fingerprint: dict[str, Any]) -> str:
    unit = "pairs" if "num_pairs" in fingerprint else "bytes"
    return f"{fingerprint[f'num_{unit}']} {unit}"
