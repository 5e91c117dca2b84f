"""`metaphrase push FOLDER USER/NAME`: upload a trained folder to the Hub, and nothing but the files of the model."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card import Facts, write_model_card
from metaphrase.hub_card.card import is_own_card, read_facts
from metaphrase.hub_card.upload import CARD, check_access, check_folder, select_files, upload
from metaphrase.scripts.options import given_options
from metaphrase.scripts.parsers import parse

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
    print(
        f"Dry run: nothing is written or sent. {folder} -> {kind}{arguments.repo_id}, branch {arguments.revision or 'main'}"
    )
    if writes_card(folder, arguments):
        selection.sizes.pop(CARD, None)
        print(
            f"  {'will be written':>15}  {CARD} (model card, with a picture of the training curves if there is a log)"
        )
        for name, value in asdict(facts).items():
            if value:
                text = value if isinstance(value, str) else ", ".join(map(str, value))
                print(f"  {'':>15}  {name}: {' '.join(text.split())}")
    selection.report(print)


def main(words: Sequence[str]) -> None:
    arguments, _ = parse("push", words)
    validate_repo_id(arguments.repo_id)
    if not arguments.commit_message.strip():
        raise ValueError(f"`commit_message` must not be empty, got {arguments.commit_message!r}.")
    folder = Path(arguments.folder)
    check_folder(folder)
    facts = card_facts(folder, arguments)
    if arguments.dry_run:
        rehearse(folder, arguments, facts)
        return
    check_access(arguments.repo_id, arguments.token)
    if writes_card(folder, arguments):
        path = write_model_card(folder, facts, repo_id=arguments.repo_id, overwrite=arguments.overwrite_card)
        logger.info("Wrote %s", path)
    names = ("commit_message", "private", "revision", "token")
    print(upload(folder, arguments.repo_id, **{name: getattr(arguments, name) for name in names}))
