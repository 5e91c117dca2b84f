"""Time budget of a run: training ends in time, with a learning rate that has decayed by then."""

import re
import time

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as `90s`, `20m`, `1.5h` or `2d`.

    Raises:
        ValueError: If it is no number with one of these units, or not above 0.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(f"`time_budget` must be a number above 0 with one of s, m, h or d, such as 20m, got {text!r}.")
    return seconds


class TimeBudget(TrainerCallback):
    """Callback that ends training at a deadline, and moves the schedule of the learning rate on by the clock.

    The schedule follows the steps or the clock, whichever is further. So a slow machine ends with a low learning rate too. Time
    for the scores of the finished model is reserved by the duration of the last evaluation.

    Args:
        deadline: End of the run, in seconds of `time.time()`.
        final_share: Duration of the final scores, relative to an evaluation during training.
    """

    def __init__(self, deadline: float, final_share: float):
        self.deadline, self.final_share = deadline, final_share
        self.start, self.reserved = time.time(), 0.0

    @property
    def progress(self) -> float:
        """Share of the time for training that is over."""
        return (time.time() - self.start) / max(1e-9, self.deadline - self.reserved - self.start)

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        self.start = time.time()
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)
        if isinstance(scheduler, LambdaLR):
            scheduler.lr_lambdas = [self._by_clock(factor, state.max_steps) for factor in scheduler.lr_lambdas]

    def _by_clock(self, factor, max_steps: int):
        return lambda step: factor(max(step, min(max_steps, int(self.progress * max_steps))))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.reserved = self.final_share * (metrics or {}).get("eval_runtime", 0.0)

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress >= 1:
            control.should_training_stop = control.should_evaluate = control.should_save = True
