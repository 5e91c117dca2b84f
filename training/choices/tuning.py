"""Search for better values of a recipe's fields: short trials by transformers' hyper-parameter search, within a time budget."""

import csv
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PrinterCallback, ProgressCallback, Trainer, TrainerCallback, set_seed

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.hints import did_you_mean
from metaphrase.training.alerts import TrainingAlerts
from metaphrase.training.callbacks import TimeBudget, parse_seconds
from metaphrase.training.checkpointing.averaging import DEFAULT_METRIC, RECIPE_NAME, is_better_lower
from metaphrase.training.choices.completion import complete, complete_optimizer, is_completable
from metaphrase.training.choices.rules import learning_rate
from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.estimate import dry_run
from metaphrase.training.recipe.fields import group_of
from metaphrase.training.recipe.recipe import Recipe, saved_recipe
from metaphrase.training.run_folder import checkpoint_to_resume, only_writer

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

STUDY_NAME, START_NAME, TABLE_NAME, BEST_NAME = "study.db", "start.yaml", "trials.tsv", "best"
# Trials that fit into the time if none is pruned.
_TRIALS = 8
_EVALUATIONS = 5
_DECODED_SAMPLES = 500
# Share of a trial's time for updates. The rest is for evaluations.
_UPDATES_SHARE = 0.8
_MIN_UPDATES = 100
_MAX_FAILURES = 5
# Share of a trial that the end of the time may cut off.
_MAX_CUT = 0.2
# Seconds at the end for the table and the picture.
_WRITING_SECONDS = 5.0
# A trial keeps no checkpoints and ends by its own clock.
_TRIAL_FIELDS = {"eval_strategy": "steps", "eval_steps": 1 / _EVALUATIONS, "save_strategy": "no", "disable_tqdm": True}
_TRIAL_FIELDS |= {"load_best_model_at_end": False, "eval_on_start": False}
_TRIAL_FIELDS |= dict.fromkeys(("average_last", "average_best", "early_stopping_patience", "time_budget"))


class _SearchTrainer(Trainer):
    """Trainer whose `hyperparameter_search` gives each trial a trainer of its own.

    A trial may change the network, the batches or a callback, and a Trainer takes these once.
    """

    def __init__(self, experiment: Experiment, make_trainer: Callable[["optuna.Trial"], Trainer]):
        validation = experiment.prepare()[1]["validation"]
        super().__init__(args=experiment.arguments, model_init=_empty_model, eval_dataset=validation)
        self.make_trainer = make_trainer

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        trainer = self.make_trainer(trial)
        trainer.hp_search_backend, trainer.compute_objective = self.hp_search_backend, self.compute_objective
        # The trainer has the values of the trial already.
        trainer.hp_space, trainer.hp_name = lambda _: {}, lambda trial: f"trial-{trial.number}"
        output = trainer.train(trial=trial)
        self.objective = trainer.objective
        return output


def _empty_model() -> torch.nn.Module:
    """Return the model that a Trainer needs to be made."""
    model = torch.nn.Identity()
    model.config = PreTrainedConfig()
    return model


