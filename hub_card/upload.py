"""Upload of the shared files of a trained folder in one commit, and the files of a Gradio Space and an Inference Endpoint."""

import contextlib
import glob
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from metaphrase.hub_card.card import (
    FIGURE_NAME,
    SECRET_FIELDS,
    Facts,
    TrainedFolder,
    complete_facts,
    read_recipe,
    redact,
)
from metaphrase.storage.folders import read_fields, refuse_outer_links
from metaphrase.storage.model_files import check_model_folder
from metaphrase.storage.weight_files import WeightFiles, weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER, TokenizerPair
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME
from metaphrase.training.checkpointing.averaging import PROVENANCE_NAME, RECIPE_NAME
from metaphrase.training.checkpointing.folders import ARGUMENTS_NAME
from metaphrase.training.recipe.parsing import dump_yaml

logger = logging.getLogger(__name__)

CARD = "README.md"
# Files of fast tokenizers, then of vocabularies, of SentencePiece and single families, and of chat templates.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "vocab.txt", "merges.txt", "target_vocab.json", "vocab-src.json", "vocab-tgt.json")
TOKENIZER_FILES += ("*.spm", "spiece.model", "spm.model", "tokenizer.model", "sentencepiece*.model")
TOKENIZER_FILES += ("bpe.codes", "dict.txt", "prophetnet.tokenizer", "*.jinja")
SCORE_FILES = ("metrics.json", "data_report.json", "test_predictions.txt", "validation_predictions.txt", FIGURE_NAME)
# The licence of a converted model must stay with it.
MODEL_FILES = ("config.json", "generation_config.json", VOCABULARY_MAP_NAME, "LICENSE*", "NOTICE*")
MODEL_FILES += (CARD, RECIPE_NAME, PROVENANCE_NAME, *SCORE_FILES, *TOKENIZER_FILES)
# Reason for leaving a file or folder out. The first pattern that fits decides.
REASONS = {
    ".*": "hidden",
    "checkpoint-*": "a checkpoint of the training run",
    "runs": "logs of the training run",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.pkl"), "not safetensors: can run code when it is loaded"),
    **dict.fromkeys((TRAINER_STATE_NAME, ARGUMENTS_NAME), "a state of the training run"),
    "*.py": "not code of the model",
    "*.png": "not a picture of the card",
    "*": "not a file of the model",
}


