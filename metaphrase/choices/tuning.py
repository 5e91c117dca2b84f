"""Search for better values of a recipe's fields by optuna: short trials within a time budget."""

import csv
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from metaphrase.choices.alerts import TrainingAlerts
from metaphrase.choices.completion import complete
from metaphrase.choices.estimate import estimate_recipe
from metaphrase.errors import MetaphraseError, naming_extra
from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.callbacks import ProgressLog, TimeBudget, parse_seconds
from metaphrase.training.checkpoints import DEFAULT_METRIC, RECIPE_NAME, checkpoint_to_resume, only_writer
from metaphrase.training.experiment import Experiment, make_arguments, make_trainer
from metaphrase.training.model_setup import make_model
from metaphrase.training.recipe.fields import decodes, group_of
from metaphrase.training.recipe.recipe import Recipe, is_better_lower, learning_rate, saved_recipe

with naming_extra("tune", "optuna"):
    import optuna

logger = logging.getLogger(__name__)

STUDY_NAME, START_NAME, TABLE_NAME, BEST_NAME = "study.db", "start.yaml", "trials.tsv", "best"
# Trials that fit into the time if none is pruned.
_TRIALS = 8
_ENDED = ("COMPLETE", "PRUNED", "FAIL")
# A trial has five evaluations, keeps no checkpoints and ends by its own clock.
_TRIAL_FIELDS = {"eval_strategy": "steps", "eval_steps": 1 / 5, "save_strategy": "no", "disable_tqdm": True}
_TRIAL_FIELDS |= {"load_best_model_at_end": False, "eval_on_start": False}
_TRIAL_FIELDS |= dict.fromkeys(("average_last", "average_best", "early_stopping_patience", "time_budget"))


