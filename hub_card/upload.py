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
        sizes: Bytes of each shared file, by its path in the folder.
        rewritten: Contents that replace a file which holds paths of this machine.
        left_out: The reason for each file or folder that is not shared.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    rewritten: dict[str, bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, files: Mapping[str, bytes]) -> None:
        """Add files that are no files of the folder, such as a handler."""
        for name, content in files.items():
            self.rewritten[name], self.sizes[name] = content, len(content)
            self.left_out.pop(name, None)

    def report(self, show: Callable[[str], object]) -> None:
        """Pass each line of a listing to `show`."""
        for name, size in self.sizes.items():
            is_cut = name == RECIPE_NAME and name in self.rewritten
            show(f"  {size:>15,}  {name}" + " (without secrets and absolute paths)" * is_cut)
        show(f"  {sum(self.sizes.values()):>15,}  bytes in {len(self.sizes)} files")
        for name, reason in self.left_out.items():
            show(f"  {'left out':>15}  {name} ({reason})")


def select_files(folder: Path) -> Selection:
    """Select the files of the model, and those of a tokenizer below `target_tokenizer/`.

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
                selection.sizes[name] = path.stat().st_size
            elif name != TARGET_SUBFOLDER:
                reason = next(REASONS[pattern] for pattern in REASONS if fnmatch(path.name, pattern))
                selection.left_out[name + "/" * path.is_dir()] = reason
    if RECIPE_NAME in selection.sizes:
        # The folder's own recipe keeps its paths, which a resumed run needs.
        recipe = read_recipe(folder)
        shared = redact(recipe)
        if shared != recipe:
            selection.rewritten[RECIPE_NAME] = dump_yaml(shared).encode()
            selection.sizes[RECIPE_NAME] = len(selection.rewritten[RECIPE_NAME])
    return selection


def _code_files(folder: Path) -> list[str]:
    """Return the modules that the configs name, and the modules that these import from the folder."""
    modules = set()
    for name in ("config.json", "tokenizer_config.json"):
        if (fields := read_fields(folder / name)) is not None:
            mappings = [fields.get("auto_map") or {}, fields.get("custom_pipelines") or {}]
            entries = [entry for mapping in mappings if isinstance(mapping, dict) for entry in mapping.values()]
            for entry in entries:
                names = entry.get("impl") if isinstance(entry, dict) else entry
                names = names if isinstance(names, list) else [names]
                # A name with two hyphens is in another repository.
                modules |= {name.partition(".")[0] for name in names if isinstance(name, str) and "--" not in name}
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
    _check_tokenizers(folder)
    with contextlib.ExitStack() as files:
        weights = WeightFiles(folder, files)
        for name in weights.kinds:
            # Refuses values that are not finite.
            weights.read(name)
    # Opens the files that the card is made from.
    TrainedFolder(folder)
    fields = read_recipe(folder) or {}
    secrets = [name for name in SECRET_FIELDS if fields.get(name)]
    if secrets:
        raise ValueError(
            f"`{RECIPE_NAME}` must hold no secret before it is shared, got {', '.join(secrets)} in {folder / RECIPE_NAME}."
        )


def _check_tokenizers(folder: Path) -> None:
    settings = read_fields(folder / "tokenizer_config.json")
    # Code beside the model is not run here.
    if settings is None or "auto_map" in settings:
        return
    try:
        # A slow tokenizer may need a package that is not installed here.
        with contextlib.suppress(ImportError):
            TokenizerPair.from_pretrained(folder)
    except Exception as error:
        # transformers and tokenizers raise all kinds of errors for damaged files.
        text = " ".join(str(error).split())
        raise ValueError(f"`folder` must hold tokenizers that load, got {str(folder)!r}: {text}") from error


def upload(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    additional_files: Mapping[str, bytes] | None = None,
) -> str:
    """Create repository and branch if they are missing, and upload the selected files in one commit.

    Args:
        folder: Folder of the model.
        repo_id: Name on the Hub, user/name.
        commit_message: Message of the commit.
        private: True to create a private repository.
        revision: Branch; the default is main.
        token: Access token; the default is that of the environment.
        additional_files: Contents by name, from `endpoint_files`.

    Returns:
        The name of the repository and the id of the commit, with a space between.

    Raises:
        ValueError: If `private` is True and the repository is public.
        OSError: If the Hub refuses or cannot be reached.
    """
    selection = select_files(folder)
    selection.add(additional_files or {})
    selection.report(logger.info)
    api = HfApi(token=token)
    with naming_refusals(api, repo_id):
        repository = api.create_repo(repo_id, private=private or None, exist_ok=True)
        # The Hub does not change the visibility of an existing repository.
        if private and not api.model_info(repository.repo_id).private:
            raise ValueError(f"`private` must be left out for a repository that is public, got {repository.repo_id!r}.")
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repository.repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repository.repo_id,
            [CommitOperationAdd(name, selection.rewritten.get(name, folder / name)) for name in selection.sizes],
            commit_message=commit_message,
            revision=revision,
        )
    logger.info("See %s", commit.commit_url)
    return f"{repository.repo_id} {commit.oid}"


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
    except ConnectionError as error:
        text = str(error).rstrip(".")
        raise ConnectionError(f"{text}. Nothing was uploaded. Try again with a network.") from error


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
        raise ConnectionError(f"{api.endpoint} cannot be reached: {error or type(error).__name__}") from error


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