class _TrialEnd(TrainerCallback):
    """Callback that evaluates after the last update, for the score of the trial, and saves nothing."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate |= state.global_step >= state.max_steps
        control.should_save = False


class Tuning:
    """One search in one folder. `run()` fills the folder with the study, a table of its trials, and the best recipe.

    Attributes:
        metric: The metric that trials are compared by.
        space: The range of each searched field.
        study: optuna's study.
    """

    def __init__(self, recipe: Recipe, max_trials: int | None, is_resumed: bool, started: float):
        """Check everything that can be checked before the pairs are read.

        Args:
            recipe: The recipe to start from, with `output_dir` and `time_budget`.
            max_trials: Maximum number of trials, with those before a resumption; None for all that fit into the time.
            is_resumed: True to resume the search of the folder, if it has begun.
            started: Beginning of the time budget, in seconds of `time.time()`.

        Raises:
            ImportError: If optuna is not installed.
            ValueError: If the recipe cannot be searched, or the folder holds something else.
        """
        _import_optuna()
        if recipe.streaming or recipe.tasks or recipe.stages or recipe.objective != "pairs":
            raise ValueError("`streaming`, `tasks`, `stages` and `objective` must be left out of a recipe to tune.")
        if max_trials is not None and max_trials < 1:
            raise ValueError(f"`trials` must be at least 1, got {max_trials}.")
        self.folder, self.max_trials, self.started = Path(recipe.output_dir), max_trials, started
        self.deadline = started + parse_seconds(recipe.time_budget) - _WRITING_SECONDS
        self.is_resumed = (self.folder / STUDY_NAME).is_file()
        if not self.is_resumed:
            checkpoint_to_resume(recipe, self.folder)
        elif is_resumed:
            recipe = _as_started(recipe, self.folder / START_NAME)
        else:
            raise ValueError(f"`output_dir` must not hold another search, got {self.folder}. Pass --resume to go on.")
        self.recipe, self.num_logged = recipe, 0
        if not is_completable(recipe) or "max_tokens_per_batch" not in recipe.search:
            # The start of this field may be open.
            search_space(recipe)

    def run(self) -> None:
        """Run trials until the time is over.

        Raises:
            ValueError: If there are no validation pairs, or no trial has a score.
        """
        with only_writer(self.folder):
            self._prepare()
            options = self._open_study()
            trials = None if self.max_trials is None else self.max_trials - len(self._trials("COMPLETE", "PRUNED"))
            try:
                if trials is None or trials > 0:
                    _SearchTrainer(self.experiment, self._make_trainer).hyperparameter_search(
                        # `_make_trainer` sets the values.
                        lambda trial: {},
                        lambda metrics: metrics[f"eval_{self.metric}"],
                        n_trials=trials,
                        catch=(ValueError, torch.OutOfMemoryError),
                        load_if_exists=True,
                        **options,
                    )
            finally:
                self._write()
            if not self._trials("COMPLETE"):
                raise ValueError(
                    f"`time_budget` must hold a trial that ends with a score, got none in {len(self.rows)}."
                )

    def _prepare(self) -> None:
        """Complete the recipe, and read and encode the pairs."""
        if is_completable(self.recipe) and not self.is_resumed:
            self.experiment, choices = complete(self.recipe, is_dry_run=True, started=self.started)
        else:
            recipe, choices = complete_optimizer(self.recipe)
            self.experiment = Experiment(recipe, is_dry_run=True)
        for choice in choices:
            logger.info("%s", choice)
        self.recipe = recipe = self.experiment.recipe
        tokenizers, encoded = self.experiment.prepare()
        if not encoded.get("validation"):
            raise ValueError("`validation_file` or `num_validation` must be given to compare trials, got neither.")
        self.experiment.check_scored(tokenizers)
        self.space = search_space(recipe)
        decodes = recipe.predict_with_generate and not recipe.prediction_loss_only
        metric = recipe.metric_for_best_model or ((recipe.metrics or [DEFAULT_METRIC])[0] if decodes else "loss")
        self.metric = metric.removeprefix("eval_")
        if not self.is_resumed:
            recipe.save(self.folder / START_NAME)

    def _open_study(self) -> dict[str, Any]:
        """Make or load the study, and return arguments of `optuna.create_study`."""
        optuna = _import_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.RDBStorage(f"sqlite:///{(self.folder / STUDY_NAME).absolute()}")
        direction = "minimize" if is_better_lower(self.metric) else "maximize"
        options = {"study_name": "tune", "storage": storage, "direction": direction}
        self.study = study = optuna.create_study(load_if_exists=True, **options)
        for trial in self._trials("RUNNING"):
            # Its process was killed.
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        if "plan" not in study.user_attrs:
            study.set_user_attr("plan", self._plan())
        # Trials after a resumption are as long as before.
        self.share, self.seconds, updates = (study.user_attrs["plan"][key] for key in ("share", "seconds", "updates"))
        logger.info("A trial has %s updates, %.0f %% of those of the recipe.", f"{updates:,}", 100 * self.share)
        if updates < _MIN_UPDATES and self.share < 1:
            logger.warning("Trials of %d updates show little. Raise `time_budget`.", updates)
        first = {"recipe": {name: item.start for name, item in self.space.items()}}
        if not self.recipe.search:
            first["rule"] = {**first["recipe"], "learning_rate": usual_rate(self.recipe)}
        for origin, values in first.items():
            trials = [trial for trial in study.trials if trial.user_attrs.get("origin") == origin]
            if all(trial.state.name == "FAIL" for trial in trials) and (
                origin == "recipe" or values != first["recipe"]
            ):
                study.enqueue_trial(values, user_attrs={"origin": origin})
        sampler = optuna.samplers.TPESampler(n_startup_trials=4, seed=self.recipe.seed + len(study.trials))
        pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=updates // 3)
        return {**options, "sampler": sampler, "pruner": pruner}

    def _plan(self) -> dict[str, float]:
        """Return the share of the recipe's updates that a trial has, their number, and the seconds that bound a trial."""
        estimate = dry_run(self.experiment)
        seconds = (self.deadline - time.time()) / (self.max_trials or _TRIALS)
        if seconds <= 0:
            raise ValueError("`time_budget` must leave time for trials after the pairs are read, got too little.")
        # The rate of a large network is not measured. Then the seconds alone bound a trial.
        needed = 3600 * (estimate.hours or 0) / _UPDATES_SHARE
        share = min(1.0, seconds / needed) if needed else 1.0
        return {"share": share, "updates": round(share * estimate.data.steps), "seconds": seconds}

    def _make_trainer(self, trial: "optuna.Trial") -> Trainer:
        """Return the trainer of a trial, after the results of earlier trials are written."""
        self._write()
        complete = self._trials("COMPLETE")
        longest = max((done.duration.total_seconds() for done in complete), default=self.seconds)
        if (
            time.time() + (2 - _MAX_CUT) * longest > self.deadline
            or len(self._trials("FAIL")) - len(complete) > _MAX_FAILURES
        ):
            # Another trial after this one would be cut, or fail.
            trial.study.stop()
        for name, item in self.space.items():
            item.suggest(name, trial)
        recipe = self._trial_recipe(rounded(trial.params, self.space))
        # Trackers would take all trials for one run.
        recipe = recipe.replace(run_name=f"{self.folder.name}-trial-{trial.number}")
        experiment = Experiment(recipe, is_dry_run=True)
        experiment.take_data(self.experiment)
        tokenizers, encoded = experiment.prepare()
        set_seed(experiment.arguments.seed)
        trainer = experiment.make_trainer(experiment.make_model(tokenizers), tokenizers, encoded)
        deadline = min(self.deadline, time.time() + self.seconds)
        trainer.add_callback(TimeBudget(deadline, final_share=0.0, seconds=self.seconds))
        trainer.add_callback(_TrialEnd())
        for printer in (PrinterCallback, ProgressCallback, TrainingAlerts):
            trainer.remove_callback(printer)
        return trainer

    def _trial_recipe(self, values: dict[str, Any]) -> Recipe:
        """Return the recipe of a trial: shorter, and without checkpoints."""
        recipe = with_values(self.recipe, values)
        fields = {**_TRIAL_FIELDS, "max_decoded_samples": recipe.max_decoded_samples or _DECODED_SAMPLES}
        length = "max_steps" if recipe.max_steps > 0 else "num_train_epochs"
        for name in (length, "warmup_steps", "r_drop_start_step"):
            value = self.share * getattr(recipe, name)
            # A value of `warmup_steps` below 1 is a share already.
            if name == "num_train_epochs":
                fields[name] = value
            elif getattr(recipe, name) >= 1:
                fields[name] = max(1, round(value))
        return recipe.replace(**fields)

    # Results

    def _trials(self, *states: str) -> list["optuna.trial.FrozenTrial"]:
        return [trial for trial in self.study.trials if trial.state.name in states]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Trial, state, score, seconds and values of each trial that has ended. The score of a pruned trial is its last one."""
        rows = []
        for trial in self._trials("COMPLETE", "PRUNED", "FAIL"):
            score = trial.value if trial.value is not None else trial.intermediate_values.get(trial.last_step)
            score = None if score is None else float(f"{score:.5g}")
            seconds = round(trial.duration.total_seconds(), 1) if trial.duration else None
            row = {"trial": trial.number, "state": trial.state.name.lower(), self.metric: score, "seconds": seconds}
            rows.append(row | dict.fromkeys(self.space) | rounded(trial.params, self.space))
        return rows

    @property
    def best_rows(self) -> list[dict[str, Any]]:
        """The rows of complete trials, the best first."""
        rows = [row for row in self.rows if row["state"] == "complete"]
        return sorted(rows, key=lambda row: row[self.metric], reverse=not is_better_lower(self.metric))

    def _write(self) -> None:
        """Write the table, and the best recipe, if there is one."""
        rows = self.rows
        for row in rows[self.num_logged :]:
            logger.info("%s", ", ".join(f"{name} {value}" for name, value in row.items()))
        self.num_logged = len(rows)
        if not (best_rows := self.best_rows):
            return
        with (self.folder / TABLE_NAME).open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, rows[0], delimiter="\t", lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        best, path = best_rows[0], self.folder / RECIPE_NAME
        values = {name: best[name] for name, item in self.space.items() if best[name] != item.start}
        changed = {name.partition(".")[0]: f"{name} was {self.space[name].start}" for name in values}
        recipe = with_values(self.recipe, {**values, "output_dir": str(self.folder / BEST_NAME)})
        head = f"# Trial {best['trial']}, the best of {len(rows)}: {self.metric} {best[self.metric]:.4g} on validation pairs"
        head += f" after {100 * self.share:.0f} % of the updates.\n"
        recipe.replace(reasons={**recipe.reasons, **changed}).save(path, head)


def _import_optuna():
    try:
        import optuna
    except ImportError as error:
        raise ImportError("`metaphrase tune` needs optuna: pip install metaphrase[tune].") from error
    return optuna


def _as_started(recipe: Recipe, path: Path) -> Recipe:
    """Return the recipe that a search has started from, with all that was chosen.

    Raises:
        ValueError: If a field differs from before.
    """
    before = saved_recipe(path)
    saved = before.to_dict()
    for name, value in recipe.to_dict().items():
        if value != saved.get(name):
            raise ValueError(f"`{name}` must stay as it was in {path} when a search is resumed, got {value!r}.")
    names = [name for name in before.set_names if not recipe.is_set(name)]
    return recipe.replace(**{name: getattr(before, name) for name in names})


if TYPE_CHECKING:
    import optuna

# Data are encoded once, and all trials are scored in one way.
_FIXED_GROUPS = ("data", "tasks", "stages", "tokenizer", "evaluation", "search")
_FIXED = {"model_name_or_path", "time_budget", "max_steps", "num_train_epochs", "average_last", "average_best"}
_FIXED |= {"output_dir", "seed", "data_seed", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"}
_FIXED_PREFIXES = ("eval_", "save_", "logging_", "per_device_eval_", "generation_")
# The default search tries learning rates over a factor of 30.
_RATE_FACTOR = math.sqrt(30)


@dataclass(frozen=True)
class SearchRange:
    """Values of one field: some listed ones, or the numbers from `low` to `high`. `start` is the recipe's value."""

    start: Any
    values: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    is_log: bool = False

    @classmethod
    def parse(cls, name: str, declared: Any, start: Any) -> "SearchRange":
        """Read a declared range, and extend it to hold the recipe's value.

        Raises:
            ValueError: If it is no range.
        """
        match declared:
            case [_, *_] if all(isinstance(value, str | int | float | None) for value in (start, *declared)):
                return cls(start, values=tuple(declared) if start in declared else (start, *declared))
            case {"low": int() | float() as low, "high": int() | float() as high, **rest} if low <= high:
                pass
            case _:
                low, high, rest = 0, 0, {"": True}
        is_log = rest.pop("log", False)
        if rest or not isinstance(is_log, bool):
            raise ValueError(
                f"`search.{name}` must be a list of values or {{low: 1e-4, high: 1e-2, log: true}}, got {declared!r}."
            )
        if isinstance(start, bool) or not isinstance(start, int | float):
            raise ValueError(f"`{name}` must be a number to be searched between two numbers, got {start!r}.")
        low, high = (
            type(start)(bound) if isinstance(start, float) else bound for bound in (min(low, start), max(high, start))
        )
        if is_log and low <= 0:
            raise ValueError(f"`{name}` and `search.{name}` must be above 0 with log, got {low}.")
        return cls(start, (), low, high, is_log)

    def suggest(self, name: str, trial: "optuna.Trial") -> None:
        """Let a trial choose its value."""
        if self.values:
            trial.suggest_categorical(name, self.values)
        else:
            is_whole = isinstance(self.low, int) and isinstance(self.high, int)
            (trial.suggest_int if is_whole else trial.suggest_float)(name, self.low, self.high, log=self.is_log)

    def corner(self, index: int) -> Any:
        """Return the listed value of an index, or the low number at 0 and the high one elsewhere."""
        return self.values[index % len(self.values)] if self.values else self.high if index else self.low