class _TrialScores(TrainerCallback):
    """Callback that reports each score to optuna, which may end the trial, and evaluates after the last update."""

    def __init__(self, trial: optuna.Trial, metric: str):
        self.trial, self.metric, self.score = trial, metric, math.nan

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate |= state.global_step >= state.max_steps
        control.should_save = False

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.score = metrics[f"eval_{self.metric}"]
        self.trial.report(self.score, state.global_step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


class Tuning:
    """One search in one folder. `run()` fills the folder with the study, a table of its trials, and the best recipe."""

    def __init__(self, recipe: Recipe, max_trials: int | None, is_resumed: bool, started: float):
        """Check everything that can be checked before the pairs are read.

        Args:
            recipe: The recipe to start from, with `output_dir` and `time_budget`.
            max_trials: Maximum number of trials, with those before a resumption; None for all that fit into the time.
            is_resumed: True to resume the search of the folder, if it has begun. Its fields fill those that are open.
            started: Beginning of the time budget, in seconds of `time.time()`.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        refused = ("streaming", "tasks", "stages", "monolingual_target", "num_seeds", "objective")
        if any(getattr(recipe, name) != Recipe.model_fields[name].default for name in refused):
            raise MetaphraseError(f"A search must leave out {', '.join(f'`{name}`' for name in refused)}.")
        self.folder, self.started = Path(recipe.output_dir), started
        self.max_trials = math.inf if max_trials is None else max_trials
        # The table is written at the end.
        self.deadline = started + parse_seconds(recipe.time_budget) - 5
        self.is_resumed = (self.folder / STUDY_NAME).is_file()
        if not self.is_resumed:
            checkpoint_to_resume(recipe, self.folder)
        elif is_resumed:
            before = saved_recipe(self.folder / START_NAME)
            fields = {name: getattr(before, name) for name in before.set_names if recipe.is_open(name)}
            recipe = recipe.replace(**fields)
        else:
            raise MetaphraseError(f"`output_dir` must not hold another search, got {self.folder}. Pass --resume.")
        self.recipe = recipe
        if recipe.search and "max_tokens_per_batch" not in recipe.search:
            # The start of this field may be open.
            search_space(recipe)

    def run(self) -> None:
        """Run trials until the time is over. It is an error if no trial has a score."""
        with only_writer(self.folder):
            self._prepare()
            while self._has_time():
                self._run_trial(self.study.ask(self.space))
                self._write()
                logger.info("%s", ", ".join(f"{name} {value}" for name, value in self.rows[-1].items()))
            if not self.best_rows:
                count = len(self.rows)
                raise MetaphraseError(f"`time_budget` must hold a trial that ends with a score, got none in {count}.")

    def _prepare(self) -> None:
        """Complete the recipe, read and encode the pairs, and make or load the study."""
        if self.is_resumed:
            self.experiment = Experiment(self.recipe, is_dry_run=True)
        else:
            recipe = self.recipe.replace(streaming=False)
            self.experiment, choices = complete(recipe, is_dry_run=True, started=self.started)
            for choice in choices:
                logger.info("%s", choice)
        self.recipe = recipe = self.experiment.recipe
        self.data = self.experiment.prepare()
        self.space, self.start = search_space(recipe)
        score = (recipe.metrics or [DEFAULT_METRIC])[0] if decodes(recipe) else "loss"
        self.metric = (recipe.metric_for_best_model or score).removeprefix("eval_")
        # A search that ends here has not begun.
        plan = None if self.is_resumed else self._plan()
        self.study = optuna.create_study(
            storage=f"sqlite:///{(self.folder / STUDY_NAME).absolute()}",
            study_name="tune",
            load_if_exists=True,
            direction="minimize" if is_better_lower(self.metric) else "maximize",
        )
        if plan is not None:
            recipe.save(self.folder / START_NAME)
            self.study.set_user_attr("plan", plan)
        # Trials after a resumption are as long as before.
        plan = self.study.user_attrs["plan"]
        self.share, self.seconds, updates = plan["share"], plan["seconds"], plan["updates"]
        logger.info("A trial has %s updates, %.0f %% of those of the recipe.", f"{updates:,}", 100 * self.share)
        if updates < 100 and self.share < 1:
            logger.warning("Trials of %d updates show little. Raise `time_budget`.", updates)
        firsts = [self.start]
        if not recipe.search:
            firsts.append({**self.start, "learning_rate": usual_rate(recipe)})
        ended, killed = ([trial.params for trial in self._trials(*states)] for states in (_ENDED, ("RUNNING",)))
        for values in firsts:
            # A trial that was killed is repeated.
            self.study.enqueue_trial(values, skip_if_exists=values in ended or values not in killed)
        self.study.sampler = optuna.samplers.TPESampler(n_startup_trials=4, seed=recipe.seed + len(self.study.trials))
        self.study.pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=updates // 3)

    def _plan(self) -> dict[str, float]:
        """Return the share of the recipe's updates that a trial has, their number, and the seconds that bound a trial."""
        estimate = estimate_recipe(self.recipe, self.data)
        seconds = max(0.0, self.deadline - time.time()) / min(self.max_trials, _TRIALS)
        # The rate of a large network is not measured. Then the seconds alone bound a trial. A fifth is for evaluations.
        needed = 3600 * (estimate.hours or 0) / 0.8
        share = min(1.0, seconds / needed) if needed else 1.0
        return {"share": share, "updates": round(share * estimate.steps), "seconds": seconds}

    def _has_time(self) -> bool:
        """Return True if the end of the time would leave most of another trial."""
        longest = max((row["seconds"] for row in self.best_rows), default=self.seconds)
        is_cut = time.time() + 0.8 * longest > self.deadline
        return not is_cut and len(self._trials("COMPLETE", "PRUNED")) < self.max_trials

    def _run_trial(self, trial: optuna.Trial) -> None:
        # Trackers would take all trials for one run.
        name = f"{self.folder.name}-trial-{trial.number}"
        recipe = self._trial_recipe(self._rounded(trial.params)).replace(run_name=name)
        arguments, scores = make_arguments(recipe), _TrialScores(trial, self.metric)
        set_seed(arguments.seed)
        # Before any score, the recipe itself may be wrong, which ends the search.
        caught = (torch.OutOfMemoryError, MetaphraseError) if self.best_rows else torch.OutOfMemoryError
        try:
            trainer = make_trainer(recipe, arguments, self.data, make_model(recipe, self.data), self.experiment.scores)
            deadline = min(self.deadline, time.time() + self.seconds)
            trainer.add_callback(TimeBudget(deadline, final_share=0.0, seconds=self.seconds))
            for printer in (ProgressLog, TrainingAlerts):
                trainer.remove_callback(printer)
            trainer.add_callback(scores)
            trainer.train()
        except optuna.TrialPruned:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except caught as error:
            logger.warning("Trial %d fails: %s", trial.number, error)
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            # A loss that is no number fails.
            self.study.tell(trial, scores.score, skip_if_finished=True)

    def _trial_recipe(self, values: dict[str, Any]) -> Recipe:
        """Return the recipe of a trial: shorter, and without checkpoints."""
        recipe = with_values(self.recipe, values)
        fields = {**_TRIAL_FIELDS, "max_decoded_samples": recipe.max_decoded_samples or 500}
        if recipe.max_steps <= 0:
            fields["num_train_epochs"] = self.share * recipe.num_train_epochs
        for name in ("max_steps", "warmup_steps", "r_drop_start_step", "freeze_steps"):
            # A value of `warmup_steps` below 1 is a share already.
            if (getattr(recipe, name) or 0) >= 1:
                fields[name] = max(1, round(self.share * getattr(recipe, name)))
        return recipe.replace(**fields)

    def _trials(self, *states: str) -> list[optuna.trial.FrozenTrial]:
        return [trial for trial in self.study.trials if trial.state.name in states]

    def _rounded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a trial as they are used: with three digits, but for the recipe's own."""
        is_new = {name: isinstance(value, float) and value != self.start[name] for name, value in values.items()}
        return {name: float(f"{value:.3g}") if is_new[name] else value for name, value in values.items()}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Trial, state, score, seconds and values of each trial that has ended. The score of a pruned trial is its last one."""
        rows = []
        for trial in self._trials(*_ENDED):
            score = None if trial.value is None else float(f"{trial.value:.5g}")
            seconds = round(trial.duration.total_seconds(), 1)
            row = {"trial": trial.number, "state": trial.state.name.lower(), self.metric: score, "seconds": seconds}
            rows.append(row | self._rounded(trial.params))
        return rows

    @property
    def best_rows(self) -> list[dict[str, Any]]:
        """The rows of complete trials, the best first."""
        rows = [row for row in self.rows if row["state"] == "complete"]
        return sorted(rows, key=lambda row: row[self.metric], reverse=not is_better_lower(self.metric))

    def _write(self) -> None:
        """Write the table, and the best recipe, if there is one."""
        rows, best_rows = self.rows, self.best_rows
        with (self.folder / TABLE_NAME).open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, rows[0], delimiter="\t", lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        if not best_rows:
            return
        best = best_rows[0]
        values = {name: best[name] for name, value in self.start.items() if best[name] != value}
        changed = {name.partition(".")[0]: f"{name} was {self.start[name]}" for name in values}
        recipe = with_values(self.recipe, {**values, "output_dir": str(self.folder / BEST_NAME)})
        head = f"# Trial {best['trial']}, the best of {len(rows)}: {self.metric} {best[self.metric]:.4g} on validation pairs"
        head += f" after {100 * self.share:.0f} % of the updates.\n"
        recipe.replace(reasons={**recipe.reasons, **changed}).save(self.folder / RECIPE_NAME, head)


# Fields that may not be searched: data are encoded once, and all trials are scored in one way.
_FIXED_GROUPS = ("data", "tasks", "stages", "tokenizer", "evaluation", "search")
_FIXED = {"model_name_or_path", "time_budget", "max_steps", "num_train_epochs", "average_last", "average_best"}
_FIXED |= {"output_dir", "seed", "data_seed", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"}
_FIXED |= {"subword_sampling", "augmentation"}
_FIXED_PREFIXES = ("eval_", "save_", "logging_", "per_device_eval_", "generation_")


def search_space(recipe: Recipe) -> tuple[dict[str, optuna.distributions.BaseDistribution], dict[str, Any]]:
    """Return the distributions that a recipe declares, or default ones, and the recipe's values, which belong to them."""
    declared = recipe.search or _default_search(recipe)
    start = {name: _value(recipe, name) for name in declared}
    space = {name: _distribution(name, value, start[name]) for name, value in declared.items()}
    # All values that are listed, and all bounds, must be those of a recipe.
    corners = {name: getattr(item, "choices", None) or (item.low, item.high) for name, item in space.items()}
    for index in range(max(map(len, corners.values()))):
        corner = {name: values[index % len(values)] for name, values in corners.items()}
        checked = with_values(recipe, corner).checked()
        if checked.model_name_or_path is None:
            _config(checked)
    return space, start


def _distribution(name: str, declared: Any, start: Any) -> optuna.distributions.BaseDistribution:
    try:
        if isinstance(declared, list):
            return optuna.distributions.CategoricalDistribution(declared if start in declared else [start, *declared])
        bounds = {"log": False, **declared}
        # It refuses bounds in the wrong order.
        optuna.distributions.FloatDistribution(**bounds)
        bounds |= {"low": min(bounds["low"], start), "high": max(bounds["high"], start)}
        is_whole = all(isinstance(number, int) for number in (bounds["low"], bounds["high"], start))
        kind = optuna.distributions.IntDistribution if is_whole else optuna.distributions.FloatDistribution
        return kind(**bounds)
    except (ValueError, TypeError, KeyError) as error:
        raise MetaphraseError(
            f"`search.{name}` must be a list of values or {{low: 1e-4, high: 1e-2, log: true}} for a number, got "
            f"{declared!r} and `{name}` {start!r}: {error}"
        ) from error


def usual_rate(recipe: Recipe) -> float:
    """Return the learning rate of the rules for a new network, and that of the recipe for a model to fine-tune."""
    return recipe.learning_rate if recipe.model_name_or_path else learning_rate(_config(recipe).hidden_size)


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the values of a trial. A name with a dot sets one key of a mapping."""
    for name, value in values.items():
        field, dot, key = name.partition(".")
        recipe = recipe.replace(**{field: {**getattr(recipe, field), key: value} if dot else value})
    return recipe


def _value(recipe: Recipe, name: str) -> Any:
    """Return the value of a field, and refuse a field that may not be searched."""
    field, _, key = name.partition(".")
    is_fixed = group_of(field, "`search`") in _FIXED_GROUPS or field in _FIXED or field.startswith(_FIXED_PREFIXES)
    value = getattr(recipe, field)
    if is_fixed or isinstance(value, dict) is not bool(key):
        raise MetaphraseError(f"`search` must name values that may differ between trials, got `{name}`.")
    if field != "model":
        return value.get(key) if key else getattr(value, "value", value)
    # `search_space` refuses a name that the network does not have.
    return getattr(_config(recipe), key, None)


def _config(recipe: Recipe) -> MetaphraseConfig:
    # With two vocabularies, embeddings cannot be shared.
    return MetaphraseConfig.from_preset(recipe.preset, **{"share_embeddings": False, **recipe.model})


def _default_search(recipe: Recipe) -> dict[str, Any]:
    rate, half_range = usual_rate(recipe), math.sqrt(30)
    search: dict[str, Any] = {
        "learning_rate": {"low": rate / half_range, "high": rate * half_range, "log": True},
    }
    if recipe.reward is None and recipe.rejected_column is None:
        search["label_smoothing_factor"] = {"low": 0.0, "high": 0.2}
    if recipe.model_name_or_path is None:
        search["model.dropout"] = {"low": 0.0, "high": 0.4}
    budget, size = recipe.max_tokens_per_batch, recipe.per_device_train_batch_size
    if budget is None:
        return {**search, "per_device_train_batch_size": [max(1, size // 2), size, 2 * size]}
    # A batch must hold the longest pair.
    longest = recipe.max_source_length + recipe.max_target_length
    return {**search, "max_tokens_per_batch": [*([budget // 2] if budget // 2 >= longest else []), budget, 2 * budget]}
