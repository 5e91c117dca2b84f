"""The place in the data that a checkpoint notes, and whether it leads to the same pairs in the run that goes on from it."""

import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from metaphrase.training.checkpoint_folders import PROGRESS_NAME
from metaphrase.training.data_fingerprint import data_fingerprint

logger = logging.getLogger(__name__)

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
