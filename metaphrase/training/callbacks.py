"""Callbacks of a run: early ends by time, score or Ctrl-C, progress in plain lines, and the values of a resumed run."""

import contextlib
import logging
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from metaphrase.errors import MetaphraseError
from metaphrase.inference.progress import ProgressLines
from metaphrase.training.distributed import from_first_process
from metaphrase.training.recipe.fields import DECODING
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Time for the final scores while the duration of an evaluation is unknown: a share of the time for training, or many seconds.
_UNKNOWN_SHARE, _UNKNOWN_SECONDS = 0.2, 60


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as `90s`, `20m`, `1.5h` or `2d`, and refuse anything else, and 0."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise MetaphraseError(f"`time_budget` must be a number above 0 with s, m, h or d, such as 20m, got {text!r}.")
    return seconds


class EarlyEnd(TrainerCallback):
    """Callback that ends training as soon as `is_due`, after an update that is evaluated and saved if the run does so."""

    has_ended = False
    is_due: Callable[[], bool]

    def on_step_end(self, args, state, control, **kwargs):
        EarlyEnd.on_evaluate(self, args, state, control)
        if self.has_ended:
            control.should_evaluate = args.eval_strategy != "no"

    def on_evaluate(self, args, state, control, **kwargs):
        if self.is_due():
            self.has_ended = control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.has_ended:
            # The last update is evaluated and saved already.
            control.should_evaluate = control.should_save = False


