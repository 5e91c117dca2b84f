"""Model card: the README.md of a trained folder, with metadata for the Hub. What the folder does not tell is called unknown."""

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.utils import validate_repo_id

from metaphrase.errors import MetaphraseError, naming_damaged_file
from metaphrase.hub_card.figures import SCORE_LABELS, draw_training_curve
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import file_in_one_step, read_fields
from metaphrase.storage.weight_files import WeightFiles, weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpoints import RECIPE_NAME
from metaphrase.training.recipe.recipe import is_better_lower, load_yaml

logger = logging.getLogger(__name__)

# Recipe fields that name the data. The other fields are hyperparameters.
DATA_FIELDS = ("data_dir", "dataset", "dataset_name", "dataset_config", "corpus", "files")
DATA_FIELD_ENDINGS = ("_file", "_files", "_source", "_target", "_dataset", "_corpus")
LANGUAGE_FIELDS = ("source_language", "target_language")
# Fields of the configuration that say nothing of the architecture.
HIDDEN_FIELD_ENDINGS = ("token_id", "transformers_version", "use_cache")
# Fields whose texts are no paths, even if they look like one.
TEXT_FIELDS = ("source_prefix", "joiner", "additional_special_tokens")
# Fields that must never be published.
SECRET_FIELDS = ["token", "hub_token", "push_to_hub_token", "use_auth_token", "api_key", "password", "secret"]
SECRET_FIELDS += ["hf_token", "access_token", "auth_token", "access_key", "secret_key", "aws_secret_access_key"]
# Access tokens of well-known services, and the user part of an address.
_SECRET_TEXT = re.compile(r"\b(hf_|sk-|gh[pousr]_|glpat-|xox[a-z]-|AKIA)[\w-]{16,}|(?<=://)[^/@\s]+@")
FIGURE_NAME = "training_curve.png"
UNKNOWN = "unknown"
# A card with this line may be replaced. Without the line, somebody made or changed the card.
MARKER = "<!-- Written by Metaphrase from this folder's files. Delete this line to protect your own changes. -->"
OWN_TAGS = ("metaphrase", "encoder-decoder")
# ISO 639 code with an optional script or region, or the Hub's special value.
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})*|multilingual")
# Facts that the Hub's metadata have no field for. They stand under the key `metaphrase`.
_OTHER_FACTS = ("summary", "task", "source_language", "target_language")


@dataclass(frozen=True)
class Facts:
    """Facts for a model card that the user states.

    Attributes:
        title: Heading of the card. The default is the name of the repository or folder.
        summary: Description of the model in Markdown. The default is a sentence made from the folder.
        license: Licence of the weights as the Hub writes it, such as `apache-2.0`. It is never guessed.
        task: `translation`, `summarization` or `text2text-generation`. The default depends on the languages.
        base_model: Hub name of the model that this one was fine-tuned from.
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
    """Fields of the files of a trained folder, with None for a missing file.

    Attributes:
        scores: Results by name of the score, possibly none.
        data_name: Name of the data that the scores were measured on.
        scored_pairs: Description of these data in Markdown.
    """

    def __init__(self, folder: str | os.PathLike):
        """Read a folder. Raise a `MetaphraseError` if one of its files is not valid."""
        self.path = Path(folder)
        names = ("metrics", "trainer_state", "config")
        self.metrics, self.state, self.config = (read_fields(self.path / f"{name}.json") for name in names)
        self.recipe = read_recipe(self.path)
        self.num_parameters = None
        if weight_names(self.path):
            with contextlib.ExitStack() as files:
                kinds = WeightFiles(self.path, files).kinds.values()
                self.num_parameters = sum(math.prod(kind.shape) for kind in kinds)
        metrics = self.metrics or {}
        self.scores, data = metrics.get("scores") or {}, metrics.get("data") or {}
        self.data_name = redact(str(data["name"])) if data.get("name") else None
        self.scored_pairs = self.data_name and plain(self.data_name)
        if self.data_name and (self.recipe or {}).get(f"num_{data.get('split')}") and metrics.get("num_examples"):
            count = number(metrics["num_examples"])
            self.scored_pairs = f"{count} pairs taken out of {self.scored_pairs} before training"


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the fields of a folder's recipe as a run reads them, or None if it is missing."""
    # An empty file is a recipe without fields.
    return read_fields(folder / RECIPE_NAME, lambda text: {} if (fields := load_yaml(text, "it")) is None else fields)


