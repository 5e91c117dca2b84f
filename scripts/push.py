"""`metaphrase push FOLDER USER/NAME`: upload a trained folder to the Hub, and nothing but the files of the model."""

import argparse
import logging
from dataclasses import asdict, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from metaphrase.hub_card import write_model_card
from metaphrase.hub_card.card import is_own_card, read_facts
from metaphrase.hub_card.upload import CARD, check_access, check_folder, select_files, upload, web_files
from metaphrase.scripts.parsers import given_options

logger = logging.getLogger(__name__)

# Options of the command line that are fields of `Facts`.
CARD_OPTIONS = ("license", "base_model", "datasets")


def main(arguments: argparse.Namespace) -> None:
    folder, repo_id = Path(arguments.folder), arguments.repo_id
    validate_repo_id(repo_id)
    check_folder(folder)
    options = given_options(arguments, CARD_OPTIONS)
    # A card by somebody else is kept, and so is that of an export for browsers.
    is_written = arguments.overwrite_card or not (folder / CARD).exists() or is_own_card(folder / CARD)
    if web_files(folder) is not None:
        if arguments.overwrite_card or options:
            name = next(iter(options), "overwrite_card")
            raise ValueError(
                f"`{name}` must be left out for an export for browsers, got {folder}. Edit its {CARD} yourself."
            )
        is_written = False
    if options and not is_written:
        name, value = next(iter(options.items()))
        raise ValueError(
            f"`{name}` must come with --overwrite_card if Metaphrase did not write {CARD}, got {value!r} for {folder / CARD}."
        )
    facts = replace(read_facts(folder / CARD), **options)
    if arguments.dry_run:
        kind, branch = "private " * arguments.private, arguments.revision or "main"
        print(f"Dry run: nothing is written or sent. {folder} -> {kind}{repo_id}, branch {branch}")
        selection = select_files(folder)
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
        return
    check_access(repo_id, arguments.token)
    if is_written:
        write_model_card(folder, facts, repo_id=repo_id, overwrite=arguments.overwrite_card)
    selection = select_files(folder)
    selection.report(logger.info)
    print(
        upload(
            selection.contents,
            repo_id,
            commit_message=arguments.commit_message,
            private=arguments.private,
            revision=arguments.revision,
            token=arguments.token,
        )
    )
