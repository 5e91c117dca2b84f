"""Model card: the README.md of a trained folder, with metadata for the Hub. What the folder does not tell is called unknown."""

import contextlib
import fnmatch
import html
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from string import Template
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card.figures import (
    LOWER_IS_BETTER,
    SCORE_LABELS,
    draw_training_curve,
    has_training_curve,
    is_finite,
)
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import file_in_one_step, read_fields
from metaphrase.storage.weight_files import WeightFiles, weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpointing.averaging import RECIPE_NAME
from metaphrase.training.recipe.parsing import load_yaml

logger = logging.getLogger(__name__)

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


# (row, names of the field in different families, True to show the row when unknown)
ARCHITECTURE_ROWS = (
    ("Model type", ("model_type",), True),
    ("Encoder layers", ("encoder_layers", "num_layers"), True),
    ("Decoder layers", ("decoder_layers", "num_decoder_layers"), True),
    ("Hidden size", ("hidden_size", "d_model"), True),
    ("Encoder attention heads", ("encoder_attention_heads", "num_heads"), True),
    ("Decoder attention heads", ("decoder_attention_heads", "num_heads"), True),
    ("Key/value heads", ("num_key_value_heads",), False),
    ("Head dimension", ("head_dim", "d_kv"), False),
    ("Encoder feed-forward size", ("encoder_ffn_dim", "d_ff"), True),
    ("Decoder feed-forward size", ("decoder_ffn_dim", "d_ff"), True),
    ("Activation", ("activation_function",), False),
    ("Gated feed-forward", ("gated_mlp",), False),
    ("Positions", ("position_embedding_type",), True),
    ("Maximum positions", ("max_position_embeddings",), False),
    ("Normalisation", ("norm_type",), False),
    ("Place of the normalisation", ("norm_position",), False),
    ("Vocabulary size", ("vocab_size",), True),
    ("Decoder vocabulary size", ("decoder_vocab_size",), False),
    ("Encoder and decoder share embeddings", ("share_embeddings",), False),
    ("Output layer tied to embeddings", ("tie_word_embeddings",), False),
    ("Dropout", ("dropout",), False),
    ("Stored as", ("dtype", "torch_dtype"), False),
)
# (purpose, names of files and folders, True if `metaphrase push` uploads them)
FILE_ROWS = (
    ("Model", ("config.json", "generation_config.json", "*.safetensors", "*.index.json", "*.py"), True),
    (
        "Tokenizers",
        ("tokenizer*", "vocab*", "merges.txt", "vmap.txt", "*.model", "*.spm", f"{TARGET_SUBFOLDER}/"),
        True,
    ),
    ("Scores and outputs", ("metrics.json", "*_predictions.txt", "training_curve.png"), True),
    ("How the model was trained", ("recipe.yaml", "average.json", "data_report.json"), True),
    ("Log and arguments of the run", ("trainer_state.json", "training_args.json", "runs/", "tune/"), False),
    ("Checkpoints, only to resume the run", ("checkpoint-*/",), False),
    ("LoRA adapter before it was merged", ("adapter/",), False),
    ("Training data", ("data/",), False),
)
UNKNOWN = "unknown"
TWO_WAYS = """\
There are two ways to load the model. Both write the same tokens.

| | `trust_remote_code=True`, as above | `import metaphrase`, as below |
|---|---|---|
| Code that runs | the `.py` files beside the weights; read them first | the installed package, nothing from here |
| Needs | transformers | transformers and `pip install metaphrase` |
| Speed | that of transformers' loops | faster, most of all on a CPU |

```python
import metaphrase
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model_id})
model = AutoModelForSeq2SeqLM.from_pretrained({model_id})
```"""
OWN_CODE = "`trust_remote_code=True` runs the model code that is stored beside the weights."


