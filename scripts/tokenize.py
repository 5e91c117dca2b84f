"""`metaphrase tokenize --files F ... --output DIR`: train a tokenizer, or one for each side."""

import argparse
import functools
import logging
from pathlib import Path

from metaphrase.storage.folders import folder_in_one_step, restore_replaced
from metaphrase.tokenization import TokenizerPair, iterate_lines

logger = logging.getLogger(__name__)

# Files that `TokenizerPair.save_pretrained` writes with any version of transformers.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "target_tokenizer")


def check_output(output: Path, overwrite: bool) -> None:
    """Check that the folder is new, or holds only a tokenizer to overwrite. A model's tokenizer is never overwritten.

    Raises:
        ValueError: If the folder cannot be written.
    """
    restore_replaced(output)
    names = sorted(path.name for path in output.rglob("*"))
    if other_names := [name for name in names if name not in TOKENIZER_FILES]:
        raise ValueError(
            f"`output` must be a new folder, or hold a tokenizer alone, got {output} with {other_names[0]}. "
            "Choose another folder."
        )
    if output.is_file() or (names and not overwrite):
        raise ValueError(f"`output` must not exist, got {output}. Pass --overwrite to replace a tokenizer.")


def main(arguments: argparse.Namespace) -> None:
    has_files = [files is not None for files in (arguments.files, arguments.source_files, arguments.target_files)]
    is_separate = has_files == [False, True, True]
    if not is_separate and has_files != [True, False, False]:
        raise ValueError("Either `--files`, or both `--source_files` and `--target_files`, must be given.")
    output = Path(arguments.output)
    check = functools.partial(check_output, output, arguments.overwrite)
    check()
    names = ("kind", "target_kind", "vocab_size", "min_frequency", "normalization", "lowercase", "joiner")
    names += ("additional_special_tokens",)
    options = {name: getattr(arguments, name) for name in names}
    read = functools.partial(iterate_lines, max_line_characters=arguments.max_line_characters)
    sides = (arguments.source_files, arguments.target_files) if is_separate else (arguments.files, ())
    pair = TokenizerPair.train(*map(read, sides), joint=not is_separate, **options)
    with folder_in_one_step(output, check) as partial:
        pair.save_pretrained(partial)
    for side, tokenizer in (("source", pair.source), ("target", pair.target))[: 2 if is_separate else 1]:
        logger.info("%s: %d entries", side if is_separate else "both sides", len(tokenizer))
    logger.info("Written to %s", arguments.output)
