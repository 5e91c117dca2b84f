"""Search space of `metaphrase tune`: the values that a search tries for fields of a recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.hints import did_you_mean
from metaphrase.training.choices.rules import learning_rate
from metaphrase.training.recipe.fields import group_of
from metaphrase.training.recipe.recipe import Recipe

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
