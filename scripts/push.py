"""`metaphrase push FOLDER USER/NAME`: upload a trained folder to the Hub, and nothing but the files of the model."""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card import Facts, write_model_card
from metaphrase.hub_card.card import is_own_card, read_facts
from metaphrase.hub_card.upload import (
    CARD,
    check_access,
    check_folder,
    endpoint_files,
    select_files,
    space_files,
    upload,
    upload_space,
)
from metaphrase.scripts.parsers import given_options

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


def name_space(arguments: argparse.Namespace) -> str | None:
    """Return the name of the Space, or `None` without one.

    Raises:
        ValueError: If the name is not valid, or the options of the Space cannot go together.
    """
    if arguments.space is None:
        if arguments.space_examples:
            raise ValueError(f"`space_examples` must come with --space, got {arguments.space_examples[0]!r} alone.")
        return None
    if arguments.revision is not None:
        raise ValueError(
            f"`revision` must be left out with --space, which loads the main branch, got {arguments.revision!r}."
        )
    space_id = arguments.space or f"{arguments.repo_id}-space"
    validate_repo_id(space_id)
    if "/" not in space_id:
        raise ValueError(f"`space` must be user/name or organization/name, got {space_id!r}.")
    return space_id


def rehearse(
    folder: Path,
    arguments: argparse.Namespace,
    facts: Facts,
    additional_files: Mapping[str, bytes],
    space: tuple[str, Mapping[str, bytes]] | None,
) -> None:
    """Print what would be done. Folder and Hub do not change."""
    selection = select_files(folder)
    selection.add(additional_files)
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
    if space is not None:
        print(f"Space {space[0]}: {', '.join(space[1])}")


def main(arguments: argparse.Namespace) -> None:
    validate_repo_id(arguments.repo_id)
    if not arguments.commit_message.strip():
        raise ValueError(f"`commit_message` must not be empty, got {arguments.commit_message!r}.")
    folder = Path(arguments.folder)
    check_folder(folder)
    facts, space_id = card_facts(folder, arguments), name_space(arguments)
    additional_files = endpoint_files(folder, facts) if arguments.endpoint_handler else {}
    space = None
    if space_id is not None:
        space = space_id, space_files(folder, facts, arguments.repo_id, arguments.space_examples)
    if arguments.dry_run:
        rehearse(folder, arguments, facts, additional_files, space)
        return
    check_access(arguments.repo_id, arguments.token)
    if writes_card(folder, arguments):
        path = write_model_card(folder, facts, repo_id=arguments.repo_id, overwrite=arguments.overwrite_card)
        logger.info("Wrote %s", path)
    options = {name: getattr(arguments, name) for name in ("commit_message", "private", "token")}
    print(upload(folder, arguments.repo_id, revision=arguments.revision, additional_files=additional_files, **options))
    if space is not None:
        space_id, files = space
        print(upload_space(files, space_id, **options | {"commit_message": "Write the page of the model"}))
