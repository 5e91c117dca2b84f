"""Progress of training in lines of the log, where there is no terminal for the bar of transformers."""

import contextlib
import logging
from collections.abc import Iterator

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from metaphrase.inference.progress import ProgressLines, has_bar

logger = logging.getLogger(__name__)

# Logged values that are no scores.
_OTHER_VALUES = ("runtime", "per_second", "epoch")


class ProgressLog(TrainerCallback):
    """Callback that logs the progress of updates, and the scores of each evaluation."""

    def __init__(self) -> None:
        self.lines, self.note = ProgressLines(None, "update"), ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.lines = ProgressLines(state.max_steps, "update", initial=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.note = f"loss {float(logs['loss']):.3g}"

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.lines.update(state.global_step - self.lines.done, self.note)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        scores = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
        texts = [f"{name} {value:.4g}" for name, value in scores.items() if not name.endswith(_OTHER_VALUES)]
        if state.is_world_process_zero:
            logger.info("update %d: %s", state.global_step, ", ".join(texts))


def without_bars(trainer: Trainer) -> Trainer:
    """Return the trainer with lines in place of transformers' bars, unless a terminal or a notebook can show bars."""
    if trainer.args.disable_tqdm or not has_bar():
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(ProgressLog)
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
