"""Files that run a model on the Hub: a Gradio Space, and the handler of an Inference Endpoint."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi

from metaphrase.hub_card.card import complete_facts
from metaphrase.hub_card.facts import Facts, TrainedFolder
from metaphrase.hub_card.upload import naming_refusals

logger = logging.getLogger(__name__)

_APP, _HANDLER = (Path(__file__).with_name(name) for name in ("space_app.py", "endpoint_handler.py"))
# Both use the code beside the weights. Some tokenizers have a SentencePiece model and no other file.
REQUIREMENTS = "torch>=2.11\ntransformers>=5.20,<6\nsentencepiece>=0.2\n"
# The newest version that the app was tested with.
_GRADIO_VERSION = "6.31.0"
_COLORS = {"colorFrom": "blue", "colorTo": "indigo"}


def endpoint_files(folder: Path, facts: Facts) -> dict[str, bytes]:
    """Return `handler.py` and the requirements of an Inference Endpoint, which stand beside the weights.

    Args:
        folder: Folder of the model.
        facts: Facts of its card.

    Raises:
        ValueError: If the folder has no pipelines.
    """
    handler = _fill(_HANDLER, _constants(folder, facts, "endpoint_handler"))
    return {"handler.py": handler, "requirements.txt": REQUIREMENTS.encode()}


def space_files(folder: Path, facts: Facts, repo_id: str, examples: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the files of a Gradio Space that loads a model from the Hub.

    Args:
        folder: Folder of the model.
        facts: Facts of its card.
        repo_id: Name of the model on the Hub.
        examples: Sources below the text field.

    Raises:
        ValueError: If the folder has no pipelines.
    """
    constants = _constants(folder, facts, "space") | {"MODEL_ID": repo_id, "EXAMPLES": list(examples)}
    facts = complete_facts(facts, TrainedFolder(folder), repo_id)
    for name, language in (("SOURCE", facts.source_language), ("TARGET", facts.target_language)):
        constants[f"{name}_LABEL"] = name.title() + (f" ({language})" if language else "")
    metadata = {"title": facts.title, "emoji": "🔤", **_COLORS, "sdk": "gradio", "sdk_version": _GRADIO_VERSION}
    metadata |= {"python_version": "3.12", "app_file": "app.py", "models": [repo_id]}
    if facts.license:
        metadata["license"] = facts.license
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return {
        "app.py": _fill(_APP, constants),
        "requirements.txt": REQUIREMENTS.encode(),
        "README.md": f"---\n{header}---\n\nA page to try [{repo_id}](https://huggingface.co/{repo_id}).\n".encode(),
    }


def upload_space(
    files: Mapping[str, bytes], space_id: str, *, commit_message: str, private: bool = False, token: str | None = None
) -> str:
    """Create a Space if it is missing, and upload its files in one commit.

    Returns:
        The name of the Space and the id of the commit, with a space between.

    Raises:
        OSError: If the Hub refuses or cannot be reached.
    """
    api = HfApi(token=token)
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    with naming_refusals(api, space_id):
        space = api.create_repo(space_id, repo_type="space", space_sdk="gradio", private=private or None, exist_ok=True)
        commit = api.create_commit(space.repo_id, operations, repo_type="space", commit_message=commit_message)
    logger.info("See %s", commit.commit_url)
    if private:
        logger.info("The Space of a private model needs a token: set the secret HF_TOKEN in its settings.")
    return f"spaces/{space.repo_id} {commit.oid}"


def _constants(folder: Path, facts: Facts, option: str) -> dict[str, Any]:
    trained = TrainedFolder(folder)
    if not (trained.config or {}).get("custom_pipelines"):
        raise ValueError(
            f"`{option}` must come with a model that carries its pipelines, got {str(folder)!r}. "
            "Make it a Metaphrase model by `metaphrase convert`."
        )
    return {"TASK": complete_facts(facts, trained, None).task, "PREFIX": trained.source_prefix}


def _fill(path: Path, constants: Mapping[str, Any]) -> bytes:
    """Return a program with the values of its constants."""

    def assign(match: re.Match[str]) -> str:
        start, name = match.groups()
        return f"{start} = {constants[name]!r}" if name in constants else match[0]

    text = path.read_text(encoding="utf-8")
    return re.sub(r"^(([A-Z_]+)(?:: [^=]+)?) = .*$", assign, text, flags=re.MULTILINE).encode()
