"""Recipe of a training run: one YAML file of flat keys, with overrides from the command line.

A recipe has the fields of `OwnFields` and every field of `transformers.Seq2SeqTrainingArguments` under the same name. It is a
plain frozen dataclass. `HfArgumentParser` ends the process with argparse's messages, accepts no nested keys and takes
`str | int` for `int`; pydantic would be a new dependency and would still need `ValueType` for its error texts.
"""

import copy
import dataclasses
import enum
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

from transformers import SchedulerType, Seq2SeqTrainingArguments

from metaphrase.data.augmentation import TERM_TOKENS
from metaphrase.modeling.compat import CHECKPOINTING
from metaphrase.storage.folders import file_in_one_step, read_text
from metaphrase.training.checkpointing.averaging import is_better_lower
from metaphrase.training.recipe.checks import LEFT_OUT, check_recipe
from metaphrase.training.recipe.fields import (
    OWN_FIELDS,
    TRAINING_DEFAULTS,
    TRAINING_FIELDS,
    OwnFields,
    TrainingFields,
    group_of,
)
from metaphrase.training.recipe.parsing import ValueType, dump_yaml, fit_value, fit_words, load_yaml, parse_words

# These belong to a machine or a moment, or are secret.
NEVER_SAVED = ("data_dir", "time_budget", "hub_token", "resume_from_checkpoint", "local_rank")
# Later names in transformers, whose earlier ones raise a warning. A recipe may keep the names that all versions know.
RENAMED = {f"gradient_checkpointing{kind}": f"{CHECKPOINTING}{kind}" for kind in ("", "_kwargs")}
# Schedules that follow a metric.
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
# Uploads are done by `metaphrase push`, not by a run.
_UPLOAD_PREFIXES = ("push_to_hub", "hub_")
# Nothing reads them: transformers' own scripts do.
_WITHOUT_EFFECT = ("do_train", "do_eval", "do_predict", "sortish_sampler")
# The keys of these mappings are names of model parts or of fields, which have dots.
_DOTTED_PREFIXES = ("learning_rate_factors.", "search.")


