"""Read the facts for a model card: scores, recipe, training log, configuration and size of a trained folder."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from metaphrase.hub_card.figures import is_finite
from metaphrase.storage.folders import read_fields
from metaphrase.storage.weight_files import WeightFiles, weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpointing.averaging import RECIPE_NAME
from metaphrase.training.recipe.parsing import load_yaml

# Recipe fields that name the data. The other fields are hyperparameters.
DATA_FIELDS = ("data_dir", "dataset", "dataset_name", "dataset_config", "corpus", "files")
DATA_FIELD_ENDINGS = ("_file", "_files", "_source", "_target", "_dataset", "_corpus")
LANGUAGE_FIELDS = ("source_language", "target_language")
# Fields whose texts are no paths, even if they look like one.
TEXT_FIELDS = ("source_prefix", "joiner", "additional_special_tokens")
# Fields that must never be published.
SECRET_FIELDS = ("token", "hub_token", "push_to_hub_token", "use_auth_token", "api_key", "password", "secret")
SECRET_FIELDS += ("hf_token", "access_token", "auth_token", "access_key", "secret_key", "aws_secret_access_key")
# Access tokens of well-known services, and the user part of an address.
_SECRET_TEXT = re.compile(r"\b(hf_|sk-|gh[pousr]_|glpat-|xox[a-z]-|AKIA)[\w-]{16,}|(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class Facts:
    """Facts for a model card that the user states.

    Attributes:
        title: Heading of the card. The default is the name of the repository or folder.
        summary: Description of the model in Markdown. The default is a sentence made from the folder.
        license: Licence of the weights as the Hub writes it, such as `apache-2.0`. It is never guessed.
        task: `translation`, `summarization` or `text2text-generation`. The default depends on the languages.
        source_language: Overrides the recipe.
        target_language: Overrides the recipe.
        base_model: Hub name of the model that this one was fine-tuned from.
        datasets: Hub names of the data.
        tags: Additional tags.
    """

    title: str | None = None
    summary: str | None = None
    license: str | None = None
    task: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    base_model: str | None = None
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()


class TrainedFolder:
    """Contents of a trained folder, with None for a missing file.

    Attributes:
        path: The folder.
        metrics: `metrics.json`.
        recipe: `recipe.yaml`.
        trainer_state: `trainer_state.json`.
        config: `config.json`.
        num_parameters: Number of weights.
        has_target_tokenizer: True if the decoder has a separate tokenizer.
        has_own_code: True if the Auto classes need `trust_remote_code` to load the model.
        log_history: Entries of the training log, possibly none.
        scores: Results by name of the score, possibly none.
        tasks: Scores and number of examples of each task of a multi-task model.
        data_name: Name of the data that the scores were measured on.
    """

    def __init__(self, folder: str | Path):
        """Read a folder.

        Raises:
            ValueError: If the folder is missing, or one of its files is not valid.
        """
        self.path = Path(folder)
        if not self.path.is_dir():
            raise ValueError(f"`folder` must be an existing folder, got {str(folder)!r}.")
        self.metrics = _check_metrics(read_fields(self.path / "metrics.json"))
        self.recipe = read_recipe(self.path)
        self.trainer_state = read_fields(self.path / "trainer_state.json")
        self.config = read_fields(self.path / "config.json")
        self.num_parameters = count_parameters(self.path)
        self.has_target_tokenizer = (self.path / TARGET_SUBFOLDER).is_dir()
        self.has_own_code = bool((self.config or {}).get("auto_map"))
        self.log_history = (self.trainer_state or {}).get("log_history") or []
        is_log = isinstance(self.log_history, list) and all(isinstance(entry, dict) for entry in self.log_history)
        if not is_log:
            raise ValueError(
                f"`log_history` in `trainer_state.json` must be a list of entries, got {self.log_history!r}."
            )
        metrics = self.metrics or {}
        self.scores = metrics.get("scores") or {}
        self.tasks = metrics.get("tasks") or {}
        data_name = (metrics.get("data") or {}).get("name")
        self.data_name = None if data_name is None else redact(str(data_name))

    @property
    def source_prefix(self) -> str:
        """Text before each source in training, of the first task if there are several; often empty."""
        recipe = self.recipe or {}
        tasks = list(recipe["tasks"].values()) if isinstance(recipe.get("tasks"), Mapping) else []
        fields = tasks[0] if tasks else recipe
        return _without_secrets(str(fields.get("source_prefix") or "")) if isinstance(fields, Mapping) else ""

    def split_recipe(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Return (data fields, hyperparameters, names of secret fields), without machine paths."""
        data, hyperparameters = {}, {}
        secrets = [name for name in self.recipe or {} if name in SECRET_FIELDS]
        for name, value in redact(self.recipe or {}).items():
            if name in DATA_FIELDS or name.endswith(DATA_FIELD_ENDINGS):
                data[name] = value
            elif name not in LANGUAGE_FIELDS:
                hyperparameters[name] = value
        return data, hyperparameters, secrets


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the fields of a folder's recipe as a run reads them, or None if it is missing.

    Raises:
        ValueError: If the file cannot be read.
    """
    # An empty file is a recipe without fields.
    return read_fields(folder / RECIPE_NAME, lambda text: {} if (fields := load_yaml(text, "it")) is None else fields)


def _check_metrics(metrics: dict[str, Any] | None) -> dict[str, Any] | None:
    parts = {key: (metrics or {}).get(key) for key in ("scores", "generation", "data", "tasks")}
    if isinstance(parts["tasks"], Mapping):
        for task, part in parts["tasks"].items():
            parts[f"tasks.{task}"] = part
            parts[f"tasks.{task}.scores"] = part.get("scores") if isinstance(part, Mapping) else None
    for key, part in parts.items():
        if part is not None and not isinstance(part, Mapping):
            raise ValueError(f"`{key}` in `metrics.json` must hold fields with values, got {part!r}.")
    groups = {key: part or {} for key, part in parts.items() if key.endswith("scores")}
    for group, scores in groups.items():
        for name, result in scores.items():
            values = result if isinstance(result, Mapping) else {}
            # ROUGE has a number for each kind.
            if not all(
                is_finite(values.get(kind)) for kind in ("score", *(k for k in values if k.startswith("rouge")))
            ):
                raise ValueError(
                    f"`{group}.{name}` in `metrics.json` must hold a finite number as `score`, got {result!r}."
                )
    return metrics


def count_parameters(folder: Path) -> int | None:
    """Return the number of weights in the files of a model, from their headers; None without such files.

    Raises:
        ValueError: If a file is damaged, or a shard is missing.
    """
    if not weight_names(folder):
        return None
    with contextlib.ExitStack() as files:
        return sum(math.prod(kind.shape) for kind in WeightFiles(folder, files).kinds.values())


def redact(value: Any) -> Any:
    """Return a value for others to see: without secrets, and with paths of this machine cut to their last part.

    Secrets are known by the name of their field or by their form, at any depth. `TEXT_FIELDS` keep what looks like a path.
    """
    if isinstance(value, list):
        return [redact(item) for item in value]
    if isinstance(value, dict):
        shared = {name: item for name, item in value.items() if name not in SECRET_FIELDS}
        return {name: _without_secrets(item) if name in TEXT_FIELDS else redact(item) for name, item in shared.items()}
    return _without_machine_path(_without_secrets(value))


def _without_secrets(value: Any) -> Any:
    return _SECRET_TEXT.sub("", value) if isinstance(value, str) else value


def _without_machine_path(value: Any) -> Any:
    """Cut an absolute path, also as an address, or one below a home folder to its last part."""
    if isinstance(value, str):
        text = value.removeprefix("file://")
        for kind in (PurePosixPath, PureWindowsPath):
            path = kind(text)
            is_below_home = text.startswith("~") and len(path.parts) > 1
            if path.is_absolute() or is_below_home:
                return path.name or value
    return value
