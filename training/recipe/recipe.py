"""The recipe of a training run: one YAML file of flat keys, and what the command line changes in it.

A recipe holds the fields of `Recipe` and every field of `transformers.Seq2SeqTrainingArguments` under its own name.
"""

import copy
import dataclasses
import difflib
import enum
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

from transformers import SchedulerType, Seq2SeqTrainingArguments

from metaphrase.training.checkpointing.averaging import is_better_lower
from metaphrase.training.recipe.checks import check_recipe
from metaphrase.training.recipe.fields import RecipeFields
from metaphrase.training.recipe.parsing import ValueType, dump_yaml, fit_value, fit_words, load_yaml, parse_words

# Where a run differs from transformers' own defaults; all such differences stand here.
TRAINING_DEFAULTS: dict[str, Any] = {
    "predict_with_generate": True,
    # The collator takes what it needs, and batching reads the lengths.
    "remove_unused_columns": False,
    "report_to": "none",
    "save_total_limit": 3,
    # Seconds: one process reads the corpus and scores the finished model while the others wait, for which half an hour, the
    # default, may be too short.
    "ddp_timeout": 6 * 3600,
}
TRAINING_FIELDS = {item.name: item for item in dataclasses.fields(Seq2SeqTrainingArguments) if item.init}
# Of this machine and moment, or secret: never part of a saved recipe.
NEVER_SAVED = ("data_dir", "hub_token", "resume_from_checkpoint", "local_rank")
# What later versions of transformers call otherwise, and warn of: a recipe may keep the name that all of them know.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# Schedules that follow a metric; earlier versions of transformers know the first alone.
LED_BY_METRIC = [
    getattr(SchedulerType, name) for name in ("REDUCE_ON_PLATEAU", "GREEDY") if hasattr(SchedulerType, name)
]
# Of no use in a run: `metaphrase push` uploads.
_OF_UPLOADS = ("push_to_hub", "hub_")
# Its keys are names of a model's parts, with dots of their own.
_OF_PARTS = "learning_rate_factors."