class TimeBudget(EarlyEnd):
    """Callback that ends training at a deadline, and moves the schedule of the learning rate on by the clock.

    The schedule follows the steps or the clock, whichever is further. So a slow machine ends with a low learning rate too. The
    duration of the last evaluation tells how much time another one and the scores of the finished model need.

    The clock of the first process counts for all, so that they have one rate and end at one update. It is sent between the
    main memories once an update, which no accelerator waits for.

    Args:
        deadline: End of the run, in seconds of `time.time()`.
        final_share: Duration of the final scores, relative to an evaluation during training.
        seconds: Duration of the run.
    """

    def __init__(self, deadline: float, final_share: float, seconds: float):
        self.deadline, self.final_share, self.seconds = deadline, final_share, seconds
        self.start, self.reserved, self.progress = time.time(), 0.0, 0.0

    def on_optimizer_step(self, *_, **__):
        # The step of the schedule follows.
        seconds = max(1e-9, self.deadline - self.reserved - self.start)
        self.progress = from_first_process(lambda: (time.time() - self.start) / seconds)

    def is_due(self) -> bool:
        return self.progress >= 1

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        self.start = time.time()
        if self.final_share:
            self.reserved = min(_UNKNOWN_SECONDS, _UNKNOWN_SHARE * max(0.0, self.deadline - self.start))
        used = self.seconds - (self.deadline - self.start)
        if 2 * used > self.seconds and state.is_world_process_zero:
            logger.warning(
                "`time_budget` is short: %.0f of its %.0f seconds have passed before the first update. The model will be poor, "
                "and the run may end late. Set `time_budget` to %.0fs or more.",
                *(used, self.seconds, 10 * math.ceil(used / 3)),
            )
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)
        if isinstance(scheduler, LambdaLR):
            most = state.max_steps
            scheduler.lr_lambdas = [
                lambda step, factor=factor: factor(max(step, min(most, int(self.progress * most))))
                for factor in scheduler.lr_lambdas
            ]
        self.on_optimizer_step()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.reserved = (1 + self.final_share) * (metrics or {}).get("eval_runtime", 0.0)
        self.on_optimizer_step()
        super().on_evaluate(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        if self.has_ended:
            _log_end(state, "the rest of the time is for scores" if self.final_share else "`time_budget` is over")


# Scores of text, for which several length penalties are compared.
TEXT_SCORES = ("bleu", "chrf", "chrf++", "ter", "rouge")
# Duration of a search with beams, relative to greedy search.
BEAMS_COST = 2.0


def final_share(recipe: Recipe, metrics: Sequence[str], num_scored: int, num_validation: int) -> float:
    """Return the duration of all that follows training, relative to an evaluation, which is greedy and may decode fewer pairs.

    `num_scored` is the number of pairs that the finished model is scored on, 0 if it is not scored.
    """
    num_decoded = min(num_validation, recipe.max_decoded_samples or num_validation)
    if not num_scored:
        return 0.0
    if not num_decoded:
        # No evaluation tells how long it takes.
        return 1.0
    is_open = recipe.choose_decoding and recipe.is_open(*DECODING)
    beams = BEAMS_COST if is_open or (recipe.num_beams or 1) > 1 else 1
    # Greedy search, and beams: for text with several length penalties, and with early stopping.
    choice = 1 + BEAMS_COST * (4 if metrics[0] in TEXT_SCORES else 2) if is_open and metrics else 0
    # The mean of checkpoints is evaluated once.
    return beams * num_scored / num_decoded + choice + (recipe.average_best is not None)


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping that logs why training ends, and counts no evaluation before the first score above 0."""

    # transformers would warn if the best weights are averaged, not loaded. The recipe is checked before.
    def on_train_begin(self, args, state, control, **kwargs):
        pass

    def check_metric_value(self, args, state, control, metric_value):
        # The score of a network that has learned little yet is exactly 0, in many evaluations.
        if not args.greater_is_better or metric_value or state.best_metric:
            super().check_metric_value(args, state, control, metric_value)

    def on_train_end(self, args, state, control, **kwargs):
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            metric, count = args.metric_for_best_model.removeprefix("eval_"), self.early_stopping_patience
            _log_end(state, f"{metric} was no better for {count} evaluation{'s' if count > 1 else ''}")


class EndOnInterrupt(EarlyEnd):
    """Callback that ends training after the update in which Ctrl-C was pressed, so that the model is finished and scored.

    A resumed run goes on from the last update.
    """

    is_interrupted = False

    def is_due(self) -> bool:
        return self.is_interrupted

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Receive Ctrl-C within this context; the second one is an interrupt as usual."""
        if threading.current_thread() is not threading.main_thread():
            # Python allows handlers in the main thread alone.
            yield
            return
        before = signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _receive(self, number: int, frame) -> None:
        self.is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.warning(
            "Training ends after this update. Then the model is saved and scored. Press Ctrl-C again to end at once; the "
            "checkpoints stay, and --resume goes on from the last one."
        )


def _log_end(state: TrainerState, reason: str) -> None:
    if state.global_step < state.max_steps and state.is_world_process_zero:
        logger.info("Training ends at update %d of %d: %s.", state.global_step, state.max_steps, reason)


# Logged values that are no scores.
_OTHER_VALUES = ("runtime", "per_second", "epoch")


class ProgressLog(TrainerCallback):
    """Callback that logs the progress of updates, and the scores of each evaluation."""

    def __init__(self, deadline: float):
        self.deadline, self.lines, self.note = deadline, ProgressLines(None, "update"), ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.lines = ProgressLines(state.max_steps, "update", state.global_step, self.deadline - time.time())

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            shown = (name for name in ("loss", "reward", "rewards/accuracies") if name in logs)
            self.note = ", ".join(f"{name} {float(logs[name]):.3g}" for name in shown)

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.lines.update(state.global_step - self.lines.done, self.note)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.is_world_process_zero:
            scores = {name.removeprefix("eval_"): value for name, value in metrics.items()}
            texts = [f"{name} {value:.4g}" for name, value in scores.items() if not name.endswith(_OTHER_VALUES)]
            logger.info("update %d, validation: %s", state.global_step, ", ".join(texts))


def restore_callbacks(state: TrainerState, callbacks: Sequence[TrainerCallback], control: TrainerControl) -> None:
    """Restore the values of callbacks that a checkpoint's `state` stores. Later checkpoints store those of the present callbacks.

    transformers' `restore_callback_states_from_checkpoint` would restore the arguments of the callbacks too.
    """
    for name, values in state.stateful_callbacks.items():
        values = values if isinstance(values, list) else [values]
        namesakes = [callback for callback in callbacks if type(callback).__name__ == name]
        # If a class has several callbacks, transformers appends to the states of earlier checkpoints. The last ones count.
        for callback, value in zip(namesakes, values[-len(namesakes) :], strict=False):
            for attribute, content in value["attributes"].items():
                setattr(callback, attribute, content)
    # transformers would store the states of callbacks that the checkpoint knows, and fail at others.
    present = [callback for callback in (*callbacks, control) if isinstance(callback, ExportableState)]
    now = TrainerState(stateful_callbacks=present).stateful_callbacks
    # A run that saves no further checkpoint ends with the values of this one.
    saved = {name: values for name, values in state.stateful_callbacks.items() if isinstance(now.get(name), dict)}
    state.stateful_callbacks = now | saved