@dataclass
class Selection:
    """Files of a folder to share.

    Attributes:
        contents: Path, or bytes that replace the file, by the name in the repository.
        left_out: The reason for each file or folder that is not shared.
    """

    contents: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def report(self, show: Callable[[str], object]) -> None:
        """Pass each line of a listing to `show`."""
        sizes = {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.contents.items()
        }
        for name, size in sizes.items():
            is_cut = name == RECIPE_NAME and isinstance(self.contents[name], bytes)
            show(f"  {size:>15,}  {name}" + " (without secrets and absolute paths)" * is_cut)
        show(f"  {sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
        for name, reason in self.left_out.items():
            show(f"  {'left out':>15}  {name} ({reason})")


def select_files(folder: Path, additional_files: Mapping[str, bytes] | None = None) -> Selection:
    """Select the files of the model, and those of a tokenizer below `target_tokenizer/`.

    Args:
        folder: Folder of the model.
        additional_files: Contents by name that are no files of the folder, such as a handler.

    Raises:
        ValueError: If one of them is a link to a file outside of the folder.
    """
    selection = Selection()
    weights = weight_names(folder)
    index = [] if weights in ([], [SAFE_WEIGHTS_NAME]) else [SAFE_WEIGHTS_INDEX_NAME]
    names = [*weights, *index, *_code_files(folder), *_card_pictures(folder)]
    model_files = (*MODEL_FILES, *map(glob.escape, names))
    for directory, patterns in ((folder, model_files), (folder / TARGET_SUBFOLDER, TOKENIZER_FILES)):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            is_hidden = path.name.startswith(".")
            if path.is_file() and not is_hidden and any(fnmatch(path.name, pattern) for pattern in patterns):
                refuse_outer_links(folder, [path], "folder")
                selection.contents[name] = path
            elif name != TARGET_SUBFOLDER:
                reason = next(REASONS[pattern] for pattern in REASONS if fnmatch(path.name, pattern))
                selection.left_out[name + "/" * path.is_dir()] = reason
    # The folder's own recipe keeps its paths, which a resumed run needs.
    recipe = read_recipe(folder)
    if (shared := redact(recipe)) != recipe:
        selection.contents[RECIPE_NAME] = dump_yaml(shared).encode()
    for name, content in (additional_files or {}).items():
        selection.contents[name] = content
        selection.left_out.pop(name, None)
    return selection


def _code_files(folder: Path) -> list[str]:
    """Return the modules that the configs name, and the modules that these import from the folder."""
    modules = set()
    for name in ("config.json", "tokenizer_config.json"):
        fields = read_fields(folder / name) or {}
        for entry in (*(fields.get("auto_map") or {}).values(), *(fields.get("custom_pipelines") or {}).values()):
            classes = entry.get("impl") if isinstance(entry, dict) else entry
            for class_name in classes if isinstance(classes, list) else [classes]:
                # A name with two hyphens is in another repository, and so is its file.
                if class_name:
                    modules.add(class_name.partition(".")[0])
    paths = [folder / f"{module}.py" for module in modules if (folder / f"{module}.py").is_file()]
    imported = [Path(path) for module in paths for path in get_relative_import_files(module)]
    return sorted({path.name for path in [*paths, *imported]})


def _card_pictures(folder: Path) -> list[str]:
    """Return the pictures that the card shows."""
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    names = [path.name for path in folder.glob("*.png")]
    # `curve.png` must not match in `training_curve.png`.
    return [name for name in names if re.search(rf"(?<![\w.%-]){re.escape(name)}(?![\w-])", card)]


def check_folder(folder: Path) -> None:
    """Check that a folder holds a complete model that loads, and no secret.

    Raises:
        ValueError: If `config.json`, weights in safetensors or a tokenizer are missing or damaged, or the recipe cannot be read
            or holds a secret.
    """
    if not folder.is_dir():
        raise ValueError(f"`folder` must be an existing folder, got {str(folder)!r}.")
    names = ["config.json", *(weight_names(folder) or [SAFE_WEIGHTS_NAME])]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"`folder` must hold a whole model, but {', '.join(missing)} is missing in {str(folder)!r}.")
    check_model_folder(folder)
    # Opens the files that the card is made from.
    recipe = TrainedFolder(folder).recipe or {}
    settings = read_fields(folder / "tokenizer_config.json")
    # Code beside the model is not run here. A slow tokenizer may need a package that is not installed here.
    if settings is not None and "auto_map" not in settings:
        try:
            TokenizerPair.from_pretrained(folder)
        except ImportError:
            logger.info("The tokenizers were not loaded: a package is missing.")
        except Exception as error:
            # transformers and tokenizers raise all kinds of errors for damaged files.
            text = " ".join(str(error).split())
            raise ValueError(f"`folder` must hold tokenizers that load, got {str(folder)!r}: {text}") from error
    with contextlib.ExitStack() as files:
        weights = WeightFiles(folder, files)
        for name in weights.kinds:
            # Refuses values that are not finite.
            weights.read(name)
    if secrets := [name for name in SECRET_FIELDS if recipe.get(name)]:
        raise ValueError(
            f"`{RECIPE_NAME}` must hold no secret before it is shared, got {', '.join(secrets)} in {folder / RECIPE_NAME}."
        )


def upload(
    contents: Mapping[str, Path | bytes],
    repo_id: str,
    *,
    commit_message: str,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    is_space: bool = False,
) -> str:
    """Create repository and branch if they are missing, and upload files in one commit.

    Args:
        contents: Path or bytes of each file by its name.
        repo_id: Name on the Hub, user/name.
        commit_message: Message of the commit.
        private: True to create a private repository.
        revision: Branch; the default is main.
        token: Access token; the default is that of the environment.
        is_space: True for the repository of a Gradio Space.

    Returns:
        The name of the repository and the id of the commit, with a space between.

    Raises:
        ValueError: If `private` is True and the repository is public.
        OSError: If the Hub refuses or cannot be reached.
    """
    api = HfApi(token=token)
    kind = {"repo_type": "space" if is_space else "model"}
    sdk = {"space_sdk": "gradio"} if is_space else {}
    with naming_refusals(api, repo_id):
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True, **kind, **sdk).repo_id
        # The Hub does not change the visibility of an existing repository.
        if private and not api.repo_info(repo_id, **kind).private:
            raise ValueError(f"`private` must be left out for a repository that is public, got {repo_id!r}.")
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True, **kind)
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision, **kind)
    logger.info("See %s", commit.commit_url)
    return f"{'spaces/' * is_space}{repo_id} {commit.oid}"


