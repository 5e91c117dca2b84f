"""`metaphrase push FOLDER USER/NAME`: upload a trained folder to the Hub, and nothing but the files of the model."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from metaphrase.hub_card import Facts, write_model_card
from metaphrase.hub_card.card import is_own_card, read_facts
from metaphrase.hub_card.upload import CARD, check_folder, check_repo_id, select_files, upload
from metaphrase.scripts.console import verb_parser
from metaphrase.scripts.options import given_options

logger = logging.getLogger(__name__)

# Options of the command line that are fields of `Facts`.
CARD_OPTIONS = ("license", "base_model", "datasets")


def writes_card(folder: Path, arguments: argparse.Namespace) -> bool:
    """Return True if the card is written to name the repository, and False if somebody else's card is kept."""
    return arguments.overwrite_card or not (folder / CARD).exists() or is_own_card(folder / CARD)


def card_facts(folder: Path, arguments: argparse.Namespace) -> Facts:
    """Return the facts of an earlier card, replaced by those of the command line.

    Raises:
        ValueError: If the command line has facts for a card that is not written.
    """
    options = given_options(arguments, CARD_OPTIONS)
    if options and not writes_card(folder, arguments):
        name, value = next(iter(options.items()))
        raise ValueError(
            f"`{name}` must come with --overwrite_card if Metaphrase did not write {CARD}, got {value!r} for {folder / CARD}."
        )
    return replace(read_facts(folder / CARD), **options)


def rehearse(folder: Path, arguments: argparse.Namespace, facts: Facts) -> None:
    """Print what would be done. Folder and Hub do not change."""
    selection = select_files(folder)
    kind = "private " if arguments.private else ""
    print(f"Dry run: nothing is written or sent. {folder} -> {kind}{arguments.repo_id}, {arguments.revision or 'main'}")
    if writes_card(folder, arguments):
        selection.sizes.pop(CARD, None)
        print(f"  {'written first':>15}  {CARD} (model card, with a picture of the training curves if there is a log)")
        for name, value in asdict(facts).items():
            if value:
                text = value if isinstance(value, str) else ", ".join(map(str, value))
                print(f"  {'':>15}  {name}: {' '.join(text.split())}")
    selection.report(print)


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "push",
        "Upload a trained folder to the Hub: model, code, tokenizers, card, licence, recipe, scores and "
        "predictions, and no other files. Absolute paths in the recipe are cut to their last part.",
    )
    parser.add_argument("folder", help="folder with a trained model")
    parser.add_argument("repo_id", help="user/name or organization/name; created if it does not exist")
    parser.add_argument(
        "--private", action="store_true", help="create a private repository; an existing public one is an error"
    )
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="only list what would be uploaded, offline")
    parser.add_argument("--commit_message", default="Upload the model", metavar="TEXT", help="[%(default)s]")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to, created if it does not exist [main]")
    parser.add_argument("--token", help="access token [HF_TOKEN, or that of `hf auth login`]")
    parser.add_argument("--overwrite_card", action="store_true", help="replace your own README.md by a model card")
    parser.add_argument("--license", metavar="NAME", help="licence of the weights for the card, such as apache-2.0")
    parser.add_argument("--base_model", metavar="NAME", help="model that this one was fine-tuned from, for the card")
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help="training data, for the card")
    arguments = parser.parse_args(words)
    check_repo_id(arguments.repo_id)
    if not arguments.commit_message.strip():
        raise ValueError(f"`commit_message` must not be empty, got {arguments.commit_message!r}.")
    folder = Path(arguments.folder)
    check_folder(folder)
    facts = card_facts(folder, arguments)
    if arguments.dry_run:
        rehearse(folder, arguments, facts)
        return
    if writes_card(folder, arguments):
        path = write_model_card(folder, facts, repo_id=arguments.repo_id, overwrite=arguments.overwrite_card)
        logger.info("Wrote %s", path)
    names = ("commit_message", "private", "revision", "token")
    print(upload(folder, arguments.repo_id, **{name: getattr(arguments, name) for name in names}))