@dataclass(kw_only=True)
class Recipe(RecipeFields):
    """Everything that determines a run. Fields that were not set have their default.

    A field of `Seq2SeqTrainingArguments` is read and set as an attribute too (`recipe.learning_rate`); what was set is in
    `training`.

    Raises:
        ValueError: If two fields contradict each other, or one is out of range.
    """

    training: dict[str, Any] = field(default_factory=dict, repr=False)
    # False for the recipe of an earlier run, which newer rules need not allow.
    is_checked: InitVar[bool] = True

    def __post_init__(self, is_checked: bool) -> None:
        if unknown := sorted(set(self.training) - set(TRAINING_FIELDS)):
            raise ValueError(_unknown(unknown[0], "`training`"))
        if is_checked:
            self.check()

    def check(self) -> None:
        """Refuses fields that are out of range or contradict each other.

        Raises:
            ValueError: Naming the fields, what must hold and what was given.
        """
        check_recipe(self, {name: item.metadata["minimum"] for name, item in OWN_FIELDS.items()})

    def __getattr__(self, name: str) -> Any:
        if name in TRAINING_FIELDS:
            default = TRAINING_FIELDS[name].default
            own = TRAINING_DEFAULTS.get(name, None if default is dataclasses.MISSING else default)
            return self.__dict__.get("training", {}).get(name, own)
        raise AttributeError(f"A recipe has no field {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TRAINING_FIELDS:
            self.training[name] = value
        elif name in self.__dataclass_fields__:
            super().__setattr__(name, value)
        else:
            raise AttributeError(_unknown(name, "an assignment"))

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any], where: str, is_checked: bool = True) -> "Recipe":
        """Makes a recipe of flat keys, which are `where`; one that is not checked may contradict itself.

        Raises:
            ValueError: If a key is unknown, a value is of a wrong type, or the fields contradict each other.
        """
        values = {name: _fit(name, value, where) for name, value in mapping.items()}
        training = {name: value for name, value in values.items() if name in TRAINING_FIELDS}
        own = {name: value for name, value in values.items() if name not in TRAINING_FIELDS and value is not None}
        recipe = cls(training=training, is_checked=is_checked, **own)
        # Given with its default value counts as given too, so that a saved recipe outlives a change of defaults.
        recipe.__dict__["given"] = frozenset(own)
        return recipe

    def is_set(self, name: str) -> bool:
        """Whether a field was given, or differs from its default."""
        if name in TRAINING_FIELDS:
            return name in self.training
        item = OWN_FIELDS[name]
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        return name in self.__dict__.get("given", ()) or getattr(self, name) != default

    @staticmethod
    def group_of(name: str, where: str = "a recipe") -> str:
        """The group of a field of our own, as `metaphrase train --help` shows it.

        Raises:
            ValueError: If there is no such field, saying where it was found.
        """
        if name in TRAINING_FIELDS:
            return "training"
        if name not in OWN_FIELDS:
            raise ValueError(_unknown(name, where))
        return OWN_FIELDS[name].metadata["group"]

    def data_path(self, name: str) -> Path:
        """Returns the data file that a field names, below `data_dir` if it is relative.

        Raises:
            ValueError: If the field is not set.
            FileNotFoundError: If there is no such file.
        """
        if (value := getattr(self, name)) is None:
            raise ValueError(f"`{name}` must name a file, got null.")
        path = Path(self.data_dir or "").expanduser() / Path(value).expanduser()
        if self.data_dir is not None and not Path(self.data_dir).expanduser().is_dir():
            raise FileNotFoundError(f"`data_dir` must be a folder that exists, got {self.data_dir}.")
        if not path.is_file():
            raise FileNotFoundError(
                f"`{name}` must be a file that exists, got {path}. Pass --data_dir FOLDER, the folder with the data files."
            )
        return path

    def pairs_options(self, split: str) -> dict[str, Any] | None:
        """Returns the arguments of `load_pairs` for `train`, `validation` or `test`; None if the recipe has no such split.

        Raises:
            FileNotFoundError: If a file does not exist.
        """
        one, source, target = f"{split}_file", f"{split}_source_file", f"{split}_target_file"
        if self.is_set(one):
            place: dict[str, Any] = {"file": self.data_path(one)}
        elif self.is_set(source):
            place = {"source_file": self.data_path(source), "target_file": self.data_path(target)}
        elif self.dataset_name is not None and (name := getattr(self, f"dataset_{split}_split")) is not None:
            place = {"dataset_name": self.dataset_name, "dataset_config_name": self.dataset_config_name}
            place["dataset_split"] = name
        else:
            return None
        shared = ("source_column", "target_column", "source_prefix", "invalid_utf8", "malformed")
        options = {name: getattr(self, name) for name in shared}
        return {**place, **options, "max_samples": getattr(self, f"max_{split}_samples")}

    def generation_options(self) -> dict[str, Any]:
        """Returns the generation settings that were set, by the names of `generate`."""
        names = ("num_beams", "length_penalty", "no_repeat_ngram_size", "repetition_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def training_arguments(self, **extra: Any) -> Seq2SeqTrainingArguments:
        """Builds the training arguments; `extra` goes over the recipe, which goes over `TRAINING_DEFAULTS`.

        Raises:
            ValueError: If there is no `output_dir`, or transformers refuses a value.
        """
        arguments = {**TRAINING_DEFAULTS, **copy.deepcopy(self.training), **extra}
        if not arguments.get("output_dir"):
            raise ValueError("`output_dir` must be given, got none. Pass --output_dir FOLDER.")
        for name, later in RENAMED.items():
            if later in TRAINING_FIELDS and arguments.get(later) is None and name in arguments:
                arguments[later] = arguments.pop(name)
        metric = arguments.get("metric_for_best_model")
        if metric is not None and arguments.get("greater_is_better") is None:
            # transformers knows losses alone.
            arguments["greater_is_better"] = not is_better_lower(metric)
        made = Seq2SeqTrainingArguments(**arguments)
        if made.lr_scheduler_type in LED_BY_METRIC and made.greater_is_better:
            # By default they take a higher score for no progress.
            made.lr_scheduler_kwargs = {"mode": "max", **(made.lr_scheduler_kwargs or {})}
        return made

    def to_dict(self) -> dict[str, Any]:
        """Returns what was set, without what belongs to this machine alone, as flat keys."""
        own = [name for name in OWN_FIELDS if self.is_set(name)]
        values = {name: getattr(self, name) for name in own} | self.training
        if Path(str(values.get("output_dir") or "")).is_absolute():
            del values["output_dir"]
        values = copy.deepcopy({name: value for name, value in values.items() if name not in NEVER_SAVED})
        if self.data_dir is not None:
            folder = Path(self.data_dir).expanduser().absolute()
            for group in (values, *values.get("tasks", {}).values()):
                for name in (name for name in group if name.endswith("_file") and group[name] is not None):
                    path = Path(group[name]).expanduser()
                    if path.is_relative_to(folder):
                        group[name] = path.relative_to(folder).as_posix()
        return values

    def save(self, path: str | Path) -> None:
        """Writes what was set as YAML, which `load_recipe` reads and a run can go on from.

        `data_dir`, an absolute `output_dir` and `hub_token` are left out; data files below `data_dir` are named from there. Any
        other path stays as it is: cut it, as `metaphrase push` does, before others are to see the file.
        """
        Path(path).write_text(dump_yaml(self.to_dict()), encoding="utf-8")


OWN_FIELDS = {item.name: item for item in dataclasses.fields(Recipe) if item.name != "training"}
_ANNOTATIONS = {**typing.get_type_hints(Seq2SeqTrainingArguments), **typing.get_type_hints(Recipe)}


def value_type_of(name: str, where: str) -> ValueType:
    """Returns what a field of a recipe accepts.

    Raises:
        ValueError: If there is no such field.
    """
    if name not in OWN_FIELDS and name not in TRAINING_FIELDS:
        raise ValueError(_unknown(name, where))
    return ValueType.of(_ANNOTATIONS[name])


def _unknown(name: str, where: str) -> str:
    nearest = difflib.get_close_matches(name, [*OWN_FIELDS, *TRAINING_FIELDS], n=1)
    hint = f"Did you mean `{nearest[0]}`?" if nearest else "Fields of the network go below `model`."
    return f"Every field must be one that a recipe has, got `{name}` in {where}. {hint}"


def load_recipe(path: str | Path | None, overrides: Sequence[str] = (), is_checked: bool = True) -> Recipe:
    """Reads a recipe and applies what the command line changes in it.

    Args:
        path: The YAML file; None for an empty recipe.
        overrides: Words of the command line: `--field value`, `--field=value`, `--flag` and `--no_flag` for true and false,
            `--model.hidden_size 256` for one key of a mapping, several words for a list. `null` unsets a field, one
            of transformers' arguments only where it may be none. The last of equal options holds.
        is_checked: Whether fields that are out of range or contradict each other are refused.

    Raises:
        ValueError: If the file is not a YAML mapping with each key once, a field is unknown or of a wrong type, or the
            fields contradict each other.
        FileNotFoundError: If there is no such file.
    """
    mapping = _read_mapping(Path(path)) if path is not None else {}
    where = "the command line"
    for option, words in _options(overrides):
        name, *keys = option.split(".", maxsplit=1 if option.startswith(_OF_PARTS) else -1)
        value_type = value_type_of(name, where)
        if not keys:
            is_unset = words == ["null"] and name in OWN_FIELDS
            mapping[name] = None if is_unset else fit_words(name, words, value_type, where)
            continue
        if dict not in value_type.kinds:
            raise ValueError(f"`{name}` must be {value_type}, which has no keys, got --{option} on {where}.")
        mapping[name] = inner = copy.deepcopy(mapping.get(name) or {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ValueError(f"`{key}` must be a mapping to have keys, got {inner!r} for --{option} on {where}.")
        inner[keys[-1]] = parse_words(words)
    return Recipe.from_mapping(mapping, where if path is None else str(path), is_checked)


def _read_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"A recipe must be a file that exists, got {path}.")
    mapping = load_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(mapping, dict | None):
        raise ValueError(f"{path} must be a mapping of fields to values, got {type(mapping).__name__}.")
    return {name: _fit(name, value, str(path)) for name, value in (mapping or {}).items()}


def _fit(name: str, value: Any, where: str) -> Any:
    # A field of our own may be empty, as `model:` is whose lines were all commented out: then it is not set.
    value_type = value_type_of(name, where)
    return None if value is None and name in OWN_FIELDS else fit_value(name, value, value_type, where)


def _options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Splits the words of a command line into options with the words that follow each."""
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if not word.startswith("--"):
            if not options:
                raise ValueError(f"The command line must name a field with --field before a value, got {word!r}.")
            options[-1][1].append(word)
            continue
        name, equals, value = word[2:].partition("=")
        head, dot, keys = name.partition(".")
        options.append((head.replace("-", "_") + dot + keys, [value] if equals else []))
    return [_negated(name, values) for name, values in options]


def _negated(name: str, values: list[str]) -> tuple[str, list[str]]:
    positive = name.removeprefix("no_")
    if positive == name or values or (positive not in OWN_FIELDS and positive not in TRAINING_FIELDS):
        return name, values
    return positive, ["false"]


def format_help() -> str:
    """Returns a list of all fields by group, with type, default and meaning."""
    groups: dict[str, list[str]] = {}
    for name, item in OWN_FIELDS.items():
        groups.setdefault(item.metadata["group"], []).append(_describe(name, item.default, item.metadata["help"]))
    title = "training (fields of transformers.Seq2SeqTrainingArguments)"
    for name, item in TRAINING_FIELDS.items():
        if name.startswith(_OF_UPLOADS):
            continue
        words = " ".join(str(item.metadata.get("help", "")).split())
        default = TRAINING_DEFAULTS.get(name, item.default)
        groups.setdefault(title, []).append(_describe(name, default, words.partition(". ")[0].removesuffix(".") + "."))
    return "\n\n".join(f"{group}:\n" + "\n".join(lines) for group, lines in groups.items())


def _describe(name: str, default: Any, words: str) -> str:
    if isinstance(default, enum.Enum):
        default = default.value
    shown = "" if default in (None, dataclasses.MISSING, "") else f" [{default}]"
    head = f"  --{name}{shown}  ({ValueType.of(_ANNOTATIONS[name])})"
    return head + "\n" + textwrap.fill(words, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
