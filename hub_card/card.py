"""The model card: a trained folder's README.md, with metadata that the Hub reads."""

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card.facts import TrainedFolder
from metaphrase.hub_card.figures import draw_training_curve, has_training_curve
from metaphrase.hub_card.markdown import from_plain, number, plain
from metaphrase.hub_card.sections import (
    UNKNOWN,
    describe_architecture,
    describe_code,
    describe_limits,
    describe_scores,
    describe_training_data,
    describe_training_procedure,
    score_values,
)
from metaphrase.storage.folders import file_in_one_step
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER

logger = logging.getLogger(__name__)

TEMPLATE_PATH = Path(__file__).with_name("template.md")
FIGURE_NAME = "training_curve.png"
# A card that bears this line may be written anew; a card that does not was made or changed by somebody.
MARKER = "<!-- Written by Metaphrase from this folder's files. Delete this line to protect your own changes. -->"
# For a folder with code of its own.
TRUST = ", trust_remote_code=True"
# For a folder whose decoder has a tokenizer of its own.
LOAD_TARGET_TOKENIZER = (
    f'target_tokenizer = AutoTokenizer.from_pretrained(model_id, subfolder="{TARGET_SUBFOLDER}"%s)\n'
)
OWN_TAGS = ("metaphrase", "encoder-decoder")
TASKS = ("translation", "summarization", "text2text-generation")
# The form of an ISO 639 code with an optional script or region, or of the Hub's special value.
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})*|multilingual")

# In a card: its summary, and its languages.
_HEAD = re.compile(
    re.escape(MARKER) + r"\s*(.*?)\n\n- Source language: ([^\n]*)\n- Target language: ([^\n]*)\n- Parameters: ",
    re.DOTALL,
)
# One that `_summarise` may have made.
_MADE_SUMMARY = re.compile(
    r"An encoder-decoder Transformer( of the type \S+)? for text, "
    r"trained to (translate from [^\n]+|summarise|turn one text into another\. Which task that is, its files do not say)\."
)
_NO_CODE = " (no ISO 639 code, hence not in the metadata)"


