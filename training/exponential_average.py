"""Exponential average: a mean of the weights that follows training, and is evaluated and kept in their place.

Source: averaging of the iterates, Polyak and Juditsky 1992; with exponential weights as `tf.train.ExponentialMovingAverage`, from
which the warm-up of the decay is taken too.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback

from metaphrase.storage.folders import file_in_one_step

logger = logging.getLogger(__name__)

EXPONENTIAL_AVERAGE_NAME = "exponential_average.safetensors"


class ExponentialAverage(TrainerCallback):
    """Averages what is trained: after each optimizer step, average = decay * average + (1 - decay) * weights.

    Needs a trainer with `ExponentialAverageMixin`. The averages are evaluated in place of the weights, saved in their place by
    `save_model()`, and are the model's weights when training has ended. A checkpoint holds both: in the model's own files the
    weights as the optimizer left them, to go on from, and the averages in `exponential_average.safetensors`. A score logged for
    a checkpoint is one of the averages.

    They are kept in float32 (or wider) for trained parameters alone; buffers and what is frozen stay as they are. An evaluation
    needs memory for one more copy of the weights.
    """

    def __init__(self, decay: float, warmup: bool = True):
        """Args:
        decay: Share that the average keeps in each step.
        warmup: Whether to keep less in the beginning, (1 + t) / (10 + t) after t steps, as long as that is less than `decay`:
            the weights that training starts from are then soon forgotten.

        Raises:
            ValueError: If `decay` is not in [0, 1).
        """
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        # By parameter name; empty when no training is under way.
        self.averages: dict[str, torch.Tensor] = {}
        # The checkpoint that training goes on from, again where it begins once more with smaller batches.
        self.resumed_folder: Path | None = None

    def decay_after(self, num_updates: int) -> float:
        """The decay of the update that follows so many."""
        return min(self.decay, (1 + num_updates) / (10 + num_updates)) if self.warmup else self.decay

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.begin(model)
        if self.resumed_folder is not None:
            self.load_or_begin(self.resumed_folder, model)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        # With float16, a step whose gradients overflowed is none.
        if not getattr(optimizer, "step_was_skipped", False):
            self.update(model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        _copy_into(_parameters(model, self.averages), self.averages)
        self.averages = {}

    def begin(self, model: nn.Module) -> None:
        """Starts a new average at the weights of a model."""
        self.num_updates = 0
        self.averages = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def load_or_begin(self, folder: str | os.PathLike, model: nn.Module) -> None:
        """Goes on from the averages of a checkpoint, or starts at its weights, which the model has, if it holds none.

        Raises:
            ValueError: If it holds those of other parameters.
        """
        if (Path(folder) / EXPONENTIAL_AVERAGE_NAME).is_file():
            self.load(folder)
            return
        logger.warning("%s holds no exponential average: it begins with the weights there.", folder)
        self.begin(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes one step's weights into the averages."""
        averages = list(self.averages.values())
        weights = [parameter.to(self.averages[name]) for name, parameter in _parameters(model, self.averages).items()]
        get_ema_multi_avg_fn(self.decay_after(self.num_updates))(averages, weights, None)
        self.num_updates += 1

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averages for weights; afterwards it has its own again, bit for bit."""
        parameters = _parameters(model, self.averages)
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            _copy_into(parameters, self.averages)
            yield
        finally:
            _copy_into(parameters, own)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the averages, and how many updates they have seen, into a checkpoint."""
        path = Path(folder) / EXPONENTIAL_AVERAGE_NAME
        settings = {"num_updates": str(self.num_updates), "decay": repr(self.decay), "warmup": str(self.warmup)}
        with file_in_one_step(path) as partial:
            save_file({name: average.contiguous() for name, average in self.averages.items()}, partial, settings)

    def load(self, folder: str | os.PathLike) -> None:
        """Goes on from the averages of a checkpoint.

        Raises:
            ValueError: If it holds none, or those of other parameters.
        """
        path = Path(folder) / EXPONENTIAL_AVERAGE_NAME
        if not path.is_file():
            raise ValueError(
                f"A checkpoint must hold {EXPONENTIAL_AVERAGE_NAME} to go on with an exponential average, got none in {folder}. "
                "Start a new run from its weights, or go on without an average."
            )
        with safe_open(path, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            ours = {name: tuple(average.shape) for name, average in self.averages.items()}
            for name in sorted(saved.keys() | ours.keys()):
                if saved.get(name) != ours.get(name):
                    raise ValueError(
                        f"`{name}` must be trained and of the same shape here and in {path}, "
                        f"got {ours.get(name, 'nothing')} and {saved.get(name, 'nothing')}."
                    )
            for name, average in self.averages.items():
                average.copy_(file.get_tensor(name))
            settings = file.metadata()
        self.num_updates = int(settings["num_updates"])
        if (settings["decay"], settings["warmup"]) != (repr(self.decay), str(self.warmup)):
            logger.warning(
                "The average goes on with another decay: %s, warm-up %s, after %s, warm-up %s.",
                *(self.decay, self.warmup, settings["decay"], settings["warmup"]),
            )


def _parameters(model: nn.Module, names: dict[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in names}


@torch.no_grad()
def _copy_into(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
    # In place: a wrapper of the model or a compiled step may hold on to the very memory.
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


class ExponentialAverageMixin:
    """For a trainer, before its parents: what `ExponentialAverage`, if it is among the callbacks, cannot do by itself."""

    def _exponential_average(self) -> ExponentialAverage | None:
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, ExponentialAverage)), None)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        average = self._exponential_average()
        return contextlib.nullcontext() if average is None else average.swapped_in(self.model)

    def train(self, *args, **kwargs):
        average = self._exponential_average()
        if average is not None:
            average.resumed_folder = None
        if average is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            kind = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(f"An exponential average needs the whole model on each device, got it sharded by {kind}.")
        return super().train(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with self._averaged():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        with self._averaged():
            return super().predict(*args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        is_checkpoint = _internal_call and output_dir is not None
        with contextlib.nullcontext() if is_checkpoint else self._averaged():
            super().save_model(output_dir, _internal_call)
        average = self._exponential_average()
        if is_checkpoint and average is not None and average.averages and self.args.should_save:
            average.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        average = self._exponential_average()
        if average is not None:
            average.resumed_folder = Path(resume_from_checkpoint)
        elif (Path(resume_from_checkpoint) / EXPONENTIAL_AVERAGE_NAME).is_file():
            logger.warning("%s holds an exponential average, which this run leaves alone.", resume_from_checkpoint)

    def _is_loaded_as_scored(self, checkpoint):
        # Without the callback, the weights beside the averages would be loaded.
        has_averages = (checkpoint / EXPONENTIAL_AVERAGE_NAME).is_file()
        return super()._is_loaded_as_scored(checkpoint) and (
            self._exponential_average() is not None or not has_averages
        )

    def _load_best_model(self):
        super()._load_best_model()
        average = self._exponential_average()
        if average is not None:
            # It was the average that did best, unless there was none yet.
            average.load_or_begin(self.state.best_model_checkpoint, self.model)
