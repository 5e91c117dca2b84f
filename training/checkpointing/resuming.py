"""State that a resumed run continues: the position in the data, the best checkpoint so far, and random states."""

import contextlib
import json
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments

from metaphrase.training.checkpointing.folders import PROGRESS_NAME, checkpoint_of_step, step_of

logger = logging.getLogger(__name__)

# Arguments that decide which pairs share a batch of a fixed number of pairs.
BATCHES_BY_NUMBER = ("per_device_train_batch_size", "train_sampling_strategy", "length_column_name")
BATCHES_BY_NUMBER += ("dataloader_drop_last",)

# Position in the data


def read_progress(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `progress.json`, or None for a checkpoint of a plain Trainer."""
    if not any(checkpoint.glob("optimizer*")) and not any(checkpoint.glob("global_step*")):
        logger.warning("%s holds no optimizer: optimizer and schedule start anew.", checkpoint)
    if not (checkpoint / PROGRESS_NAME).is_file():
        logger.warning("%s holds no %s: the run goes on, but not bit for bit.", checkpoint, PROGRESS_NAME)
        return None
    return json.loads((checkpoint / PROGRESS_NAME).read_text(encoding="utf-8"))


def check_data(progress: dict[str, Any], fingerprint: dict[str, Any] | None) -> None:
    """Check that the training pairs are those of the checkpoint, if both fingerprints are known.

    Raises:
        ValueError: If they differ.
    """
    before = progress["data"]
    if before is not None and fingerprint is not None and before != fingerprint:
        raise ValueError(
            f"The training pairs must stay as they were when a run is resumed, got {_size(fingerprint)}, which differ from those "
            f"before, {_size(before)}. Restore the data, or start a new run from the weights by `model_name_or_path`. With "
            "`ignore_data_skip: true` this run goes on with a new epoch of the present pairs."
        )


def has_same_layout(progress: dict[str, Any], layout: dict[str, Any]) -> bool:
    """True if the first N batches of an epoch hold the same pairs as before. A warning names what differs."""
    present = {name: value for name, value in layout.items() if name in progress}
    different = [f"{name} {progress[name]}, now {present[name]}" for name in present if progress[name] != present[name]]
    if different:
        logger.warning("The run resumes at another position in the data: before, it had %s.", "; ".join(different))
    return not different


def _size(fingerprint: dict[str, Any]) -> str:
    unit = "pairs" if "num_pairs" in fingerprint else "bytes"
    return f"{fingerprint[f'num_{unit}']} {unit}"


def announce_epoch(loader: DataLoader, epoch: int) -> None:
    """Call `set_epoch` of a loader, of its data set, and of its samplers at any depth."""
    parts = [loader, loader.dataset]
    sampler = loader.batch_sampler
    while sampler is not None:
        parts += [sampler, getattr(sampler, "sampler", None)]
        sampler = getattr(sampler, "batch_sampler", None)
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


# Best checkpoint


def best_criterion(arguments: TrainingArguments) -> dict[str, Any]:
    """Return the metric of the best checkpoint and its direction. Values of different metrics do not compare."""
    metric = arguments.metric_for_best_model
    return {
        "metric_for_best_model": None if metric is None else metric.removeprefix("eval_"),
        "greater_is_better": None if metric is None else bool(arguments.greater_is_better),
    }


def set_best_folder(state: TrainerState, run: Path, newest: Path | None = None) -> None:
    """Set `best_model_checkpoint` to the best step's folder in this run, which exists or is the newest."""
    if state.best_global_step:
        best = checkpoint_of_step(run, state.best_global_step)
        if best == newest or best.is_dir():
            state.best_model_checkpoint = str(best)


def choose_best_again(trainer: Trainer, run: Path, progress: dict[str, Any] | None) -> None:
    """Choose the best checkpoint again if a resumed run has another metric or direction, and reset early stopping.

    Args:
        trainer: Has `WholeCheckpoints` and the state of the checkpoint, which is changed.
        run: The folder with the checkpoints.
        progress: The checkpoint's `progress.json`.
    """
    state, criterion = trainer.state, best_criterion(trainer.args)
    metric, is_greater_better = criterion["metric_for_best_model"], criterion["greater_is_better"]
    logged = [(entry["step"], entry[f"eval_{metric}"]) for entry in state.log_history if f"eval_{metric}" in entry]
    logged = [(checkpoint_of_step(run, step), score) for step, score in logged if not math.isnan(score)]
    if metric is None or _has_same_criterion(criterion, state, logged, progress):
        return
    scores = {path: score for path, score in logged if path.is_dir()}
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None
    if scores:
        # The first of equal scores, as a Trainer chooses.
        best = (max if is_greater_better else min)(scores, key=scores.get)
        state.best_global_step, state.best_metric, state.best_model_checkpoint = step_of(best), scores[best], str(best)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.early_stopping_patience_counter = 0
    logger.warning(
        "The run goes on with another `metric_for_best_model`, %s, where %s is better: by that, %s so far. "
        "Early stopping counts anew.",
        metric,
        "more" if is_greater_better else "less",
        f"{best.name} is the best" if scores else "no checkpoint is known to be the best",
    )


def _has_same_criterion(
    criterion: dict[str, Any], state: TrainerState, logged: list[tuple[Path, float]], progress: dict[str, Any] | None
) -> bool:
    if progress is not None and "metric_for_best_model" in progress:
        return {name: progress[name] for name in criterion} == criterion
    # A plain Trainer does not store the criterion, but its best value is the best of those in the log.
    scores = [score for _, score in logged]
    is_unset = state.best_metric is None or not math.isfinite(state.best_metric)
    return is_unset or (bool(scores) and state.best_metric == (max if criterion["greater_is_better"] else min)(scores))


# Random states of the process


def get_random_states() -> tuple:
    """Return the states of the process-wide generators of Python, numpy and torch on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_random_states(states: tuple) -> None:
    """Set the process-wide generators to states of `get_random_states` or `make_random_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def make_random_states(seed: int, epoch: int) -> tuple:
    """Return states that follow from seed and epoch. The process-wide generators stay as they are."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(3).tolist()
    return (
        random.Random(words[0]).getstate(),
        np.random.RandomState(words[1]).get_state(),
        torch.Generator().manual_seed(words[2]).get_state(),
    )


def are_equal_states(first: tuple, second: tuple) -> bool:
    """True if both states draw the same numbers."""
    is_numpy_equal = first[1][2] == second[1][2] and np.array_equal(first[1][1], second[1][1])
    return is_numpy_equal and first[0] == second[0] and torch.equal(first[2], second[2])


@contextlib.contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """Restore all random states after this context, the device's too."""
    states = get_random_states()
    is_forked = device.type not in ("cpu", "mps")
    devices, device_type = ([device], device.type) if is_forked else ([], "cuda")
    try:
        with torch.random.fork_rng(devices, device_type=device_type):
            yield
    finally:
        set_random_states(states)
