"""What a trained folder says of itself: scores, recipe, training log, configuration, size."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open

from metaphrase.storage.weight_files import weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpointing.averaging import RECIPE_NAME
from metaphrase.training.recipe.parsing import load_yaml

# A recipe's fields that say where the texts came from; the rest are hyperparameters.
DATA_FIELDS = ("data_dir", "dataset", "dataset_name", "dataset_config", "corpus", "files")
DATA_FIELD_ENDINGS = ("_file", "_files", "_source", "_target", "_dataset", "_corpus")
LANGUAGE_FIELDS = ("source_language", "target_language")
# Texts that are no paths, whatever they begin with.
TEXT_FIELDS = ("source_prefix", "joiner", "additional_special_tokens")
# What must never be published, whatever a recipe holds.
SECRET_FIELDS = ("token", "hub_token", "push_to_hub_token", "use_auth_token", "api_key", "password", "secret")


@dataclass(frozen=True)
class TrainedFolder:
    """The files of a folder, each None where it is absent.

    Attributes:
        has_target_tokenizer: Whether what the decoder writes is read by a tokenizer of its own.
    """

    path: Path
    metrics: dict[str, Any] | None
    recipe: dict[str, Any] | None
    trainer_state: dict[str, Any] | None
    config: dict[str, Any] | None
    num_parameters: int | None
    has_target_tokenizer: bool

    @classmethod
    def read(cls, folder: str | Path) -> "TrainedFolder":
        """Reads what is there.

        Raises:
            ValueError: If the folder is missing, or a file in it cannot be read as what its name promises.
        """
        path = Path(folder)
        if not path.is_dir():
            raise ValueError(f"`folder` must be an existing folder, got {str(folder)!r}.")
        return cls(
            path=path,
            metrics=_check_metrics(read_mapping(path / "metrics.json")),
            recipe=read_recipe(path),
            trainer_state=read_mapping(path / "trainer_state.json"),
            config=read_mapping(path / "config.json"),
            num_parameters=count_parameters(path),
            has_target_tokenizer=(path / TARGET_SUBFOLDER).is_dir(),
        )

    @property
    def has_own_code(self) -> bool:
        """Whether the Auto classes load the model by code that comes with it, and so by `trust_remote_code` alone."""
        return bool((self.config or {}).get("auto_map"))

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The training log, empty where there is none."""
        return list((self.trainer_state or {}).get("log_history") or [])

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The results by name of the score, empty where there are none."""
        return (self.metrics or {}).get("scores") or {}

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """For each task of a model of several, its own scores and number of examples."""
        return (self.metrics or {}).get("tasks") or {}

    @property
    def data_name(self) -> str | None:
        """The name of the data that the scores were measured on."""
        name = ((self.metrics or {}).get("data") or {}).get("name")
        return None if name is None else without_machine_path(str(name))

    @property
    def source_prefix(self) -> str:
        """The text before each source that the model was trained on, of several tasks that of the first; often nothing."""
        recipe = self.recipe or {}
        tasks = list(recipe["tasks"].values()) if isinstance(recipe.get("tasks"), Mapping) else []
        fields = tasks[0] if tasks else recipe
        return str(fields.get("source_prefix") or "") if isinstance(fields, Mapping) else ""

    def split_recipe(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Returns (data fields, hyperparameters, names of secret fields that are left out), without machine paths."""
        data, hyperparameters, secrets = {}, {}, []
        for name, value in without_machine_path(self.recipe or {}).items():
            if name in SECRET_FIELDS:
                secrets.append(name)
            elif name in DATA_FIELDS or name.endswith(DATA_FIELD_ENDINGS):
                data[name] = value
            elif name not in LANGUAGE_FIELDS:
                hyperparameters[name] = value
        return data, hyperparameters, secrets


def read_mapping(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any] | None:
    """Returns the fields of a file, or None where it is absent.

    Raises:
        ValueError: If the file cannot be read, or holds something else.
    """
    if not path.is_file():
        return None
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        # Of YAML it has several lines.
        text = " ".join(str(error).split())
        raise ValueError(f"`{path.name}` must be readable, got an error in {str(path)!r}: {text}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path.name}` must hold fields with values, got {type(content).__name__} in {str(path)!r}.")
    return content


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """Returns the fields of a folder's recipe, with the values that a run would read, or None where it is absent.

    Raises:
        ValueError: If the file cannot be read, or a language is no text.
    """
    recipe = read_mapping(folder / RECIPE_NAME, _parse_recipe)
    for name in LANGUAGE_FIELDS:
        value = (recipe or {}).get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"`{name}` in `{RECIPE_NAME}` must be text, got {value!r}.")
    return recipe


def _parse_recipe(text: str) -> Any:
    fields = load_yaml(text, "it")
    # An empty file is a recipe that leaves all as it is.
    return {} if fields is None else fields


def _check_metrics(metrics: dict[str, Any] | None) -> dict[str, Any] | None:
    for key in ("scores", "generation", "data", "tasks"):
        part = (metrics or {}).get(key)
        if part is not None and not isinstance(part, Mapping):
            raise ValueError(f"`{key}` in `metrics.json` must hold fields with values, got {part!r}.")
    groups = {"scores": (metrics or {}).get("scores") or {}}
    for task, part in ((metrics or {}).get("tasks") or {}).items():
        if not isinstance(part, Mapping) or "num_examples" not in part or not isinstance(part.get("scores"), Mapping):
            raise ValueError(f"`tasks.{task}` in `metrics.json` must hold `scores` and `num_examples`, got {part!r}.")
        groups[f"tasks.{task}.scores"] = part["scores"]
    for group, scores in groups.items():
        for name, result in scores.items():
            # ROUGE has a number of each kind beside.
            kinds = (
                ["score", *(kind for kind in result if kind.startswith("rouge"))] if isinstance(result, Mapping) else []
            )
            if not kinds or not all(_is_finite(result.get(kind)) for kind in kinds):
                raise ValueError(
                    f"`{group}.{name}` in `metrics.json` must hold a finite number as `score`, got {result!r}."
                )
    return metrics


def _is_finite(score: Any) -> bool:
    return isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)


def count_parameters(folder: Path) -> int | None:
    """Returns how many numbers are in the files that the model is loaded from, or None where there are none. Loads no weights.

    Raises:
        ValueError: If a file is damaged, or one that an index names is missing.
    """
    total = None
    for path in (folder / name for name in weight_names(folder)):
        if not path.is_file():
            raise ValueError(f"`{path.name}`, which the index of the weights names, must be in {str(folder)!r}.")
        try:
            with safe_open(path, framework="np") as file:
                sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"`{path.name}` must be a whole safetensors file, got an error: {error}") from error
        total = (total or 0) + sum(sizes)
    return total


def without_machine_path(value: Any) -> Any:
    """Returns of a path that is absolute, or begins in a home folder, the last part; anything else as it is.

    The folders above are the trainer's own business. Lists and mappings are gone through, but for their `TEXT_FIELDS`.
    """
    if isinstance(value, list):
        return [without_machine_path(item) for item in value]
    if isinstance(value, dict):
        return {name: item if name in TEXT_FIELDS else without_machine_path(item) for name, item in value.items()}
    if isinstance(value, str):
        for kind in (PurePosixPath, PureWindowsPath):
            path = kind(value)
            is_below_home = value.startswith("~") and len(path.parts) > 1
            if path.is_absolute() or is_below_home:
                return path.name or value
    return value