def score_values(scores: dict[str, dict[str, Any]]) -> list[tuple[str, str, float, str | None]]:
    """Return (name, label, value, signature) of each score. ROUGE has four."""
    return [
        (name, SCORE_LABELS.get(name if part == "score" else part, name), result[part], result.get("signature"))
        for name, result in scores.items()
        for part in [kind for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum") if kind in result] or ["score"]
    ]


def with_interval(result: Mapping[str, Any]) -> str:
    """Return a score in percent with its 95 % interval, if the scores hold one."""
    mean, half = (result.get(f"confidence_{name}") for name in ("mean", "var"))
    interval = f" (95 % interval {mean - half:.2f} to {mean + half:.2f})" if is_finite(mean) and is_finite(half) else ""
    return f"{result['score']:.2f}{interval}"


def describe_code(folder: TrainedFolder, model_id: str) -> str:
    """Return a remark on the code beside the weights, empty if there is none. `model_id` is a Python string."""
    if not folder.has_own_code:
        return ""
    is_own = folder.config.get("model_type") == MetaphraseConfig.model_type
    return f"\n{TWO_WAYS.format(model_id=model_id) if is_own else OWN_CODE}\n"


def describe_files(folder: TrainedFolder) -> str:
    """Return the table of files in the folder, by purpose."""
    names = [path.name + "/" * path.is_dir() for path in folder.path.iterdir()]
    rows = []
    for purpose, patterns, is_uploaded in FILE_ROWS:
        matches = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
        shown = [pattern if len(matching) > 1 else matching[0] for pattern, matching in matches.items() if matching]
        if shown:
            rows.append((purpose, ", ".join(map(code, shown)), "yes" if is_uploaded else "no"))
    return table(("Purpose", "Files", "Uploaded by `metaphrase push`"), rows) if rows else f"{UNKNOWN.title()}."


def describe_scores(folder: TrainedFolder) -> str:
    """Return the table of scores with their signatures, data and settings."""
    if folder.metrics is None:
        return "No scores are known: there is no `metrics.json`."
    parts = []
    if folder.scores:
        rows = []
        for name, label, value, signature in score_values(folder.scores):
            direction = " (lower is better)" if name in LOWER_IS_BETTER else ""
            # ROUGE has several values. The interval is that of ROUGE-L.
            has_interval = name != "rouge" or label == "ROUGE-L"
            shown = with_interval(folder.scores[name]) if has_interval else f"{value:.2f}"
            rows.append((plain(label) + direction, shown, code(signature) if signature else UNKNOWN))
        parts.append(table(("Score", "Percent", "Signature"), rows))
        parts += _score_remarks(folder.scores)
        if folder.tasks:
            parts.append(_scores_of_tasks(folder.tasks))
    else:
        parts.append("No scores are known: `metrics.json` holds none.")
    metrics = folder.metrics
    generation = metrics.get("generation")
    settings = ", ".join(f"{code(name)} {code(value)}" for name, value in (generation or {}).items())
    facts = [
        f"Measured on: {_describe_scored_pairs(folder) or UNKNOWN}",
        f"Examples: {_known(metrics.get('num_examples'))}",
        f"Loss (nats per target token): {_known(metrics.get('loss'))}",
        f"Perplexity: {_known(metrics.get('perplexity'))}",
        f"Generation settings: {settings or UNKNOWN}",
    ]
    return "\n\n".join([*parts, bullets(facts)])


def _describe_scored_pairs(folder: TrainedFolder) -> str | None:
    """Return the data that the scores were measured on, or None if its name is unknown."""
    if not folder.data_name:
        return None
    split, count = (folder.metrics.get("data") or {}).get("split"), folder.metrics.get("num_examples")
    if (folder.recipe or {}).get(f"num_{split}") and count:
        return f"{number(count)} pairs taken out of {plain(folder.data_name)} before training"
    return plain(folder.data_name)


def _scores_of_tasks(tasks: dict[str, dict[str, Any]]) -> str:
    """Return the table of scores of each task."""
    rows = [
        (plain(task), plain(label), f"{value:.2f}", number(part["num_examples"]))
        for task, part in tasks.items()
        for _, label, value, _ in score_values(part["scores"])
    ]
    return table(("Task", "Score", "Percent", "Examples"), rows)


def _score_remarks(scores: dict[str, dict[str, Any]]) -> list[str]:
    remarks = []
    samples = next((result["bs"] for result in scores.values() if result.get("bs")), None)
    if samples:
        remarks.append(
            f"Intervals are those of sacreBLEU's bootstrap with {number(samples)} resamples of the test set."
        )
    bleu = scores.get("bleu", {})
    if bleu.get("precisions") and bleu.get("bp") is not None:
        precisions = "/".join(f"{value:.1f}" for value in bleu["precisions"])
        lengths = f", lengths {_known(bleu.get('sys_len'))} and {_known(bleu.get('ref_len'))} (output, reference)"
        remarks.append(f"BLEU in detail: precisions {precisions}, brevity penalty {bleu['bp']:.3f}{lengths}.")
    if "tok:none" in (bleu.get("signature") or ""):
        remarks.append(
            "BLEU was computed on text that was tokenised before (`tok:none`). It must not be compared with BLEU on plain text."
        )
    return remarks


def _field(value: Any) -> str:
    return ", ".join(map(code, value)) if isinstance(value, list) else code(value)


def _known(value: Any) -> str:
    return UNKNOWN if value is None else number(value)


def describe_training_data(folder: TrainedFolder) -> str:
    """Return the table of data fields in recipe and scores."""
    fields, _, _ = folder.split_recipe()
    rows = [(code(name), _field(value)) for name, value in fields.items()]
    data = (folder.metrics or {}).get("data") or {}
    for name, value in data.items():
        if isinstance(value, dict):
            rows += [(f"{plain(name)}: {plain(part)}", number(amount)) for part, amount in value.items()]
        else:
            rows.append((plain(name), number(value)))
    if not rows:
        return "Unknown: neither a recipe nor the scores name the data."
    return table(("Field", "Value"), rows)


def describe_training_procedure(folder: TrainedFolder) -> str:
    """Return the length of training and the hyperparameters of the recipe."""
    parts = [_describe_progress(folder)]
    _, hyperparameters, secrets = folder.split_recipe()
    if hyperparameters:
        rows = [(code(name), _field(value)) for name, value in hyperparameters.items()]
        parts.append(table(("Hyperparameter", "Value"), rows))
        parts.append("The table lists the fields of `recipe.yaml`, with absolute paths cut to their last part.")
    else:
        parts.append("The hyperparameters are unknown: there is no `recipe.yaml`, or it names none.")
    if secrets:
        parts.append(f"Left out as secret: {', '.join(map(code, secrets))}.")
    return "\n\n".join(parts)


def _describe_progress(folder: TrainedFolder) -> str:
    state = folder.trainer_state
    if state is None:
        return "The length of training is unknown: there is no `trainer_state.json`."
    progress = f"Trained for {_known(state.get('global_step'))} optimizer steps, {_known(state.get('epoch'))} epochs."
    if state.get("best_metric") is not None:
        step, metric = _known(state.get("best_global_step")), number(state["best_metric"])
        progress += f" The best step by the validation metric was {step}, with {metric}."
    return progress


def describe_architecture(folder: TrainedFolder) -> str:
    """Return the table of dimensions in the configuration."""
    if folder.config is None:
        return f"Unknown: there is no `config.json`. Parameters: {_known(folder.num_parameters)}."
    rows = [("Parameters", _known(folder.num_parameters))]
    for label, names, is_needed in ARCHITECTURE_ROWS:
        value = next((folder.config[name] for name in names if folder.config.get(name) is not None), None)
        if value is not None or is_needed:
            rows.append((label, UNKNOWN if value is None else number(value)))
    return table(("Part", "Value"), rows)


def describe_limits(folder: TrainedFolder, facts: Facts) -> str:
    """Return the known limits of the model."""
    limits = []
    if folder.scores:
        where = _describe_scored_pairs(folder) or "data whose name is unknown"
        limits.append(f"The scores were measured on {where}. Quality on other kinds of text is unknown.")
    else:
        limits.append("Its quality is unknown: no scores are recorded.")
    if facts.source_language and facts.target_language:
        languages = f"{plain(facts.source_language)} to {plain(facts.target_language)}"
        limits.append(f"It was trained from {languages}. Other languages are untested.")
    else:
        limits.append("The languages it was trained for are not recorded.")
    config = folder.config or {}
    positions = config.get("max_position_embeddings")
    if config.get("position_embedding_type") == "learned" and positions is not None:
        limits.append(f"Positions are learned: inputs and outputs end at {number(positions)} tokens.")
    else:
        limits.append("Lengths above those of the training data are untested.")
    limits.append("No examination of bias or of harmful output is recorded.")
    return bullets(limits)


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def plain(value: Any) -> str:
    """Return a value as one line of text, with the special characters of Markdown and HTML escaped."""
    text = _one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}#|~!$])", r"\\\1", text)


