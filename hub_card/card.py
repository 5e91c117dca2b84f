"""Write the model card: the README.md of a trained folder, with metadata for the Hub."""

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card import sections
from metaphrase.hub_card.facts import Facts, TrainedFolder
from metaphrase.hub_card.figures import draw_training_curve, has_training_curve
from metaphrase.hub_card.sections import UNKNOWN, from_plain, number, plain, score_values
from metaphrase.storage.folders import file_in_one_step
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER

logger = logging.getLogger(__name__)

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
        code=sections.describe_code(trained, model_id),
        # A JSON string is a Python string, too.
        source=json.dumps(f"{trained.source_prefix}Your text here.", ensure_ascii=False),
        decoder="target_tokenizer" if trained.has_target_tokenizer else "tokenizer",
        scores=sections.describe_scores(trained),
        training_data=sections.describe_training_data(trained),
        training_procedure=sections.describe_training_procedure(trained),
        curves=_draw_curves(trained, facts.title),
        # After the picture is drawn.
        files=sections.describe_files(trained),
        architecture=sections.describe_architecture(trained),
        limits=sections.describe_limits(trained, facts),
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
