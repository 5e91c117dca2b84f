"""`metaphrase push FOLDER USER/NAME`: shares a trained folder on the Hub; only what belongs to the model leaves the machine."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import glob
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from metaphrase.hub_card import write_model_card
from metaphrase.hub_card.card import FIGURE_NAME, earlier_arguments, is_own_card
from metaphrase.hub_card.facts import SECRET_FIELDS, count_parameters, read_mapping, read_recipe, without_machine_path
from metaphrase.scripts.console import run
from metaphrase.storage.weight_files import weight_names
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training.checkpointing.averaging import PROVENANCE_NAME, RECIPE_NAME
from metaphrase.training.recipe.parsing import dump_yaml

logger = logging.getLogger(__name__)

CARD = "README.md"
# What the command line can say of the card, by the names of `write_model_card`.
CARD_OPTIONS = ("license", "base_model", "datasets")
# Names that tokenizers are saved under; the last lines are those of SentencePiece, of families' own kinds, and of templates.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "vocab.txt", "merges.txt", "target_vocab.json", "vocab-src.json", "vocab-tgt.json")
TOKENIZER_FILES += (
    "*.spm",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "bpe.codes",
    "dict.txt",
    "sentencepiece*.model",
    "prophetnet.tokenizer",
    "*.jinja",
)
SCORE_FILES = ("metrics.json", "data_report.json", "test_predictions.txt", "validation_predictions.txt", FIGURE_NAME)
# The terms of a model that was converted come with it, and must go on with it.
MODEL_FILES = ("config.json", "generation_config.json", "LICENSE*", "NOTICE*")
MODEL_FILES += (CARD, RECIPE_NAME, PROVENANCE_NAME, *SCORE_FILES, *TOKENIZER_FILES)
# Why a file or folder stays here; the first pattern that fits decides.
REASONS = {
    ".*": "hidden",
    "checkpoint-*": "a checkpoint of the training run",
    "runs": "logs of the training run",
    "*.bin": "not safetensors: can run code when it is loaded",
    "*.pt": "not safetensors: can run code when it is loaded",
    "*.pth": "not safetensors: can run code when it is loaded",
    "*.pkl": "not safetensors: can run code when it is loaded",
    "exponential_average.safetensors": "a state of the training run",
    "trainer_state.json": "a state of the training run",
    "*.py": "not code of the model",
    "*.png": "not a picture of the card",
    "*": "not a file of the model",
}


@dataclass
class Selection:
    """What of a folder is shared.

    Attributes:
        sizes: Bytes of each file that goes up, by its path in the folder.
        rewritten: What goes up in place of a file that says more of this machine than others need to know.
        left_out: The reason for each file or folder that stays.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    rewritten: dict[str, bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase push",
        description="Uploads a trained folder to the Hub: the model, its code, tokenizers, card, licence, recipe, scores "
        "and predictions, nothing else. Absolute paths in the recipe are cut to their last part.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="folder with a trained model")
    parser.add_argument("repo_id", help="user/name or organization/name; it is created if it does not exist")
    parser.add_argument(
        "--private", action="store_true", help="create it so that only its owners see it; one that is public is refused"
    )
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="only say what would be done, offline")
    parser.add_argument("--commit_message", default="Upload the model", metavar="TEXT", help="[%(default)s]")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to, created if it does not exist [main]")
    parser.add_argument("--token", help="access token; by default HF_TOKEN or that of `hf auth login`")
    parser.add_argument(
        "--overwrite_card", action="store_true", help="write a model card in place of a README.md of your own"
    )
    parser.add_argument("--license", metavar="NAME", help="of the weights, for the card, such as apache-2.0")
    parser.add_argument("--base_model", metavar="NAME", help="what this one was fine-tuned from, for the card")
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help="what it was trained on, for the card")
    return parser