def write_model_card(
    folder: str | os.PathLike,
    *,
    repo_id: str | None = None,
    title: str | None = None,
    summary: str | None = None,
    license: str | None = None,
    task: str | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Writes `README.md`, and the picture of the training curves where a log allows it, into a trained folder.

    Everything comes from the folder's `metrics.json`, `recipe.yaml`, `trainer_state.json`, `config.json` and
    safetensors headers. All of them may be absent: the card then says that it does not know.

    Args:
        folder: The folder with the model.
        repo_id: The model's name on the Hub, `user/name`; the code in the card loads it from there.
        title: The card's heading; else the repository's or the folder's name.
        summary: What the model is, as Markdown, in place of the sentence made from the folder.
        license: The weights' licence as the Hub writes it, such as `apache-2.0`. It is never guessed.
        task: One of `TASKS`; else `translation` where two different languages are known, or `text2text-generation`.
        source_language: Overrides the recipe's.
        target_language: Overrides the recipe's.
        base_model: The Hub name of the model that this one was fine-tuned from.
        datasets: Hub names of the data.
        tags: Further tags.
        overwrite: Whether to replace a `README.md` that this function did not write.

    Returns:
        The path of the card.

    Raises:
        ValueError: If the folder or a file in it is unfit, `repo_id` or `task` is not valid, or a `README.md` by
            another hand is in the way.
    """
    facts = TrainedFolder.read(folder)
    path = facts.path / "README.md"
    if path.exists() and not overwrite and not is_own_card(path):
        raise ValueError(
            f"`overwrite` must be True to replace a README.md that was written otherwise, got {str(path)!r}."
        )
    if repo_id is not None:
        validate_repo_id(repo_id)
    recipe = facts.recipe or {}
    languages = (source_language or recipe.get("source_language"), target_language or recipe.get("target_language"))
    title = title or (repo_id.split("/")[-1] if repo_id else facts.path.resolve().name)
    task = _choose_task(task, languages)
    data = _metadata(facts, title, task, languages, license, base_model, datasets, tags)
    trust = TRUST if facts.has_own_code else ""
    body = Template(TEMPLATE_PATH.read_text(encoding="utf-8")).substitute(
        title=plain(title),
        marker=MARKER,
        summary=summary or _summarise(facts, task, languages),
        source_language=_language(languages[0]),
        target_language=_language(languages[1]),
        parameters=UNKNOWN if facts.num_parameters is None else number(facts.num_parameters),
        license=plain(license) if license else f"{UNKNOWN}; ask the owner before you use the weights",
        model_id=f'"{repo_id}"' if repo_id else '"path/to/this/folder"',
        target_tokenizer=LOAD_TARGET_TOKENIZER % trust if facts.has_target_tokenizer else "",
        trust=trust,
        code=describe_code(facts),
        # As JSON writes a text, it is one of Python's too.
        source=json.dumps(f"{facts.source_prefix}Your text here.", ensure_ascii=False),
        decoder="target_tokenizer" if facts.has_target_tokenizer else "tokenizer",
        scores=describe_scores(facts),
        training_data=describe_training_data(facts),
        training_procedure=describe_training_procedure(facts),
        curves=_draw_curves(facts, title),
        architecture=describe_architecture(facts),
        limits=describe_limits(facts, languages),
    )
    with file_in_one_step(path) as temporary:
        ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(temporary)
    return path


def renew_model_card(folder: str | os.PathLike) -> Path:
    """Writes the card and the picture of the training curves after a run. A card by another hand stays, with a warning.

    What an earlier card of ours was given, and no file of the folder says, stays in it.

    Returns:
        The path of the card.

    Raises:
        ValueError: If the folder or a file in it is unfit.
    """
    path = Path(folder) / "README.md"
    if not path.exists() or is_own_card(path):
        given = earlier_arguments(path)
        # The recipe of the run decides these.
        for name in ("task", "source_language", "target_language"):
            given.pop(name, None)
        return write_model_card(folder, **given)
    logger.warning("%s was made or changed by somebody: it stays as it is. Delete it to have a new one.", path)
    # The picture that it may show is of this run all the same.
    facts = TrainedFolder.read(folder)
    _draw_curves(facts, facts.path.resolve().name)
    return path


def is_own_card(path: str | os.PathLike) -> bool:
    """Whether a README.md was written by `write_model_card` and nobody has claimed it since."""
    return MARKER in Path(path).read_text("utf-8", errors="replace")


def earlier_arguments(path: str | os.PathLike) -> dict[str, Any]:
    """What `write_model_card` must be given so that a card that is written anew states what it did.

    Args:
        path: The README.md of a folder.

    Returns:
        Arguments by name, none for a card that is not there or was made or changed by somebody: those of `license`,
        `base_model`, `datasets` and `tags` that it has, the languages that it knows, and its `task` and `summary` where they are
        not what is made of the rest. A title is not among them, since it may be the name of a folder or of a repository.

    Raises:
        ValueError: If its metadata cannot be read.
    """
    path = Path(path)
    if not path.exists() or not is_own_card(path):
        return {}
    try:
        data = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"The metadata of README.md must be readable, got an error in {str(path)!r}: {error}. Repair or delete it."
        ) from error
    datasets, tags = (_as_list(data.get(name)) for name in ("datasets", "tags"))
    given = {"license": data.get("license"), "base_model": data.get("base_model"), "datasets": datasets}
    given["tags"] = [tag for tag in tags if tag not in OWN_TAGS]
    if head := _HEAD.search(path.read_text(encoding="utf-8")):
        summary, *shown = head.groups()
        languages = [from_plain(language.removesuffix(_NO_CODE)) for language in shown]
        languages = [None if language == UNKNOWN else language for language in languages]
        given |= {"source_language": languages[0], "target_language": languages[1]}
        task = data.get("pipeline_tag")
        given["task"] = task if task in TASKS and task != _choose_task(None, tuple(languages)) else None
        given["summary"] = None if _MADE_SUMMARY.fullmatch(summary) else summary
    return {name: value for name, value in given.items() if value}


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list) else [value] if value else []


def _choose_task(task: str | None, languages: tuple[str | None, str | None]) -> str:
    if task is not None and task not in TASKS:
        raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {task!r}.")
    is_translation = all(languages) and languages[0] != languages[1]
    return task or ("translation" if is_translation else "text2text-generation")


def _metadata(
    facts: TrainedFolder,
    title: str,
    task: str,
    languages: tuple[str | None, str | None],
    license: str | None,
    base_model: str | None,
    datasets: Sequence[str],
    tags: Sequence[str],
) -> ModelCardData:
    codes = [language for language in dict.fromkeys(languages) if language and LANGUAGE_CODE.fullmatch(language)]
    results = [
        EvalResult(
            task_type=task,
            dataset_type=datasets[0] if datasets else facts.data_name or UNKNOWN,
            dataset_name=facts.data_name or UNKNOWN,
            metric_type=_hub_metric(name),
            metric_value=round(value, 4),
            metric_name=label,
            metric_args={"signature": signature} if signature else None,
        )
        for name, label, value, signature in score_values(facts.scores)
    ]
    return ModelCardData(
        language=codes or None,
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=[*OWN_TAGS, *tags],
        base_model=base_model,
        datasets=list(datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=title if results else None,
        eval_results=results or None,
    )


def _hub_metric(name: str) -> str:
    return "chrf" if name == "chrf++" else name


def _language(language: str | None) -> str:
    if not language:
        return UNKNOWN
    return plain(language) + ("" if LANGUAGE_CODE.fullmatch(language) else _NO_CODE)


def _summarise(facts: TrainedFolder, task: str, languages: tuple[str | None, str | None]) -> str:
    config: dict[str, Any] = facts.config or {}
    kind = config.get("model_type")
    text = "An encoder-decoder Transformer" + (f" of the type {plain(kind)}" if kind else "") + " for text, "
    if task == "translation" and all(languages):
        return text + f"trained to translate from {plain(languages[0])} to {plain(languages[1])}."
    if task == "summarization":
        return text + "trained to summarise."
    return text + "trained to turn one text into another. Which task that is, its files do not say."


def _draw_curves(facts: TrainedFolder, title: str) -> str:
    if not has_training_curve(facts.log_history):
        return "Unknown: there is no `trainer_state.json` with a loss or a score in its log."
    draw_training_curve(facts.log_history, facts.path / FIGURE_NAME, title=title)
    return f"![Loss and score against the optimizer step]({FIGURE_NAME})"
