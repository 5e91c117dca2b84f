"""`metaphrase tokenize --files F ... --output DIR`: train a tokenizer, or one for each side."""

import argparse
import functools
import logging
from pathlib import Path

from metaphrase.errors import MetaphraseError
from metaphrase.storage.folders import check_output, folder_in_one_step, write_provenance
from metaphrase.tokenization import TokenizerPair, iterate_lines

logger = logging.getLogger(__name__)

# Names the files that this subcommand has written. A folder with this file may be overwritten.
PROVENANCE_NAME = "tokenization.json"


def main(arguments: argparse.Namespace) -> None:
    has_files = [files is not None for files in (arguments.files, arguments.source_files, arguments.target_files)]
    is_separate = has_files == [False, True, True]
    if not is_separate and has_files != [True, False, False]:
        raise MetaphraseError("Either `--files`, or both `--source_files` and `--target_files`, must be given.")
    sides = (arguments.source_files, arguments.target_files) if is_separate else (arguments.files, ())
    inputs, output = [Path(path) for side in sides for path in side], Path(arguments.output)
    check = functools.partial(check_output, output, inputs, arguments.overwrite, PROVENANCE_NAME, "read")
    check()
    names = ["kind", "target_kind", "vocab_size", "min_frequency", "normalization", "lowercase", "joiner"]
    options = {name: getattr(arguments, name) for name in (*names, "additional_special_tokens")}
    read = functools.partial(iterate_lines, max_line_characters=arguments.max_line_characters)
    pair = TokenizerPair.train(*map(read, sides), joint=not is_separate, **options)
    with folder_in_one_step(output, check) as partial:
        pair.save_pretrained(partial)
        write_provenance(partial / PROVENANCE_NAME)
    for side, tokenizer in (("source", pair.source), ("target", pair.target))[: 2 if is_separate else 1]:
        logger.info("%s: %d entries", side if is_separate else "both sides", len(tokenizer))
    logger.info("Written to %s", arguments.output)
