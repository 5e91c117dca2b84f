"""Upload of the shared files of a trained folder in one commit."""

import contextlib
import glob
import logging
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from metaphrase.errors import MetaphraseError
from metaphrase.hub_card.card import FIGURE_NAME, SECRET_FIELDS, TrainedFolder, read_recipe, redact
from metaphrase.storage.folders import EXPORT_NAME, VOCABULARY_MAP_NAME, read_fields, refuse_outer_links
from metaphrase.storage.loading import check_model_folder
from metaphrase.storage.weight_files import WeightFiles, weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER, TokenizerPair
from metaphrase.training.checkpoints import PROVENANCE_NAME, RECIPE_NAME
from metaphrase.training.recipe.recipe import dump_yaml

logger = logging.getLogger(__name__)

CARD = "README.md"
# Files of fast tokenizers, then of vocabularies, of SentencePiece and single families, and of chat templates.
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
TOKENIZER_FILES += ["vocab.json", "vocab.txt", "merges.txt", "target_vocab.json", "vocab-src.json", "vocab-tgt.json"]
TOKENIZER_FILES += ["*.spm", "spiece.model", "spm.model", "tokenizer.model", "sentencepiece*.model"]
TOKENIZER_FILES += ["bpe.codes", "dict.txt", "prophetnet.tokenizer", "*.jinja"]
SCORE_FILES = ("metrics.json", "data_report.json", "test_predictions.txt", "validation_predictions.txt", FIGURE_NAME)
# The licence of a converted model must stay with it.
MODEL_FILES = ["config.json", "generation_config.json", VOCABULARY_MAP_NAME, "LICENSE*", "NOTICE*"]
MODEL_FILES += [CARD, RECIPE_NAME, PROVENANCE_NAME, *SCORE_FILES, *TOKENIZER_FILES]


# Files by their names in the repository: a path, or bytes in place of the file.
Contents = dict[str, Path | bytes]


def list_files(contents: Contents, left_out: Sequence[str], show: Callable[[str], object]) -> None:
    """Pass each line of a listing to `show`."""
    total = 0
    for name, content in contents.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        total += size
        note = " (without secrets and absolute paths)" if isinstance(content, bytes) else ""
        show(f"  {size:>15,}  {name}{note}")
    show(f"  {total:>15,}  bytes in {len(contents)} files")
    for name in left_out:
        show(f"  {'left out':>15}  {name}")


def web_files(folder: Path) -> list[str] | None:
    """Return the names of the files of an export for browsers, or None for another folder."""
    provenance = read_fields(folder / EXPORT_NAME) or {}
    return sorted(provenance["files"]) if provenance.get("to") == "web" else None


def select_files(folder: Path) -> tuple[Contents, list[str]]:
    """Return the files of the model, and of a tokenizer below `target_tokenizer/`, and the names of all that is left out.

    Of an export for browsers, select all but the copy of transformers.js, which a repository of a model does not need.
    """
    contents: Contents = {}
    left_out = []
    if (names := web_files(folder)) is not None:
        contents |= {name: folder / name for name in names if not name.startswith("library/")}
        refuse_outer_links(folder, [folder / name for name in contents], "folder")
        return contents, ["library/"] if len(contents) < len(names) else []
    weights = weight_names(folder)
    index = [] if weights in ([], [SAFE_WEIGHTS_NAME]) else [SAFE_WEIGHTS_INDEX_NAME]
    names = [*weights, *index, *_code_files(folder)]
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    # `curve.png` must not match in `training_curve.png`.
    names += [path.name for path in folder.glob("*.png") if re.search(rf"(?<![\w.%-]){re.escape(path.name)}", card)]
    model_files = (*MODEL_FILES, *map(glob.escape, names))
    for directory, patterns in ((folder, model_files), (folder / TARGET_SUBFOLDER, TOKENIZER_FILES)):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            is_hidden = path.name.startswith(".")
            if path.is_file() and not is_hidden and any(fnmatch(path.name, pattern) for pattern in patterns):
                refuse_outer_links(folder, [path], "folder")
                contents[name] = path
            elif name != TARGET_SUBFOLDER:
                left_out.append(name + "/" * path.is_dir())
    # The folder's own recipe keeps its paths, which a resumed run needs.
    recipe = read_recipe(folder)
    if (shared := redact(recipe)) != recipe:
        contents[RECIPE_NAME] = dump_yaml(shared).encode()
    return contents, left_out


def _code_files(folder: Path) -> list[str]:
    """Return the modules that the configs name, and the modules that these import from the folder."""
    names: list[str | None] = []
    for file in ("config.json", "tokenizer_config.json"):
        for classes in ((read_fields(folder / file) or {}).get("auto_map") or {}).values():
            # A tokenizer has two classes, of which one may be None.
            names += classes if isinstance(classes, list) else [classes]
    # A name with two hyphens is in another repository, and so is its file.
    paths = {path for name in names if (path := folder / f"{str(name).partition('.')[0]}.py").is_file()}
    imported = {Path(path) for module in paths for path in get_relative_import_files(module)}
    return sorted(path.name for path in paths | imported)


def check_folder(folder: Path) -> None:
    """Check that a folder holds a complete model that loads, and no secret."""
    check_model_folder(folder)
    exported = web_files(folder)
    names = ["config.json", *(weight_names(folder) or [SAFE_WEIGHTS_NAME])] if exported is None else exported
    if missing := [name for name in names if not (folder / name).is_file()]:
        kind = "model" if exported is None else "export"
        raise MetaphraseError(f"`folder` must hold a whole {kind}, got {str(folder)!r} without {', '.join(missing)}.")
    if exported is not None:
        return
    # Opens the files that the card is made from.
    recipe = TrainedFolder(folder).recipe or {}
    settings = read_fields(folder / "tokenizer_config.json")
    # Code beside the model is not run here. A slow tokenizer may need a package that is not installed here.
    if settings is not None and "auto_map" not in settings:
        with contextlib.suppress(ImportError):
            TokenizerPair.from_pretrained(folder)
    with contextlib.ExitStack() as files:
        weights = WeightFiles(folder, files)
        for name in weights.kinds:
            # Refuses values that are not finite.
            weights.read(name)
    if secrets := [name for name in SECRET_FIELDS if recipe.get(name)]:
        raise MetaphraseError(f"`{RECIPE_NAME}` must hold no secret, got {', '.join(secrets)} in {str(folder)!r}.")


def upload(
    contents: Contents, repo_id: str, *, commit_message: str, private: bool, revision: str | None, token: str | None
) -> str:
    """Create repository and branch if they are missing, and upload files in one commit.

    Returns:
        The name of the repository and the id of the commit, with a space between.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
    # The Hub does not change the visibility of an existing repository.
    if private and not api.repo_info(repo_id).private:
        raise MetaphraseError(f"`private` must be left out for a repository that is public, got {repo_id!r}.")
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    logger.info("See %s", commit.commit_url)
    return f"{repo_id} {commit.oid}"
