"""Checkpoints: a trainer that writes them whole, and goes on from one as if it had never been stopped."""

import errno
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from metaphrase.data.denoising.dataset import announce_epoch
from metaphrase.data.pairs import data_seed
from metaphrase.training.checkpointing.folders import (
    UNFINISHED_NAME,
    check_whole,
    checkpoint_of_step,
    checkpoints_in,
    discard_checkpoint,
    discard_surplus,
    is_whole,
    last_whole_checkpoint,
    publish_checkpoint,
    remove_folder,
    remove_unfinished,
    set_later_aside,
    unfinished_folder,
)
from metaphrase.training.checkpointing.resuming import BestCheckpoint, DataPlace
from metaphrase.training.distributed import (
    are_equal_states,
    get_random_states,
    make_random_states,
    set_random_states,
    unchanged_random_states,
)

logger = logging.getLogger(__name__)

# A disk with less is full.
_LEAST_FREE_BYTES = 2**20

__all__ = [
    "WholeCheckpoints",
    "check_whole",
    "checkpoints_in",
    "discard_checkpoint",
    "is_whole",
    "last_whole_checkpoint",
]


@dataclass
class _Resumed:
    """The checkpoint that training goes on from, its `progress.json`, and whether its epoch is still to be ended."""

    checkpoint: str
    progress: dict[str, Any] | None
    is_epoch_end_due: bool = False