def check_access(repo_id: str, token: str | None = None) -> None:
    """Check that the Hub can be reached and knows the token, before anything is written.

    Args:
        repo_id: Name on the Hub, for messages.
        token: Access token; the default is that of the environment.

    Raises:
        OSError: If the Hub refuses or cannot be reached, or there is no token.
    """
    api = HfApi(token=token)
    try:
        with naming_refusals(api, repo_id):
            api.whoami()
    except LocalTokenNotFoundError as error:
        raise PermissionError(
            f"A token is needed to write to {repo_id!r}: log in with `hf auth login`, or set HF_TOKEN or --token."
        ) from error


@contextlib.contextmanager
def naming_refusals(api: HfApi, repo_id: str) -> Iterator[None]:
    """Say in errors of the Hub how to mend them."""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise PermissionError(
                f"The Hub does not let you write to {repo_id!r}: log in with `hf auth login`, or set a token with write "
                f"access by HF_TOKEN or --token. The Hub's answer: {error}"
            ) from error
        raise
    except HTTPError as error:
        raise ConnectionError(
            f"{api.endpoint} cannot be reached: {error or type(error).__name__}. Try again with a network."
        ) from error


# Both programs use the code beside the weights. Some tokenizers have a SentencePiece model and no other file.
REQUIREMENTS = "torch>=2.11\ntransformers>=5.20,<6\nsentencepiece>=0.2\n"


def endpoint_files(folder: Path, facts: Facts) -> dict[str, bytes]:
    """Return `handler.py` and the requirements of an Inference Endpoint, which stand beside the weights.

    Args:
        folder: Folder of the model.
        facts: Facts of its card.

    Raises:
        ValueError: If the folder has no pipelines.
    """
    trained = _with_pipelines(folder, "endpoint_handler")
    constants = {"TASK": complete_facts(facts, trained, None).task, "PREFIX": trained.source_prefix}
    return {"handler.py": _fill("endpoint_handler.py", constants), "requirements.txt": REQUIREMENTS.encode()}


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
    trained = _with_pipelines(folder, "space")
    facts = complete_facts(facts, trained, repo_id)
    constants = {"TASK": facts.task, "PREFIX": trained.source_prefix, "MODEL_ID": repo_id, "EXAMPLES": list(examples)}
    for name, language in (("SOURCE", facts.source_language), ("TARGET", facts.target_language)):
        constants[f"{name}_LABEL"] = name.title() + (f" ({language})" if language else "")
    metadata = {"title": facts.title, "emoji": "🔤", "colorFrom": "blue", "colorTo": "indigo", "sdk": "gradio"}
    # The newest version that the app was tested with.
    metadata |= {"sdk_version": "6.31.0", "python_version": "3.12", "app_file": "app.py", "models": [repo_id]}
    if facts.license:
        metadata["license"] = facts.license
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return {
        "app.py": _fill("space_app.py", constants),
        "requirements.txt": REQUIREMENTS.encode(),
        "README.md": f"---\n{header}---\n\nA page to try [{repo_id}](https://huggingface.co/{repo_id}).\n".encode(),
    }


def _with_pipelines(folder: Path, option: str) -> TrainedFolder:
    trained = TrainedFolder(folder)
    if not (trained.config or {}).get("custom_pipelines"):
        raise ValueError(
            f"`{option}` must come with a model that carries its pipelines, got {str(folder)!r}. "
            "Make it a Metaphrase model by `metaphrase convert`."
        )
    return trained


def _fill(name: str, constants: Mapping[str, Any]) -> bytes:
    """Return a program of this folder with other values of its constants."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for constant, value in constants.items():
        line = re.compile(rf"^({constant}(?:: [^=]+)?) = .*$", re.MULTILINE)
        text = line.sub(lambda match, value=value: f"{match[1]} = {value!r}", text)
    return text.encode()