def redact(value: Any, has_paths: bool = True) -> Any:
    """Return a value for others to see: without secrets, and with paths of this machine cut to their last part.

    Secrets are known by the name of their field or by their form, at any depth. `TEXT_FIELDS` keep what looks like a path.
    """
    if isinstance(value, list):
        return [redact(item, has_paths) for item in value]
    if isinstance(value, dict):
        shared = {name: item for name, item in value.items() if name not in SECRET_FIELDS}
        return {name: redact(item, name not in TEXT_FIELDS) for name, item in shared.items()}
    if not isinstance(value, str):
        return value
    value = _SECRET_TEXT.sub("", value)
    text = value.removeprefix("file://")
    for kind in (PurePosixPath, PureWindowsPath) if has_paths else ():
        path = kind(text)
        is_below_home = text.startswith("~") and len(path.parts) > 1
        if path.is_absolute() or is_below_home:
            return path.name or value
    return value


def score_values(scores: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str, float, str | None]]:
    """Yield (name, label, value, signature) of each score. ROUGE has four."""
    for name, result in scores.items():
        for part in [kind for kind in result if kind.startswith("rouge")] or ["score"]:
            label = SCORE_LABELS.get(name if part == "score" else part, name)
            yield name, label, result[part], result.get("signature")


def with_interval(result: Mapping[str, Any]) -> str:
    """Return a score in percent with its 95 % interval, if the scores hold one."""
    ends = result.get("confidence_interval")
    return f"{result['score']:.2f}" + (" (95 % interval {:.2f} to {:.2f})".format(*ends) if ends else "")