def from_plain(text: str) -> str:
    """Undo `plain`."""
    return html.unescape(re.sub(r"\\(.)", r"\1", text))


def code(value: Any) -> str:
    """Return a value as a span of code that may stand in a table."""
    text = _one_line(value).replace("|", "\\|")
    if not text:
        return "(empty)"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Header and cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bullets(items: Iterable[str]) -> str:
    """Return a bullet list. The items are Markdown."""
    return "\n".join(f"- {item}" for item in items)


def number(value: Any) -> str:
    """Return a number with at most four digits, a boolean as yes or no, and any other value as code."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return code(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


TEMPLATE_PATH = Path(__file__).with_name("template.md")
FIGURE_NAME = "training_curve.png"
# A card with this line may be replaced. Without the line, somebody made or changed the card.
MARKER = "<!-- Written by Metaphrase from this folder's files. Delete this line to protect your own changes. -->"
# Argument for a folder with model code.
TRUST = ", trust_remote_code=True"
# Line for a folder with a separate target tokenizer.
LOAD_TARGET_TOKENIZER = (
    f'target_tokenizer = AutoTokenizer.from_pretrained(model_id, subfolder="{TARGET_SUBFOLDER}"%s)\n'
)
OWN_TAGS = ("metaphrase", "encoder-decoder")
TASKS = ("translation", "summarization", "text2text-generation")
# ISO 639 code with an optional script or region, or the Hub's special value.
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})*|multilingual")

# Summary and languages of a card.
_HEAD = re.compile(
    re.escape(MARKER) + r"\s*(.*?)\n\n- Source language: ([^\n]*)\n- Target language: ([^\n]*)\n- Parameters: ",
    re.DOTALL,
)
# Summary by `_summarise`, of this and earlier versions.
_MADE_SUMMARY = re.compile(
    r"An encoder-decoder Transformer( of the type \S+)? for text, "
    r"trained to (translate from [^\n]+|summarise|turn one text into another\. "
    r"(Which task that is, its files do not say|Its files do not name the task))\."
)
_NO_CODE = " (no ISO 639 code, hence not in the metadata)"


def write_model_card(
    folder: str | os.PathLike, facts: Facts | None = None, *, repo_id: str | None = None, overwrite: bool = False
) -> Path:
    """Write `README.md` into a trained folder, and the picture of the training curves if there is a log.

    The card reports `metrics.json`, `recipe.yaml`, `trainer_state.json`, `config.json` and the headers of the weights. What a
    missing file would tell, the card calls unknown.

    Args:
        folder: Folder of the model.
        facts: Facts that no file of the folder tells.
        repo_id: Name of the model on the Hub, `user/name`, for the code in the card.
        overwrite: True to replace a `README.md` that this function did not write.

    Returns:
        The path of the card.

    Raises:
        ValueError: If the folder or one of its files is not valid, `repo_id` or the task is not valid, or a `README.md` from
            somewhere else exists.
    """
    trained = TrainedFolder(folder)
    path = trained.path / "README.md"
    if path.exists() and not overwrite and not is_own_card(path):
        raise ValueError(
            f"`overwrite` must be True to replace a README.md that was written otherwise, got {str(path)!r}."
        )
    if repo_id is not None:
        validate_repo_id(repo_id)
    facts = complete_facts(facts or Facts(), trained, repo_id)
    data = _metadata(trained, facts)
    trust = TRUST if trained.has_own_code else ""
    model_id = f'"{repo_id}"' if repo_id else '"path/to/this/folder"'
    body = Template(TEMPLATE_PATH.read_text(encoding="utf-8")).substitute(
        title=plain(facts.title),
        marker=MARKER,
        summary=facts.summary or _summarise(trained, facts),
        source_language=_language(facts.source_language),
        target_language=_language(facts.target_language),
        parameters=UNKNOWN if trained.num_parameters is None else number(trained.num_parameters),
        license=plain(facts.license) if facts.license else f"{UNKNOWN}; ask the owner before you use the weights",
        model_id=model_id,
        target_tokenizer=LOAD_TARGET_TOKENIZER % trust if trained.has_target_tokenizer else "",
        trust=trust,
        code=describe_code(trained, model_id),
        # A JSON string is a Python string, too.
        source=json.dumps(f"{trained.source_prefix}Your text here.", ensure_ascii=False),
        decoder="target_tokenizer" if trained.has_target_tokenizer else "tokenizer",
        scores=describe_scores(trained),
        training_data=describe_training_data(trained),
        training_procedure=describe_training_procedure(trained),
        curves=_draw_curves(trained, facts.title),
        # After the picture is drawn.
        files=describe_files(trained),
        architecture=describe_architecture(trained),
        limits=describe_limits(trained, facts),
    )
    with file_in_one_step(path) as temporary:
        ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(temporary)
    return path


def renew_model_card(folder: str | os.PathLike) -> Path:
    """Write card and picture after a run, with the facts of an earlier card. A card by somebody else stays, with a warning.

    Returns:
        The path of the card.

    Raises:
        ValueError: If the folder or one of its files is not valid.
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
    """Read the facts of an earlier card, to write them into a new one.

    Languages are those that the card names. Task and summary are read only if they do not follow from the rest. The title is
    not read, since it may be the name of the folder or of a repository.

    Args:
        path: A README.md. If it is missing, or somebody made or changed it, there are no facts.

    Raises:
        ValueError: If the metadata cannot be read.
    """
    path = Path(path)
    if not path.exists() or not is_own_card(path):
        return Facts()
    try:
        data = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"The metadata of README.md must be readable, got an error in {str(path)!r}: {error}. Repair or delete it."
        ) from error
    datasets, tags = (_as_list(data.get(name)) for name in ("datasets", "tags"))
    facts = Facts(
        license=data.get("license"),
        base_model=data.get("base_model"),
        datasets=datasets,
        tags=[tag for tag in tags if tag not in OWN_TAGS],
    )
    if not (head := _HEAD.search(path.read_text(encoding="utf-8"))):
        return facts
    summary, *shown = head.groups()
    languages = [from_plain(language.removesuffix(_NO_CODE)) for language in shown]
    source, target = (None if language == UNKNOWN else language for language in languages)
    task = data.get("pipeline_tag")
    return replace(
        facts,
        source_language=source,
        target_language=target,
        task=task if task in TASKS and task != _choose_task(None, source, target) else None,
        summary=None if _MADE_SUMMARY.fullmatch(summary) else summary,
    )


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list) else [value] if value else []