class WholeCheckpoints(BestCheckpoint, DataPlace):
    """For a Trainer, before its parents: checkpoints that are whole, and a resumed run that ends as one never stopped.

    A checkpoint is written below `_unfinished` and gets its name as the last act, when all of it is on the disk. What is replaced
    or no longer wanted loses its name before it is deleted. So a run may be killed at any moment, and what bears the name of a
    checkpoint is whole. Machines that share no folder need `save_on_each_node`.

    Resumed, a run ends with the same weights, optimizer, schedule, random states, log and best checkpoint, bit for bit on a CPU.
    What transformers does not do to that end is done here:

    - The loss since the last log, the mean loss of the run and its duration go on where they were.
    - Callbacks get back what they keep by `ExportableState`, whether or not `restore_callback_states_from_checkpoint` is set.
      Their settings are those of the present run.
    - The place in the data is that of the checkpoint, also after an epoch that a callback ended early, or in a later pass through
      an iterable data set. A checkpoint of the last step of an epoch may be older than the end of it: that is made up for.
    - The best checkpoint is chosen anew where the best is told by another metric than before.
    - No further step is made if all are done, or if the patience of an `EarlyStoppingCallback` is used up.
    - `eval_on_start` evaluates when the run starts, not when it goes on.
    - Once training begins, later checkpoints of the same folder, which it does not come from, are set aside, so that neither the
      next run nor an average takes them for its own.
    - Evaluation leaves the random states as they were. Loading has states of its own, which seed and epoch determine, so that
      the epoch and the number of its batches say all about the place in the data.

    What a data set or a collator draws at random must follow from seed, epoch and index, as in `DenoisingDataset`: the states of
    workers are in no checkpoint. An iterable data set is read again from the beginning of the epoch, as transformers does. With
    three or more processes of which DDP does not look for unused parameters, as under gradient checkpointing, it adds up
    gradients in an order that the first step determines: a resumed run differs by their last digits.
    """

    _resumed: _Resumed | None = None
    _start = 0.0
    _seconds_before = 0.0
    _epoch = 0
    _batches_per_epoch = 0
    _num_batches = 0
    _num_batches_reported = 0
    _reported_step = -1
    # Of this call of `train`.
    _first_step = 0
    _is_epoch_end = False
    _is_reporting = False
    _is_saving = False
    _last_report: tuple[torch.Tensor | float | None, float | None] = (None, None)
    _data_states: tuple | None = None
    _num_fetches = 0
    _is_exhausted = False

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """As the parent's.

        Raises:
            ValueError: If the checkpoint to resume from is not whole, or, for `True`, no whole one is there.
        """
        run = self._get_output_dir(trial)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(run)
            if resume_from_checkpoint is None:
                raise ValueError(f"`output_dir` must hold a whole checkpoint to resume from, got none in {run}.")
        elif resume_from_checkpoint:
            check_whole(resume_from_checkpoint)
        if self.args.should_save:
            remove_unfinished(run)
        self.accelerator.wait_for_everyone()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    # Going on.

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epoch, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._resumed, self._reported_step = None, self.state.global_step
        self._first_step = self.state.global_step
        self._start, self._seconds_before = time.time(), 0.0
        # Without a length, transformers counts all steps as one epoch.
        self._steps_per_epoch = num_update_steps_per_epoch if has_length(self.train_dataset) else None
        if resume_from_checkpoint is None:
            return epoch, batches
        # The checkpoint's state has the intervals of the run before, which this one may change.
        self.state.compute_steps(self.args, max_steps)
        run, folder = Path(self._get_output_dir(trial)), Path(resume_from_checkpoint).parent
        # The run's folder may have been moved, and then what the checkpoint says is wrong.
        run = run if folder.resolve() == run.resolve() else folder
        self._name_best(run)
        progress = self._read_progress(Path(resume_from_checkpoint))
        self._choose_best_anew(run, progress)
        self._resumed = _Resumed(resume_from_checkpoint, progress)
        if progress is not None and not self.args.ignore_data_skip:
            self._check_data(progress)
        if progress is None or self.args.ignore_data_skip or not self._has_same_epochs(progress):
            return epoch, batches
        is_done = progress["num_batches"] >= progress["batches_per_epoch"]
        if self._steps_per_epoch is None:
            # The steps of a run, which may be more now, are not the end of a stream.
            is_done = progress.get("is_exhausted", False)
        if progress["is_epoch_end_reported"] and (is_done or not progress["is_training_stopped"]):
            return progress["epoch"] + 1, 0
        self._resumed.is_epoch_end_due = is_done or progress["is_epoch_stopped"]
        return progress["epoch"], progress["num_batches"]

    def _load_callback_state(self):
        for name, states in self.state.stateful_callbacks.items():
            if name == "TrainerControl":
                continue
            states = states if isinstance(states, list) else [states]
            callbacks = [callback for callback in self.callback_handler.callbacks if type(callback).__name__ == name]
            if len(callbacks) != len(states):
                logger.warning("The checkpoint has %d %s, the run %d.", len(states), name, len(callbacks))
            for callback, state in zip(callbacks, states, strict=False):
                # Through JSON, as the other.
                if (present := json.loads(json.dumps(callback.state()["args"]))) != state["args"]:
                    logger.warning("%s goes on with other settings: %s, before %s.", name, present, state["args"])
                for attribute, value in state["attributes"].items():
                    setattr(callback, attribute, value)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        # Only the evaluation at the start skips the scheduler.
        if skip_scheduler and self._resumed is not None:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _run_epoch(self, **parts):
        resumed, self._resumed = self._resumed, None
        self._epoch, self._batches_per_epoch = parts["epoch"], parts["steps_in_epoch"]
        self._num_batches = 0 if resumed is None else parts["steps_trained_in_current_epoch"]
        self._num_batches_reported, self._is_exhausted = self._num_batches, False
        if resumed is not None:
            self._set_later_aside(resumed, parts["trial"])
            self._restore_totals(resumed)
            if self._is_over() or resumed.is_epoch_end_due:
                return self._end_epoch(resumed, **parts)
        self._data_states, self._num_fetches = make_random_states(data_seed(self.args), parts["epoch"]), 0
        # With several processes, a loader that skips batches does not tell the sampler.
        announce_epoch(parts["train_dataloader"], parts["epoch"])
        return super()._run_epoch(**parts)

    def _set_later_aside(self, resumed: _Resumed, trial) -> None:
        # Not before: what refuses the checkpoint, a callback of another run for instance, has seen it by now.
        if self.args.should_save:
            set_later_aside(resumed.checkpoint, self._get_output_dir(trial))
        self.accelerator.wait_for_everyone()

    def _is_over(self) -> bool:
        return self.state.global_step >= self.state.max_steps or any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )

    def _end_epoch(self, resumed: _Resumed, *, model, epoch, trial, ignore_keys_for_eval, start_time, **_) -> None:
        """Does what the run had left to do after the last step of an epoch, or of all."""
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

    def _restore_totals(self, resumed: _Resumed) -> None:
        if (progress := resumed.progress) is None:
            return
        losses = progress["losses_since_log"]
        is_same = len(losses) == self.args.world_size
        loss = losses[self.args.process_index] if is_same else sum(losses) / len(losses)
        self._tr_loss = torch.tensor(loss, device=self.args.device)
        self._total_loss_scalar = progress["loss_until_log"]
        self._globalstep_last_logged = progress["last_logged_step"]
        self._seconds_before = progress["seconds"]
        # The final mean loss and the speed are those of all steps.
        self._initial_global_step = 0

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self._resumed is not None:
            # No epoch was left to begin.
            self._set_later_aside(self._resumed, trial)
            self._restore_totals(self._resumed)
            self._load_rng_state(self._resumed.checkpoint)
            self._resumed = None
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            for checkpoint in checkpoints_in(self._get_output_dir(trial)):
                if not os.path.samefile(checkpoint, best):
                    discard_checkpoint(checkpoint)
        return super()._finalize_training(trial, num_train_samples, start_time - self._seconds_before)

    # Random states.

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._is_exhausted:
            # A stream that has ended is asked again for each step that is left.
            return [], None
        own, before = get_random_states(), self._data_states
        set_random_states(before)
        try:
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        finally:
            self._data_states = get_random_states()
            set_random_states(own)
        self._is_exhausted = not batches
        self._num_batches += len(batches)
        self._num_fetches += 1
        # The first fetch of an epoch also shuffles and starts workers.
        if self._num_fetches == 2 and not are_equal_states(before, self._data_states):
            logger.warning(
                "The data set or the collator draws from the random generators of this process. A run that is resumed in the "
                "middle of an epoch does not repeat that; what follows from seed, epoch and index would be repeated."
            )
        return batches, num_items

    def evaluate(self, *args, **kwargs):
        """As the parent's. During training it leaves the random states as they were."""
        if not self.is_in_train:
            return super().evaluate(*args, **kwargs)
        with unchanged_random_states(self.args.device):
            return super().evaluate(*args, **kwargs)

    # Saving.

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, learning_rate=None, **kwargs):
        # There is one report after each step, and one more at the end of an epoch.
        self._is_epoch_end = self.state.global_step == self._reported_step
        self._reported_step, self._num_batches_reported = self.state.global_step, self._num_batches
        self._last_report = grad_norm, learning_rate
        self._is_reporting = True
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        finally:
            self._is_reporting = False

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED_NAME) if self._is_saving else folder

    def _save_checkpoint(self, model, trial):
        if not self._is_reporting:
            logger.warning(
                "A checkpoint in the middle of a step: a run that is resumed from it is not bit for bit the same."
            )
        run = Path(self._get_output_dir(trial))
        checkpoint = checkpoint_of_step(run, self.state.global_step)
        unfinished = unfinished_folder(checkpoint)
        if self.args.should_save:
            remove_folder(unfinished)
        self.accelerator.wait_for_everyone()
        self._note_callbacks()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            # torch says of a full disk that a position is not what it expected.
            if shutil.disk_usage(run).free < _LEAST_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(unfinished)) from error
            raise
        finally:
            self._is_saving = False
        # The parent has named the folder it wrote to, and counted the states of namesakes twice.
        self._name_best(run, checkpoint)
        self._note_callbacks()
        progress = self._progress()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
            publish_checkpoint(checkpoint, progress)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            discard_surplus(run, self.args.save_total_limit, [checkpoint, *self._kept_checkpoints(run)])

    def _kept_checkpoints(self, run: Path) -> list[str | Path | None]:
        """Those that `save_total_limit` leaves, however old they are."""
        return [self.state.best_model_checkpoint]

    def _push_from_checkpoint(self, checkpoint_folder):
        # It uploads in the background, so it must have the folder's last name.
        if not self._is_saving:
            super()._push_from_checkpoint(checkpoint_folder)

    def _note_callbacks(self) -> None:
        callbacks = [*self.callback_handler.callbacks, self.control]
        noted = TrainerState(stateful_callbacks=[each for each in callbacks if isinstance(each, ExportableState)])
        self.state.stateful_callbacks = noted.stateful_callbacks

    def _progress(self) -> dict[str, Any]:
        """What transformers does not note. A data set with a `state_dict` of its own would add its place here."""
        norm, rate = self._last_report
        is_reported = self._reported_step == self.state.global_step
        is_mid_step = is_reported and not self._is_reporting
        return {
            **self._layout_of_epochs(),
            **self._best_criterion(),
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