def search_space(recipe: Recipe) -> dict[str, SearchRange]:
    """Return the ranges that a recipe declares, or default ones.

    Raises:
        ValueError: If a field does not exist, cannot be searched, or would have a wrong value.
    """
    declared = recipe.search or _default_search(recipe)
    space = {name: SearchRange.parse(name, value, _value(recipe, name)) for name, value in declared.items()}
    for index in range(max(2, *(len(item.values) for item in space.values()))):
        corner = {name: item.corner(index) for name, item in space.items()}
        fields = {name: getattr(recipe, name) for name in recipe.set_names} | _fields(recipe, corner)
        checked = Recipe.from_mapping(fields, "`search`")
        if checked.model_name_or_path is None:
            _config(checked)
    return space


def usual_rate(recipe: Recipe) -> float:
    """Return the learning rate of the rules for a new network, and that of the recipe for a model to fine-tune."""
    return recipe.learning_rate if recipe.model_name_or_path else learning_rate(_config(recipe).hidden_size)


def rounded(values: Mapping[str, Any], space: Mapping[str, SearchRange]) -> dict[str, Any]:
    """Return the values of a trial as they are used: with three digits, but for the recipe's own."""
    is_new = {name: isinstance(value, float) and value != space[name].start for name, value in values.items()}
    return {name: float(f"{value:.3g}") if is_new[name] else value for name, value in values.items()}


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the values of a trial."""
    return recipe.replace(**_fields(recipe, values))


def _fields(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field. A name with a dot sets one key of a mapping."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        field, dot, key = name.partition(".")
        fields[field] = {**fields.get(field, getattr(recipe, field)), key: value} if dot else value
    return fields


def _value(recipe: Recipe, name: str) -> Any:
    """Return the value of a field that may be searched.

    Raises:
        ValueError: If there is no such field, or it may not be searched.
    """
    field, _, key = name.partition(".")
    group = group_of(field, "`search`")
    if group in _FIXED_GROUPS or field in _FIXED or field.startswith(_FIXED_PREFIXES):
        raise ValueError(f"`search` must name fields that may differ between trials, got `{name}`.")
    value = getattr(recipe, field)
    if isinstance(value, dict) is not bool(key):
        raise ValueError(f"`search` must name one value, such as learning_rate or model.dropout, got `{name}`.")
    if field != "model":
        return value.get(key) if key else getattr(value, "value", value)
    config = _config(recipe)
    if not hasattr(config, key):
        raise ValueError(f"`{key}` is not a field of MetaphraseConfig.{did_you_mean(key, vars(config))}")
    return getattr(config, key)


def _config(recipe: Recipe) -> MetaphraseConfig:
    # With two vocabularies, embeddings cannot be shared.
    return MetaphraseConfig.from_preset(recipe.preset, **{"share_embeddings": False, **recipe.model})


def _default_search(recipe: Recipe) -> dict[str, Any]:
    rate = usual_rate(recipe)
    search: dict[str, Any] = {
        "learning_rate": {"low": rate / _RATE_FACTOR, "high": rate * _RATE_FACTOR, "log": True},
        "label_smoothing_factor": {"low": 0.0, "high": 0.2},
    }
    if recipe.model_name_or_path is None:
        search["model.dropout"] = {"low": 0.0, "high": 0.4}
    budget, size = recipe.max_tokens_per_batch, recipe.per_device_train_batch_size
    if budget is None:
        return {**search, "per_device_train_batch_size": [max(1, size // 2), size, 2 * size]}
    # A batch must hold the longest pair.
    longest = recipe.max_source_length + recipe.max_target_length
    return {**search, "max_tokens_per_batch": [*([budget // 2] if budget // 2 >= longest else []), budget, 2 * budget]}
