"""`metaphrase push FOLDER USER/NAME`: upload a trained folder to the Hub, and nothing but the files of the model."""

import argparse
import logging
from dataclasses import asdict, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card import write_model_card
from metaphrase.hub_card.card import is_own_card, read_facts
from metaphrase.hub_card.upload import (
    CARD,
    check_access,
    check_folder,
    endpoint_files,
    select_files,
    space_files,
    upload,
)
from metaphrase.scripts.parsers import given_options

logger = logging.getLogger(__name__)

# Options of the command line that are fields of `Facts`.
CARD_OPTIONS = ("license", "base_model", "datasets")


def main(arguments: argparse.Namespace) -> None:
    folder, repo_id = Path(arguments.folder), arguments.repo_id
    validate_repo_id(repo_id)
    check_folder(folder)
    # A card by somebody else is kept.
    is_written = arguments.overwrite_card or not (folder / CARD).exists() or is_own_card(folder / CARD)
    options = given_options(arguments, CARD_OPTIONS)
    if options and not is_written:
        name, value = next(iter(options.items()))
        raise ValueError(
            f"`{name}` must come with --overwrite_card if Metaphrase did not write {CARD}, got {value!r} for {folder / CARD}."
        )
    facts = replace(read_facts(folder / CARD), **options)
    additional_files = endpoint_files(folder, facts) if arguments.endpoint_handler else {}
    space_id, space = name_space(arguments), {}
    if space_id is not None:
        space = space_files(folder, facts, repo_id, arguments.space_examples)
    if arguments.dry_run:
        kind, branch = "private " * arguments.private, arguments.revision or "main"
        print(f"Dry run: nothing is written or sent. {folder} -> {kind}{repo_id}, branch {branch}")
        selection = select_files(folder, additional_files)
        if is_written:
            selection.contents.pop(CARD, None)
            print(
                f"  {'will be written':>15}  {CARD} (model card, with a picture of the training curves if there is a log)"
            )
            for name, value in asdict(facts).items():
                if value:
                    text = value if isinstance(value, str) else ", ".join(map(str, value))
                    print(f"  {'':>15}  {name}: {' '.join(text.split())}")
        selection.report(print)
        if space_id is not None:
            print(f"Space {space_id}: {', '.join(space)}")
        return
    check_access(repo_id, arguments.token)
    if is_written:
        write_model_card(folder, facts, repo_id=repo_id, overwrite=arguments.overwrite_card)
    selection = select_files(folder, additional_files)
    selection.report(logger.info)
    options = {"private": arguments.private, "token": arguments.token}
    message = arguments.commit_message
    print(upload(selection.contents, repo_id, commit_message=message, revision=arguments.revision, **options))
    if space_id is not None:
        print(upload(space, space_id, commit_message="Write the page of the model", is_space=True, **options))
        if arguments.private:
            logger.info("The Space of a private model needs a token: set the secret HF_TOKEN in its settings.")


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
    return space_id
