"""Trainer mixin that writes checkpoints whole, and resumes a run as if it had never stopped."""

import contextlib
import errno
import json
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from metaphrase.data.encoding import data_fingerprint
from metaphrase.data.pairs import data_seed
from metaphrase.training.checkpointing import folders
from metaphrase.training.checkpointing.folders import PROGRESS_NAME, checkpoint_of_step, step_of

logger = logging.getLogger(__name__)

# A disk with less free space counts as full.
_LEAST_FREE_BYTES = 2**20


@dataclass
class _Resumed:
    """A checkpoint to resume from, with its `progress.json`. `is_epoch_end_due`: its epoch is done but not yet reported."""

    checkpoint: str
    progress: dict[str, Any] | None
    is_epoch_end_due: bool = False


def _ignore_tied_weights(model: nn.Module, incompatible_keys: Any) -> None:
    # A checkpoint stores tied weights once. transformers would warn of their other names as missing.
    tied = getattr(model, "all_tied_weights_keys", {})
    incompatible_keys.missing_keys[:] = [name for name in incompatible_keys.missing_keys if name not in tied]


class WholeCheckpoints:
    """Checkpoints that are whole or absent, for any transformers Trainer; the class stands before it in the bases.

    A checkpoint is written below `_unfinished` and renamed last, when all of it is on the disk. A checkpoint to delete is renamed
    first. So a run may be killed at any moment. Machines without a shared folder need `save_on_each_node`.

    A resumed run ends with the same weights, optimizer, schedule, random states, log and best checkpoint, bit for bit on a CPU.
    To that end, it does what transformers leaves out:

    - The loss since the last log, the mean loss and the duration of the run continue.
    - Callbacks restore their `ExportableState`, also without `restore_callback_states_from_checkpoint`, which would replace them
      by callbacks with the settings of the checkpoint.
    - The position in the data is restored, also after an epoch that a callback ended early, or in an iterable data set. If the
      checkpoint is older than the end of its epoch, the end is made up for.
    - The best checkpoint is chosen again if the metric has changed.
    - No step follows if all are done, or if the patience of an `EarlyStoppingCallback` is used up.
    - `eval_on_start` evaluates at the start only.
    - Once training begins, later checkpoints in the same folder are set aside: they belong to another course of the run.
    - Evaluation does not change random states. Data loading has states of its own, which seed and epoch determine.

    Random choices of a data set or a collator must follow from seed, epoch and index, as in `DenoisingDataset`, because no
    checkpoint stores the states of workers. An iterable data set is read again from the beginning of the epoch.

    With three or more processes, a resumed run may differ in the last digits. If DDP does not look for unused parameters, as with
    gradient checkpointing, its first step determines the order in which it adds gradients.

    Subclasses may extend `data_layout` and `protected_checkpoints`.
    """

    _resumed: _Resumed | None = None
    # Position in the data, in batches of this process
    _steps_per_epoch: int | None = None
    _num_batches = _num_fetches = 0
    _is_exhausted = False
    # Reports: log, evaluation and checkpoint after a step or an epoch
    _reported_step = -1
    _is_epoch_end = _is_reporting = _is_saving = False
    _last_report: tuple[torch.Tensor | float | None, float | None] = (None, None)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """Train as the parent does, from a checkpoint of `find_checkpoint`."""
        checkpoint = self.find_checkpoint(resume_from_checkpoint, trial)
        if self.args.should_save:
            folders.remove_unfinished(self._get_output_dir(trial))
        self.accelerator.wait_for_everyone()
        hook = self.model.register_load_state_dict_post_hook(_ignore_tied_weights)
        try:
            return super().train(checkpoint, trial, ignore_keys_for_eval)
        finally:
            hook.remove()
            self._resumed = None

    def find_checkpoint(self, resume_from_checkpoint: str | bool | None, trial=None) -> str | None:
        """Return the whole checkpoint that an argument of `train` means, or None to start anew.

        Raises:
            ValueError: If the checkpoint is not whole, or there is no whole one for `True`.
        """
        if resume_from_checkpoint is True:
            run = self._get_output_dir(trial)
            checkpoint = folders.last_whole_checkpoint(run)
            if checkpoint is None:
                raise ValueError(f"`output_dir` must hold a whole checkpoint to resume from, got none in {run}.")
            return checkpoint
        if resume_from_checkpoint:
            folders.check_whole(resume_from_checkpoint)
        return resume_from_checkpoint or None

    # Extension points

    def data_layout(self) -> dict[str, int | str | None]:
        """Return the settings that determine which pairs the first N batches of an epoch hold."""
        strategy = str(getattr(self.args.train_sampling_strategy, "value", self.args.train_sampling_strategy))
        column = self.args.length_column_name if strategy == "group_by_length" else None
        # `auto_find_batch_size` lowers the first.
        by_number = (self._train_batch_size, strategy, column, self.args.dataloader_drop_last)
        return {
            "num_processes": self.args.world_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "steps_per_epoch": self._steps_per_epoch,
            **dict(zip(BATCHES_BY_NUMBER, by_number, strict=True)),
        }

    def protected_checkpoints(self, run: Path) -> list[str | Path | None]:
        """Return the checkpoints that `save_total_limit` keeps whatever their age."""
        return [self.state.best_model_checkpoint]

    # Resuming

    # transformers 5.23.0: counts the position in the data from the steps alone.
    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epoch, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._resumed, self._reported_step = None, self.state.global_step
        self._start, self._seconds_before = time.time(), 0.0
        # Without a length, transformers counts all steps as one epoch.
        self._steps_per_epoch = num_update_steps_per_epoch if has_length(self.train_dataset) else None
        if resume_from_checkpoint is None:
            return epoch, batches
        self._restore_callbacks()
        # The state of the checkpoint has the intervals of the run before.
        self.state.compute_steps(self.args, max_steps)
        run, folder = Path(self._get_output_dir(trial)), Path(resume_from_checkpoint).parent
        # The run's folder may have moved, and then the stored path is wrong.
        run = run if folder.resolve() == run.resolve() else folder
        set_best_folder(self.state, run)
        progress = read_progress(Path(resume_from_checkpoint))
        choose_best_again(self, run, progress)
        self._resumed = _Resumed(resume_from_checkpoint, progress)
        if progress is None or self.args.ignore_data_skip:
            return epoch, batches
        check_data(progress, self._data_fingerprint)
        if not has_same_layout(progress, self.data_layout()):
            return epoch, batches
        is_done = progress["num_batches"] >= progress["batches_per_epoch"]
        if self._steps_per_epoch is None:
            # The end of the steps, which may be more now, is not the end of a stream.
            is_done = progress["is_exhausted"]
        if progress["is_epoch_end_reported"] and (is_done or not progress["is_training_stopped"]):
            return progress["epoch"] + 1, 0
        self._resumed.is_epoch_end_due = is_done or progress["is_epoch_stopped"]
        return progress["epoch"], progress["num_batches"]

    # transformers 5.24.0: needs the scaler of float16 if the checkpoint has one, even in another precision.
    def _load_scaler(self, checkpoint):
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def _restore_callbacks(self) -> None:
        for name, states in self.state.stateful_callbacks.items():
            if name == "TrainerControl":
                continue
            states = states if isinstance(states, list) else [states]
            callbacks = [callback for callback in self.callback_handler.callbacks if type(callback).__name__ == name]
            if len(callbacks) != len(states):
                logger.warning("The checkpoint has %d %s, the run %d.", len(states), name, len(callbacks))
            for callback, state in zip(callbacks, states, strict=False):
                # Through JSON, as the state of the checkpoint.
                if (present := json.loads(json.dumps(callback.state()["args"]))) != state["args"]:
                    logger.warning("%s goes on with other settings: %s, before %s.", name, present, state["args"])
                for attribute, value in state["attributes"].items():
                    setattr(callback, attribute, value)

    # transformers 5.23.0: would begin an epoch without the totals, and make a step in a run that is done.
    def _run_epoch(self, **parts):
        resumed, self._resumed = self._resumed, None
        self._epoch, self._batches_per_epoch = parts["epoch"], parts["steps_in_epoch"]
        self._num_batches = 0 if resumed is None else parts["steps_trained_in_current_epoch"]
        self._num_batches_reported, self._is_exhausted = self._num_batches, False
        if resumed is not None:
            self._begin_again(resumed, parts["trial"])
            if self._is_over() or resumed.is_epoch_end_due:
                return self._end_epoch(resumed, **parts)
        self._data_states, self._num_fetches = make_random_states(data_seed(self.args), parts["epoch"]), 0
        # With several processes, a loader that skips batches does not tell the sampler.
        announce_epoch(parts["train_dataloader"], parts["epoch"])
        return super()._run_epoch(**parts)

    def _is_over(self) -> bool:
        return self.state.global_step >= self.state.max_steps or any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )

    def _end_epoch(self, resumed: _Resumed, *, model, epoch, trial, ignore_keys_for_eval, start_time, **_) -> None:
        """Do what follows the last step of an epoch, or of the run, and was not done before the checkpoint."""
        self._load_rng_state(resumed.checkpoint)
        if self._is_over():
            self.control.should_training_stop = True
        if resumed.progress is None or resumed.progress["is_epoch_end_reported"]:
            return
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        norm, rate = resumed.progress["grad_norm"], resumed.progress["learning_rate"]
        self._maybe_log_save_evaluate(
            self._tr_loss, norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=rate
        )

    def _begin_again(self, resumed: _Resumed, trial) -> None:
        # Not earlier: by now, whatever may refuse the checkpoint, such as a callback, has seen it.
        if self.args.should_save:
            folders.set_later_aside(resumed.checkpoint, self._get_output_dir(trial))
        self.accelerator.wait_for_everyone()
        if (progress := resumed.progress) is None:
            return
        losses = progress["losses_since_log"]
        has_same_processes = len(losses) == self.args.world_size
        loss = losses[self.args.process_index] if has_same_processes else sum(losses) / len(losses)
        self._tr_loss = torch.tensor(loss, device=self.args.device)
        self._total_loss_scalar = progress["loss_until_log"]
        self._globalstep_last_logged = progress["last_logged_step"]
        self._seconds_before = progress["seconds"]
        # The final mean loss and speed are those of all steps.
        self._initial_global_step = 0

    # transformers 5.23.0: deletes checkpoints under their names, and counts neither the time nor the loss before a checkpoint.
    def _finalize_training(self, trial, num_train_samples, start_time):
        if self._resumed is not None:
            # No epoch was left to begin.
            self._begin_again(self._resumed, trial)
            self._load_rng_state(self._resumed.checkpoint)
            self._resumed = None
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            folders.discard_surplus(self._get_output_dir(trial), 1, [best])
        return super()._finalize_training(trial, num_train_samples, start_time - self._seconds_before)

    # Random states

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._is_exhausted:
            # transformers reads on from a stream that has ended, for each step that is left.
            return [], None
        states, before = get_random_states(), self._data_states
        set_random_states(before)
        try:
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        finally:
            self._data_states = get_random_states()
            set_random_states(states)
        self._is_exhausted = not batches
        self._num_batches += len(batches)
        self._num_fetches += 1
        # The first fetch of an epoch also shuffles and starts workers.
        if self._num_fetches == 2 and not are_equal_states(before, self._data_states):
            logger.warning(
                "The data set or the collator draws from the random generators of this process. A run that is resumed in the "
                "middle of an epoch does not repeat these numbers. Derive them from seed, epoch and index."
            )
        return batches, num_items

    def evaluate(self, *args, **kwargs):
        """Evaluate as the parent does. During training, random states stay as they were."""
        if not self.is_in_train:
            return super().evaluate(*args, **kwargs)
        if self._resumed is not None:
            # `eval_on_start`: the run started before the checkpoint.
            return {}
        with unchanged_random_states(self.args.device):
            return super().evaluate(*args, **kwargs)

    # Saving

    # transformers 5.23.0: passes the gradient norm here alone. The report at the end of an epoch needs it again.
    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, learning_rate=None, **kwargs):
        # There is a report after each step, and one more at the end of an epoch.
        self._is_epoch_end = self.state.global_step == self._reported_step
        self._reported_step, self._num_batches_reported = self.state.global_step, self._num_batches
        self._last_report = grad_norm, learning_rate
        self._is_reporting = True
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        finally:
            self._is_reporting = False

    # transformers 5.23.0: has no other way to write a checkpoint elsewhere. `args.output_dir` is saved with it, so it must stay.
    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, folders.UNFINISHED_NAME) if self._is_saving else folder

    # transformers 5.23.0: writes a checkpoint file by file under its name.
    def _save_checkpoint(self, model, trial):
        if not self._is_reporting:
            logger.warning("A checkpoint in the middle of a step: a run that resumes from it is not bit-identical.")
        run = Path(self._get_output_dir(trial))
        checkpoint = folders.checkpoint_of_step(run, self.state.global_step)
        unfinished = folders.unfinished_folder(checkpoint)
        self._collect_callback_states()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            # On a full disk, torch complains of an unexpected position.
            if shutil.disk_usage(run).free < _LEAST_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(unfinished)) from error
            raise
        finally:
            self._is_saving = False
        # The parent has stored the folder it wrote to, and the states of callbacks of one class twice.
        set_best_folder(self.state, run, checkpoint)
        self._collect_callback_states()
        progress = self._progress()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
            folders.publish_checkpoint(checkpoint, progress)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            folders.discard_surplus(run, self.args.save_total_limit, [checkpoint, *self.protected_checkpoints(run)])

    # transformers 5.23.0: uploads in the background, from a folder that would lose its name meanwhile.
    def _push_from_checkpoint(self, checkpoint_folder):
        if not self._is_saving:
            super()._push_from_checkpoint(checkpoint_folder)

    def _collect_callback_states(self) -> None:
        callbacks = [*self.callback_handler.callbacks, self.control]
        state = TrainerState(stateful_callbacks=[item for item in callbacks if isinstance(item, ExportableState)])
        self.state.stateful_callbacks = state.stateful_callbacks

    @cached_property
    def _data_fingerprint(self) -> dict[str, Any] | None:
        return data_fingerprint(self.train_dataset)

    def _progress(self) -> dict[str, Any]:
        """Return what `progress.json` adds to the state that transformers stores."""
        norm, rate = self._last_report
        is_reported = self._reported_step == self.state.global_step
        is_mid_step = is_reported and not self._is_reporting
        return {
            **self.data_layout(),
            **best_criterion(self.args),
            "epoch": self._epoch,
            "num_batches": self._num_batches_reported if is_mid_step else self._num_batches,
            "batches_per_epoch": self._batches_per_epoch,
            "is_exhausted": self._is_exhausted,
            "data": self._data_fingerprint,
            "is_epoch_end_reported": is_reported and self._is_epoch_end,
            "is_epoch_stopped": self.control.should_epoch_stop,
            "is_training_stopped": self.control.should_training_stop,
            "losses_since_log": self.accelerator.gather(self._tr_loss.detach().reshape(1)).tolist(),
            "loss_until_log": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
            "grad_norm": None if norm is None else float(norm),
            "learning_rate": rate,
            "seconds": self._seconds_before + time.time() - self._start,
        }


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