def select_files(folder: Path) -> Selection:
    """Chooses what is shared: files of a model at the top and, below `target_tokenizer/`, files of a tokenizer."""
    selection = Selection()
    weights = weight_names(folder)
    index = [] if weights in ([], [SAFE_WEIGHTS_NAME]) else [SAFE_WEIGHTS_INDEX_NAME]
    own = (*MODEL_FILES, *map(glob.escape, [*weights, *index, *code_files(folder), *card_pictures(folder)]))
    for directory, patterns in ((folder, own), (folder / TARGET_SUBFOLDER, TOKENIZER_FILES)):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            is_hidden = path.name.startswith(".")
            if path.is_file() and not is_hidden and any(fnmatch(path.name, pattern) for pattern in patterns):
                selection.sizes[name] = path.stat().st_size
            elif name != TARGET_SUBFOLDER:
                reason = next(REASONS[pattern] for pattern in REASONS if fnmatch(path.name, pattern))
                selection.left_out[name + "/" * path.is_dir()] = reason
    if RECIPE_NAME in selection.sizes and (recipe := recipe_to_share(folder)) is not None:
        selection.rewritten[RECIPE_NAME], selection.sizes[RECIPE_NAME] = recipe, len(recipe)
    return selection


def recipe_to_share(folder: Path) -> bytes | None:
    """The recipe with absolute paths cut to their last part; None where it has none and can go up as it is.

    The folder's own keeps them: the run goes on from it, and needs its files.

    Raises:
        ValueError: If the recipe cannot be read.
    """
    recipe = read_recipe(folder)
    shared = without_machine_path(recipe)
    return None if shared == recipe else dump_yaml(shared).encode()


def code_files(folder: Path) -> list[str]:
    """The modules that the configurations name, and those that these import from the folder.

    Raises:
        ValueError: If a configuration cannot be read.
    """
    modules = set()
    for name in ("config.json", "tokenizer_config.json"):
        if (fields := read_mapping(folder / name)) is not None:
            places = [fields.get("auto_map") or {}, fields.get("custom_pipelines") or {}]
            entries = [entry for place in places if isinstance(place, dict) for entry in place.values()]
            for entry in entries:
                names = entry.get("impl") if isinstance(entry, dict) else entry
                names = names if isinstance(names, list) else [names]
                # With two hyphens it is in another repository.
                modules |= {each.partition(".")[0] for each in names if isinstance(each, str) and "--" not in each}
    found = [folder / f"{module}.py" for module in modules if (folder / f"{module}.py").is_file()]
    needed = [*found, *(Path(path) for module in found for path in get_relative_import_files(module))]
    return sorted({path.name for path in needed})


def card_pictures(folder: Path) -> list[str]:
    """The pictures that the card shows."""
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""

    def is_shown(name: str) -> bool:
        # A name is also the end of longer ones: curve.png of training_curve.png.
        return re.search(rf"(?<![\w.%-]){re.escape(name)}(?![\w-])", card) is not None

    return [path.name for path in folder.glob("*.png") if is_shown(path.name)]


def check_folder(folder: Path) -> None:
    """Makes sure that a folder holds a whole model and no secret.

    Raises:
        ValueError: If there is no `config.json`, or no weights in safetensors, or these are not whole, or the recipe cannot be
            read or holds a secret.
    """
    if not folder.is_dir():
        raise ValueError(f"`folder` must be an existing folder, got {str(folder)!r}.")
    needed = ["config.json", *(weight_names(folder) or [SAFE_WEIGHTS_NAME])]
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise ValueError(f"`folder` must hold a whole model, but {', '.join(missing)} is missing in {str(folder)!r}.")
    # Opens them all.
    count_parameters(folder)
    fields = read_recipe(folder) or {}
    secrets = [name for name in SECRET_FIELDS if fields.get(name)]
    if secrets:
        raise ValueError(
            f"`{RECIPE_NAME}` must hold no secret before it is shared, got {', '.join(secrets)} in {folder / RECIPE_NAME}."
        )


def check_repo_id(repo_id: str) -> None:
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"`repo_id` must be user/name or organization/name, got {repo_id!r}.")