def complete_facts(facts: Facts, trained: TrainedFolder, repo_id: str | None) -> Facts:
    """Fill in title, languages and task."""
    recipe = trained.recipe or {}
    source = facts.source_language or recipe.get("source_language")
    target = facts.target_language or recipe.get("target_language")
    return replace(
        facts,
        title=facts.title or (repo_id.split("/")[-1] if repo_id else trained.path.resolve().name),
        source_language=source,
        target_language=target,
        task=_choose_task(facts.task, source, target),
    )


def _choose_task(task: str | None, source_language: str | None, target_language: str | None) -> str:
    if task is not None and task not in TASKS:
        raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {task!r}.")
    is_translation = source_language and target_language and source_language != target_language
    return task or ("translation" if is_translation else "text2text-generation")


def _metadata(trained: TrainedFolder, facts: Facts) -> ModelCardData:
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
    )


def _language(language: str | None) -> str:
    if not language:
        return UNKNOWN
    return plain(language) + ("" if LANGUAGE_CODE.fullmatch(language) else _NO_CODE)


def _summarise(trained: TrainedFolder, facts: Facts) -> str:
    kind = (trained.config or {}).get("model_type")
    text = "An encoder-decoder Transformer" + (f" of the type {plain(kind)}" if kind else "") + " for text, "
    if facts.task == "translation" and facts.source_language and facts.target_language:
        return text + f"trained to translate from {plain(facts.source_language)} to {plain(facts.target_language)}."
    if facts.task == "summarization":
        return text + "trained to summarise."
    return text + "trained to turn one text into another. Its files do not name the task."


def _draw_curves(trained: TrainedFolder, title: str) -> str:
    if not has_training_curve(trained.log_history):
        return "Unknown: there is no `trainer_state.json` with a loss or a score in its log."
    recipe = trained.recipe or {}
    smoothing, metric = recipe.get("label_smoothing_factor") or 0.0, recipe.get("metric_for_best_model")
    if metric is None and recipe.get("load_best_model_at_end"):
        metric = "loss"  # the default of transformers
    options = {"title": title, "label_smoothing": smoothing, "metric": metric and str(metric).removeprefix("eval_")}
    draw_training_curve(trained.log_history, trained.path / FIGURE_NAME, **options)
    return f"![Loss and score against the optimizer step]({FIGURE_NAME})"
