"""`metaphrase push FOLDER USER/NAME`: upload a trained folder to the Hub, and nothing but the files of the model."""

import argparse
import logging
from dataclasses import asdict, replace
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id

from metaphrase.errors import MetaphraseError
from metaphrase.hub_card import write_model_card
from metaphrase.hub_card.card import is_own_card, read_facts
from metaphrase.hub_card.upload import CARD, check_folder, list_files, select_files, upload, web_files
from metaphrase.scripts.parsers import given_options

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    folder, repo_id = Path(arguments.folder), arguments.repo_id
    validate_repo_id(repo_id)
    check_folder(folder)
    # Fields of `Facts`.
    options = given_options(arguments, ("license", "base_model", "datasets"))
    card_options = [*options, "overwrite_card"] if arguments.overwrite_card else [*options]
    is_web = web_files(folder) is not None
    # A card by somebody else is kept, and so is that of an export for browsers.
    is_written = not is_web and (arguments.overwrite_card or not (folder / CARD).exists() or is_own_card(folder / CARD))
    if card_options and not is_written:
        way = f"Edit its {CARD} yourself" if is_web else "Pass --overwrite_card to replace it"
        raise MetaphraseError(f"`{card_options[0]}` must be left out for another {CARD}, got {folder}. {way}.")
    facts = replace(read_facts(folder / CARD), **options)
    if arguments.dry_run:
        kind, branch = "private " * arguments.private, arguments.revision or "main"
        print(f"Dry run: nothing is written or sent. {folder} -> {kind}{repo_id}, branch {branch}")
        contents, left_out = select_files(folder)
        if is_written:
            contents.pop(CARD, None)
            print(f"  {'will be written':>15}  {CARD} (model card, with training curves if there is a log)")
            for name, value in asdict(facts).items():
                if value:
                    text = value if isinstance(value, str) else ", ".join(map(str, value))
                    print(f"  {'':>15}  {name}: {' '.join(text.split())}")
        list_files(contents, left_out, print)
        return
    # The Hub can be reached and knows the token.
    HfApi(token=arguments.token).whoami()
    if is_written:
        write_model_card(folder, facts, repo_id=repo_id, overwrite=arguments.overwrite_card)
    contents, left_out = select_files(folder)
    list_files(contents, left_out, logger.info)
    names = ("commit_message", "private", "revision", "token")
    print(upload(contents, repo_id, **{name: getattr(arguments, name) for name in names}))