def plain(value: Any) -> str:
    """Return a value as one line of text, with the special characters of Markdown and HTML escaped."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}#|~!$])", r"\\\1", text)


def code(value: Any) -> str:
    """Return a value, or each of a list, as a span of code that may stand in a table."""
    if isinstance(value, list):
        return ", ".join(map(code, value))
    text = " ".join(str(value).split()).replace("|", "\\|")
    if not text:
        return "(empty)"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def number(value: Any) -> str:
    """Return a number with at most four digits, a boolean as yes or no, None as unknown, and any other value as code."""
    if value is None or isinstance(value, bool):
        return {None: UNKNOWN, True: "yes", False: "no"}[value]
    if not isinstance(value, int | float):
        return code(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def write_model_card(
    folder: str | os.PathLike, facts: Facts | None = None, *, repo_id: str | None = None, overwrite: bool = False
) -> Path:
    """Write `README.md` into a trained folder, and the picture of the training curves if there is a log. Return its path.

    The card reports `metrics.json`, `recipe.yaml`, `trainer_state.json`, `config.json` and the headers of the weights. What a
    missing file would tell, the card calls unknown.

    Args:
        repo_id: Name of the model on the Hub, `user/name`, for the code in the card.
        overwrite: True to replace a `README.md` that this function did not write.

    Raises:
        MetaphraseError: If an argument or a file of the folder is not valid, or a `README.md` from somewhere else exists.
    """
    trained, stated = TrainedFolder(folder), facts or Facts()
    path = trained.path / "README.md"
    if path.exists() and not overwrite and not is_own_card(path):
        raise MetaphraseError(f"`overwrite` must be True to replace another README.md, got {str(path)!r}.")
    if repo_id is not None:
        validate_repo_id(repo_id)
    config, metrics, recipe = trained.config or {}, trained.metrics, trained.recipe or {}
    languages = {name: getattr(stated, name) or recipe.get(name) for name in LANGUAGE_FIELDS}
    is_translation = all(languages.values()) and len(set(languages.values())) == 2
    facts = replace(
        stated,
        title=stated.title or (repo_id.split("/")[-1] if repo_id else trained.path.resolve().name),
        task=stated.task or ("translation" if is_translation else "text2text-generation"),
        **languages,
    )
    # The first of several tasks.
    task = next(iter(recipe["tasks"].values())) if recipe.get("tasks") else recipe
    prefix = redact(str(task.get("source_prefix") or ""), has_paths=False)
    fields = {name: value for name, value in redact(recipe).items() if name not in LANGUAGE_FIELDS}
    named = [name for name in fields if name in DATA_FIELDS or name.endswith(DATA_FIELD_ENDINGS)]
    data_rows = {name: fields.pop(name) for name in named}
    card = ModelCard.from_template(
        _metadata(trained, stated, facts),
        template_path=str(Path(__file__).with_name("template.md")),
        plain=plain,
        code=code,
        number=number,
        score_values=score_values,
        with_interval=with_interval,
        is_better_lower=is_better_lower,
        marker=MARKER,
        trained=trained,
        facts=facts,
        config=config,
        metrics=metrics,
        state=trained.state,
        own_type=MetaphraseConfig.model_type,
        has_target_tokenizer=(trained.path / TARGET_SUBFOLDER).is_dir(),
        model_id=f'"{repo_id}"' if repo_id else '"path/to/this/folder"',
        trust=", trust_remote_code=True" if config.get("auto_map") else "",
        # A JSON string is a Python string, too.
        source=json.dumps(f"{prefix}Your text here.", ensure_ascii=False),
        resamples=[result["bs"] for result in trained.scores.values() if "bs" in result],
        bleu=trained.scores.get("bleu", {}),
        data_rows=data_rows,
        hyperparameters=fields,
        secrets=[name for name in recipe if name in SECRET_FIELDS],
        has_curves=_draw_curves(trained, facts.title),
        architecture={
            name: value
            for name, value in redact(config).items()
            if isinstance(value, bool | int | float | str) and not name.endswith(HIDDEN_FIELD_ENDINGS)
        },
    )
    # A part of the template that is left out leaves empty lines.
    head, marker, body = card.content.partition(MARKER)
    with file_in_one_step(path) as temporary:
        ModelCard(head + marker + re.sub(r"\n{3,}", "\n\n", body)).save(temporary)
    return path


def renew_model_card(folder: str | os.PathLike) -> Path:
    """Write card and picture after a run, with the facts of an earlier card. Return the path of the card.

    A card by somebody else stays, with a warning.
    """
    path = Path(folder) / "README.md"
    if not path.exists() or is_own_card(path):
        # The run's recipe decides task and languages.
        facts = replace(read_facts(path), task=None, source_language=None, target_language=None)
        return write_model_card(folder, facts)
    logger.warning("%s was made or changed by somebody and is kept. Delete it to get a new one.", path)
    # The kept card may show the picture.
    trained = TrainedFolder(folder)
    _draw_curves(trained, trained.path.resolve().name)
    return path


def is_own_card(path: str | os.PathLike) -> bool:
    """Return True if `write_model_card` wrote a README.md and its marker still stands."""
    return MARKER in Path(path).read_text("utf-8", errors="replace")


def read_facts(path: str | os.PathLike) -> Facts:
    """Return the facts that an earlier card was given; none if it is missing, or somebody made or changed it."""
    path = Path(path)
    if not path.exists() or not is_own_card(path):
        return Facts()
    with naming_damaged_file(path, "a card with readable metadata"):
        data = metadata_load(path) or {}
    tags = [tag for tag in data.get("tags") or () if tag not in OWN_TAGS]
    named = {"license": data.get("license"), "base_model": data.get("base_model"), "tags": tags}
    return Facts(**named, datasets=data.get("datasets") or (), **data.get("metaphrase") or {})


def _metadata(trained: TrainedFolder, stated: Facts, facts: Facts) -> ModelCardData:
    recipe, data = trained.recipe or {}, (trained.metrics or {}).get("data") or {}
    languages = dict.fromkeys((facts.source_language, facts.target_language))
    codes = [language for language in languages if language and LANGUAGE_CODE.fullmatch(language)]
    results = [
        EvalResult(
            task_type=facts.task,
            # A name on the Hub. A file has none.
            dataset_type=facts.datasets[0] if facts.datasets else recipe.get("dataset_name") or "custom",
            dataset_name=trained.data_name or UNKNOWN,
            dataset_split=data.get("split"),
            metric_type="chrf" if name == "chrf++" else name,
            metric_value=round(value, 4),
            metric_name=label,
            metric_args={"signature": signature} if signature else None,
        )
        for name, label, value, signature in score_values(trained.scores)
    ]
    other_facts = {name: value for name, value in asdict(stated).items() if name in _OTHER_FACTS and value}
    return ModelCardData(
        language=codes or None,
        license=facts.license,
        library_name="transformers",
        pipeline_tag=facts.task,
        tags=[*OWN_TAGS, *facts.tags],
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=facts.title if results else None,
        eval_results=results or None,
        metaphrase=other_facts or None,
    )


def _draw_curves(trained: TrainedFolder, title: str) -> bool:
    """Draw the training curves. Return False if there is nothing to draw."""
    log, recipe = (trained.state or {}).get("log_history") or [], trained.recipe or {}
    metric = recipe.get("metric_for_best_model")
    if metric is None and recipe.get("load_best_model_at_end"):
        metric = "loss"  # the default of transformers
    metric = metric and str(metric).removeprefix("eval_")
    smoothing = recipe.get("label_smoothing_factor") or 0.0
    return draw_training_curve(log, trained.path / FIGURE_NAME, title, smoothing, metric=metric) is not None
