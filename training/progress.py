"""Progress of training: a bar with plain lines on a terminal, lines of the log elsewhere."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from metaphrase.inference.progress import ProgressLines, has_bar, short_duration

logger = logging.getLogger(__name__)

# Logged values that are no scores.
_OTHER_VALUES = ("runtime", "per_second", "epoch")


class ProgressLog(TrainerCallback):
    """Callback that logs the progress of updates, and the scores of each evaluation."""

    def __init__(self, deadline: float):
        self.deadline, self.lines, self.note = deadline, ProgressLines(None, "update"), ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.lines = ProgressLines(state.max_steps, "update", state.global_step, self.deadline - time.time())

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.note = _note(logs) or self.note

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.lines.update(state.global_step - self.lines.done, self.note)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            logger.info("%s", _line(state.global_step, metrics))


class ProgressBars(ProgressCallback):
    """Bars of transformers. Instead of its dictionaries, the bar shows the loss, and each evaluation writes a line."""

    def __init__(self, deadline: float):
        super().__init__()
        self.deadline = deadline

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None and self.deadline < math.inf:
            # tqdm would show the time for all updates, and the run ends before them.
            self.training_bar.bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and (note := _note(logs)):
            left = self.deadline - time.time()
            self.training_bar.set_postfix_str(f"{note}, {short_duration(left)} left" if left < math.inf else note)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        super().on_evaluate(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.write(_line(state.global_step, metrics), file=sys.stderr)


def _note(logs: Mapping | None) -> str:
    return f"loss {float(logs['loss']):.3g}" if "loss" in (logs or {}) else ""


def _line(step: int, metrics: Mapping | None) -> str:
    scores = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
    texts = [f"{name} {value:.4g}" for name, value in scores.items() if not name.endswith(_OTHER_VALUES)]
    return f"update {step}, validation: {', '.join(texts)}"


def with_plain_lines(trainer: Trainer, deadline: float = math.inf) -> Trainer:
    """Return the trainer with plain lines in place of transformers' dictionaries, and of bars that cannot be shown.

    A notebook keeps the table of transformers.

    Args:
        trainer: The trainer before training.
        deadline: End of the run, in seconds of `time.time()`.
    """
    if trainer.args.disable_tqdm or not has_bar():
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(ProgressLog(deadline))
    elif trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ProgressBars(deadline))
    return trainer


@contextlib.contextmanager
def without_weight_bars() -> Iterator[None]:
    """Hide transformers' bars for loading and saving weights, since each checkpoint would show two."""
    is_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            transformers_logging.enable_progress_bar()