def report(selection: Selection, show) -> None:
    for name, size in selection.sizes.items():
        show(f"  {size:>15,}  {name}" + " (absolute paths cut to their last part)" * (name in selection.rewritten))
    show(f"  {sum(selection.sizes.values()):>15,}  bytes in {len(selection.sizes)} files")
    for name, reason in selection.left_out.items():
        show(f"  {'left out':>15}  {name} ({reason})")


def writes_card(folder: Path, arguments: argparse.Namespace) -> bool:
    """Whether the card is written anew, to name the repository: unless somebody else's words are in its place."""
    return arguments.overwrite_card or not (folder / CARD).exists() or is_own_card(folder / CARD)


def card_arguments(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the card is written with: what an earlier one of ours was given, unless the command line says otherwise.

    Raises:
        ValueError: If the command line says something for a card that is not written.
    """
    given = {name: getattr(arguments, name) for name in CARD_OPTIONS if getattr(arguments, name) is not None}
    if given and not writes_card(folder, arguments):
        name, value = next(iter(given.items()))
        raise ValueError(
            f"`{name}` must come with --overwrite_card where {CARD} is of another hand, got {value!r} for {folder / CARD}."
        )
    return earlier_arguments(folder / CARD) | given


def rehearse(folder: Path, arguments: argparse.Namespace, card: dict[str, Any]) -> None:
    """Prints what would be done, with the card written from these arguments; neither the folder nor the Hub changes."""
    selection = select_files(folder)
    kind = "private " if arguments.private else ""
    print(f"Dry run: nothing is written or sent. {folder} -> {kind}{arguments.repo_id}, {arguments.revision or 'main'}")
    if writes_card(folder, arguments):
        selection.sizes.pop(CARD, None)
        print(f"  {'written first':>15}  {CARD} (model card, perhaps with a picture of the training curves)")
        for name, value in card.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            print(f"  {'':>15}  {name}: {' '.join(text.split())}")
    report(selection, print)


def upload(folder: Path, arguments: argparse.Namespace) -> None:
    """Creates the repository and the branch where they are missing, and uploads in one commit.

    Raises:
        ValueError: If it is to be private, and is there and public.
        OSError: If the Hub refuses, or cannot be reached.
    """
    selection = select_files(folder)
    report(selection, logger.info)
    api = HfApi(token=arguments.token)
    try:
        repository = api.create_repo(arguments.repo_id, private=arguments.private or None, exist_ok=True)
        # The Hub leaves a repository that is there as visible as it was.
        if arguments.private and not api.model_info(repository.repo_id).private:
            raise ValueError(f"`private` must be left out for a repository that is public, got {repository.repo_id!r}.")
        if arguments.revision is not None and not arguments.revision.startswith("refs/"):
            api.create_branch(repository.repo_id, branch=arguments.revision, exist_ok=True)
        commit = api.create_commit(
            repository.repo_id,
            # What was reported is what is sent.
            [CommitOperationAdd(name, selection.rewritten.get(name, folder / name)) for name in selection.sizes],
            commit_message=arguments.commit_message,
            revision=arguments.revision,
        )
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise PermissionError(
                f"The Hub does not let you write to {arguments.repo_id!r}: log in with `hf auth login`, or give a token "
                f"that may write, by HF_TOKEN or --token. It says: {error}"
            ) from error
        raise
    except HTTPError as error:
        raise ConnectionError(f"{api.endpoint} cannot be reached: {error or type(error).__name__}") from error
    print(f"{repository.repo_id} {commit.oid}")
    logger.info("See %s", commit.commit_url)


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    check_repo_id(arguments.repo_id)
    if not arguments.commit_message.strip():
        raise ValueError(f"`commit_message` must not be empty, got {arguments.commit_message!r}.")
    folder = Path(arguments.folder)
    check_folder(folder)
    card = card_arguments(folder, arguments)
    if arguments.dry_run:
        rehearse(folder, arguments, card)
        return
    if writes_card(folder, arguments):
        path = write_model_card(folder, repo_id=arguments.repo_id, overwrite=arguments.overwrite_card, **card)
        logger.info("Wrote %s", path)
    upload(folder, arguments)


if __name__ == "__main__":
    sys.exit(run(main, "push"))
