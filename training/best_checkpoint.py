"""The best checkpoint of a run: where it lies, and what it is by when a run goes on with another metric."""

import logging
import math
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback

from metaphrase.training.checkpoint_folders import checkpoint_of_step

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