@dataclass(frozen=True, kw_only=True)
class Recipe(OwnFields, TrainingFields):
    """All settings of a run, checked when they are made and not changed afterwards; `replace` makes a changed copy.

    Attributes:
        set_names: Names that were set, in their order. Other fields have their default.
        reasons: Comments of a saved recipe, each above the field that it belongs to.

    Raises:
        ValueError: If two fields contradict each other, or one is out of range.
    """

    set_names: tuple[str, ...] = field(default=(), repr=False, compare=False)
    reasons: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    # False for the recipe of an earlier run, which newer checks may refuse.
    is_checked: InitVar[bool] = True

    def __post_init__(self, is_checked: bool) -> None:
        if is_checked:
            check_recipe(self)

    def __repr__(self) -> str:
        names = [name for name in (*OWN_FIELDS, *TRAINING_FIELDS) if self.is_set(name)]
        # The token of the Hub is secret.
        values = {name: "..." if name == "hub_token" else getattr(self, name) for name in names}
        shown = [f"{name}={getattr(value, 'value', value)!r}" for name, value in values.items()]
        return f"Recipe({', '.join(shown)})"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str) -> "Recipe":
        """Make a recipe from flat keys and values.

        Args:
            mapping: Values by field.
            where: Origin of the values, for errors.

        Raises:
            ValueError: If a key is unknown, a value is of a wrong type, or the fields contradict each other.
        """
        return cls._from_values(_fit_all(mapping, where))

    @classmethod
    def _from_values(cls, values: dict[str, Any], is_checked: bool = True) -> "Recipe":
        # An own field of None is unset. A default value counts as set, so that a saved recipe outlives a change of defaults.
        values = {name: value for name, value in values.items() if value is not None or name in TRAINING_FIELDS}
        if isinstance(parts := values.get("datasets"), dict):
            files = {name: {"train_file": part} for name, part in parts.items() if isinstance(part, str)}
            values["datasets"] = parts | files
        return cls(set_names=tuple(values), is_checked=is_checked, **values)

    def replace(self, *, is_checked: bool = True, **values: Any) -> "Recipe":
        """Return a copy with other values, which count as set."""
        set_names = tuple(dict.fromkeys((*self.set_names, *values)))
        return dataclasses.replace(self, set_names=set_names, is_checked=is_checked, **values)

    def is_set(self, name: str) -> bool:
        """Return True if a field was given or differs from its default."""
        return name in self.set_names or self.is_changed(name)

    def is_changed(self, name: str) -> bool:
        """Return True if a field differs from its default."""
        return getattr(self, name) != getattr(_DEFAULTS, name)

    @property
    def is_augmented(self) -> bool:
        """True if training pairs are changed in each epoch."""
        return self.subword_sampling is not None or bool(self.augmentation)

    @property
    def special_tokens(self) -> list[str]:
        """Tokens that any tokenizer of the run needs: the marks of terms, and `additional_special_tokens`."""
        return [*(TERM_TOKENS if "terms" in self.augmentation else ()), *(self.additional_special_tokens or ())]

    def data_path(self, name: str) -> Path:
        """Return the data file that a field names, below `data_dir` if it is relative.

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
        """Return the arguments of `load_pairs` for `train`, `validation` or `test`; None if the recipe has no such split.

        Raises:
            FileNotFoundError: If a file does not exist.
        """
        file, source, target = f"{split}_file", f"{split}_source_file", f"{split}_target_file"
        if self.is_set(file):
            options: dict[str, Any] = {"file": self.data_path(file)}
        elif self.is_set(source):
            options = {"source_file": self.data_path(source), "target_file": self.data_path(target)}
        elif self.dataset_name is not None and (name := getattr(self, f"dataset_{split}_split")) is not None:
            options = {"dataset_name": self.dataset_name, "dataset_config_name": self.dataset_config_name}
            options["dataset_split"] = name
        else:
            return None
        shared = ("source_column", "target_column", "source_prefix", "invalid_utf8", "malformed", "max_line_characters")
        options |= {name: getattr(self, name) for name in shared}
        options["line_too_long"] = "skip" if split == "train" and self.too_long != "error" else "error"
        return {**options, "max_samples": getattr(self, f"max_{split}_samples")}

    def training_arguments(self, **overrides: Any) -> Seq2SeqTrainingArguments:
        """Build the training arguments; `overrides` replace values of the recipe.

        Raises:
            ValueError: If there is no `output_dir`, or transformers refuses a value.
        """
        values = {name: copy.deepcopy(getattr(self, name)) for name in TRAINING_FIELDS if self.is_set(name)}
        # Stages are one epoch, with readings of their own.
        once = {"num_train_epochs": 1} if self.stages else {}
        arguments = {**TRAINING_DEFAULTS, **once, **values, **overrides}
        if not arguments.get("output_dir"):
            raise ValueError("`output_dir` must be given, got none. Pass --output_dir FOLDER.")
        if arguments.get("run_name") is None:
            # Trackers would name runs at random, and a resumed run anew.
            arguments["run_name"] = Path(arguments["output_dir"]).name
        for name, later in RENAMED.items():
            if arguments.get(later) is None and name in arguments:
                arguments[later] = arguments.pop(name)
        metric = arguments.get("metric_for_best_model")
        if metric is not None and arguments.get("greater_is_better") is None:
            # transformers takes everything but a loss for better if greater.
            arguments["greater_is_better"] = not is_better_lower(metric)
        training_arguments = Seq2SeqTrainingArguments(**arguments)
        if training_arguments.lr_scheduler_type in METRIC_SCHEDULES and training_arguments.greater_is_better:
            # These schedules minimize by default.
            options = training_arguments.lr_scheduler_kwargs or {}
            training_arguments.lr_scheduler_kwargs = {"mode": "max", **options}
        return training_arguments

    def to_dict(self) -> dict[str, Any]:
        """Return the values that were set, as flat keys, without those that belong to this machine."""
        # Fields that were chosen together stay together, below their reason.
        first = self.set_names if self.reasons else ()
        names = dict.fromkeys((*first, *OWN_FIELDS, *self.set_names, *TRAINING_FIELDS))
        saved = [name for name in names if self.is_set(name) and name not in NEVER_SAVED]
        values = {name: copy.deepcopy(getattr(self, name)) for name in saved}
        if Path(str(values.get("output_dir") or "")).is_absolute():
            del values["output_dir"]
        if self.data_dir is not None:
            folder = Path(self.data_dir).expanduser().absolute()
            parts = [*values.get("tasks", {}).values(), *values.get("datasets", {}).values()]
            for group in (values, *(part for part in parts if isinstance(part, dict))):
                for name in (name for name in group if name.endswith("_file") and group[name] is not None):
                    path = Path(group[name]).expanduser()
                    if path.is_relative_to(folder):
                        group[name] = path.relative_to(folder).as_posix()
        return values

    def save(self, path: str | Path, head: str = "") -> None:
        """Write the values that were set as YAML, from which `load_recipe` reads them and a run can resume.

        `data_dir`, an absolute `output_dir` and `hub_token` are left out. Data files below `data_dir` become relative. Other
        paths stay; cut them before publishing the file, as `metaphrase push` does.

        Args:
            path: The file. A file that exists stays whole until the new one is written.
            head: Comment before the fields.
        """
        text = "".join(
            (f"\n# {self.reasons[name]}\n" if name in self.reasons else "") + dump_yaml({name: value})
            for name, value in self.to_dict().items()
        )
        with file_in_one_step(Path(path)) as file:
            file.write_text(head + text, encoding="utf-8")


_HINTS = typing.get_type_hints(Recipe)
_DEFAULTS = Recipe(is_checked=False)


def _type_of(name: str, where: str) -> ValueType:
    group_of(name, where)  # refuses a name that is no field
    return ValueType.of(_HINTS[name])


def load_recipe(path: str | Path | None, overrides: Sequence[str] = (), is_checked: bool = True) -> Recipe:
    """Read a recipe and apply the overrides of the command line.

    Args:
        path: The YAML file; None for an empty recipe.
        overrides: Words of the command line: `--field value`, `--field=value`, `--flag` and `--no_flag` for true and false,
            `--model.hidden_size 256` for one key of a mapping, several words for a list. `null` unsets a field, one
            of transformers' arguments only where it may be none. The last of equal options holds.
        is_checked: False to accept fields that are out of range or contradict each other.

    Raises:
        ValueError: If the file is not a YAML mapping with each key once, a field is unknown or of a wrong type, or the
            fields contradict each other.
        FileNotFoundError: If there is no such file.
    """
    values = {} if path is None else _read_file(Path(path))
    where = "the command line"
    for option, words in _split_options(overrides):
        name, *keys = option.split(".", maxsplit=1 if option.startswith(_DOTTED_PREFIXES) else -1)
        value_type = _type_of(name, where)
        if not keys:
            is_unset = words == ["null"] and name in OWN_FIELDS
            values[name] = None if is_unset else fit_words(name, words, value_type, where)
            continue
        if dict not in value_type.kinds:
            raise ValueError(f"`{name}` must be {value_type}, which has no keys, got --{option} on {where}.")
        values[name] = mapping = copy.deepcopy(values.get(name) or {})
        for key in keys[:-1]:
            mapping = mapping.setdefault(key, {})
            if not isinstance(mapping, dict):
                raise ValueError(f"`{key}` must be a mapping to have keys, got {mapping!r} for --{option} on {where}.")
        mapping[keys[-1]] = parse_words(words)
    return Recipe._from_values(values, is_checked)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"A recipe must be a file that exists, got {path}.")
    mapping = load_yaml(read_text(path).removeprefix("\ufeff"), str(path))
    if not isinstance(mapping, dict | None):
        raise ValueError(f"{path} must be a mapping of fields to values, got {type(mapping).__name__}.")
    return _fit_all(mapping or {}, str(path))


def _fit_all(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    types = {name: _type_of(name, where) for name in mapping}
    # An own field may be empty, such as `model:` above lines that were all commented out. Then it is not set.
    return {
        name: None if value is None and name in OWN_FIELDS else fit_value(name, value, types[name], where)
        for name, value in mapping.items()
    }


def _split_options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split the words of a command line into options, each with the words that follow it."""
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            head, dot, keys = name.partition(".")
            options.append((head.replace("-", "_") + dot + keys, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ValueError(f"The command line must name a field with --field before a value, got {word!r}.")
    return [_resolve_negation(name, values) for name, values in options]


def _resolve_negation(name: str, values: list[str]) -> tuple[str, list[str]]:
    positive = name.removeprefix("no_")
    is_negation = positive != name and not values and (positive in OWN_FIELDS or positive in TRAINING_FIELDS)
    return (positive, ["false"]) if is_negation else (name, values)


def describe_fields() -> str:
    """Return a list of all fields by group, with type, default and help text."""
    groups: dict[str, list[str]] = {}
    head = "Fields that you leave open are chosen from your pairs and this machine; --dry_run shows them. A value in [ ] holds\n"
    head += "where nothing is chosen."
    for name, item in OWN_FIELDS.items():
        groups.setdefault(item.metadata["group"], []).append(_describe(name, item.metadata["help"]))
    title = "training (fields of transformers.Seq2SeqTrainingArguments)"
    for name, item in TRAINING_FIELDS.items():
        if not name.startswith(_UPLOAD_PREFIXES) and name not in (*_WITHOUT_EFFECT, *LEFT_OUT):
            text = " ".join(str(item.metadata.get("help", "")).split())
            groups.setdefault(title, []).append(_describe(name, text.partition(". ")[0].removesuffix(".") + "."))
    return "\n\n".join([head, *(f"{group}:\n" + "\n".join(lines) for group, lines in groups.items())])


def _describe(name: str, text: str) -> str:
    default = getattr(_DEFAULTS, name)
    if isinstance(default, enum.Enum):
        default = default.value
    shown = "" if default in (None, "", {}) else f" [{default}]"
    head = f"  --{name}{shown}  ({ValueType.of(_HINTS[name])})"
    return head + "\n" + textwrap.fill(text, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
