"""Exponential average of the weights, which is evaluated and saved in their place.

Source: averaging of the iterates, Polyak and Juditsky 1992; with exponential weights and their warm-up as in
`tf.train.ExponentialMovingAverage`.
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

from metaphrase.training.checkpointing.folders import EXPONENTIAL_AVERAGE_NAME

logger = logging.getLogger(__name__)


class ExponentialAverage(TrainerCallback):
    """Average of the trained weights: after each optimizer step, average = decay * average + (1 - decay) * weights.

    A callback for `MetaphraseTrainer`, which evaluates the averages in place of the weights. `save_model()` saves the averages.
    When training ends, they become the model's weights. A checkpoint holds both: the weights of the optimizer in the model's own
    files, and the averages in `exponential_average.safetensors`. A logged score is a score of the averages.

    Averages are in float32 or wider, for trained parameters alone. An evaluation needs memory for one more copy of the weights.
    """

    def __init__(self, decay: float, warmup: bool = True):
        """Args:
        decay: Share that the average keeps in each step.
        warmup: Whether to use (1 + t) / (10 + t) after t steps as long as that is less than `decay`, so that the initial weights
            are soon forgotten.

        Raises:
            ValueError: If `decay` is not in [0, 1).
        """
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        # By parameter name; empty outside training.
        self.averages: dict[str, torch.Tensor] = {}
        # The checkpoint to resume from. `auto_find_batch_size` may begin several times.
        self.resumed_folder: Path | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._begin(model)
        if self.resumed_folder is not None:
            self._load_or_begin(self.resumed_folder, model)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        # With float16, a step whose gradients overflowed is skipped.
        if not getattr(optimizer, "step_was_skipped", False):
            self.update(model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The best score is that of the averages, if the checkpoint has some.
            self._load_or_begin(Path(state.best_model_checkpoint), model)
        _copy_into(_parameters(model, self.averages), self.averages)
        self.averages = {}

    def _begin(self, model: nn.Module) -> None:
        self.num_updates = 0
        self.averages = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def _load_or_begin(self, checkpoint: Path, model: nn.Module) -> None:
        if has_average(checkpoint):
            self.load(checkpoint)
            return
        logger.warning("%s holds no exponential average: it begins with the weights there.", checkpoint)
        self._begin(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights of one step to the averages."""
        averages = list(self.averages.values())
        weights = [parameter.to(self.averages[name]) for name, parameter in _parameters(model, self.averages).items()]
        bound = (1 + self.num_updates) / (10 + self.num_updates) if self.warmup else 1.0
        get_ema_multi_avg_fn(min(self.decay, bound))(averages, weights, None)
        self.num_updates += 1

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averages as weights inside this context, and its weights back afterwards, bit for bit."""
        parameters = _parameters(model, self.averages)
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            _copy_into(parameters, self.averages)
            yield
        finally:
            _copy_into(parameters, weights)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the averages and the number of updates into a checkpoint."""
        averages = {name: average.contiguous() for name, average in self.averages.items()}
        settings = {"num_updates": str(self.num_updates), "decay": repr(self.decay), "warmup": str(self.warmup)}
        save_file(averages, Path(folder) / EXPONENTIAL_AVERAGE_NAME, settings)

    def load(self, folder: str | os.PathLike) -> None:
        """Load the averages of a checkpoint.

        Raises:
            ValueError: If the checkpoint holds averages of other parameters.
        """
        path = Path(folder) / EXPONENTIAL_AVERAGE_NAME
        with safe_open(path, framework="pt") as file:
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            settings = file.metadata()
        for name in sorted(saved.keys() | self.averages.keys()):
            shapes = [list(side[name].shape) if name in side else "nothing" for side in (self.averages, saved)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"`{name}` must be trained and of the same shape here and in {path}, got {shapes[0]} and {shapes[1]}."
                )
        for name, average in self.averages.items():
            average.copy_(saved[name])
        self.num_updates = int(settings["num_updates"])
        if (settings["decay"], settings["warmup"]) != (repr(self.decay), str(self.warmup)):
            logger.warning(
                "The average goes on with another decay: %s, warm-up %s, after %s, warm-up %s.",
                *(self.decay, self.warmup, settings["decay"], settings["warmup"]),
            )


def has_average(checkpoint: str | os.PathLike) -> bool:
    """True if a checkpoint holds an exponential average."""
    return (Path(checkpoint) / EXPONENTIAL_AVERAGE_NAME).is_file()


def _parameters(model: nn.Module, names: dict[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in names}


@torch.no_grad()
def _copy_into(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
    # In place: a wrapper of the model or a compiled step may refer to this memory.
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
