"""`metaphrase tokenize --files F ... --output DIR`: train a tokenizer, or one for each side."""

import collections
import logging
from collections.abc import Sequence
from pathlib import Path

from metaphrase.inference.line_files import check_files
from metaphrase.scripts.console import verb_parser
from metaphrase.storage.folders import folder_in_one_step
from metaphrase.tokenization import TOKENIZER_KINDS, TokenizerPair, iterate_lines
from metaphrase.tokenization.tokenizer_settings import DEFAULT_VOCAB_SIZE, KINDS_THAT_FILL_A_VOCABULARY

logger = logging.getLogger(__name__)

# Files that `TokenizerPair.save_pretrained` writes with any version of transformers.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "target_tokenizer")


def check_output(output: Path, overwrite: bool) -> None:
    """Check that the folder is new, or holds only a tokenizer to overwrite. A model's tokenizer is never overwritten.

    Raises:
        ValueError: If the folder cannot be written.
    """
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` must be a folder, got the file {output}.")
    if other_names := [name for name in names if name not in TOKENIZER_FILES]:
        raise ValueError(
            f"`output` must be a new folder, or hold a tokenizer alone, got {output} with {other_names[0]}. "
            "Choose another folder."
        )
    if names and not overwrite:
        raise ValueError(f"`output` must not hold a tokenizer, got {output}. Pass --overwrite to replace it.")


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "tokenize", "Train a tokenizer for AutoTokenizer on text files (.gz or not) with one text in each line."
    )
    parser.add_argument("--files", nargs="+", metavar="FILE", help="texts for a joint tokenizer of both sides")
    parser.add_argument("--source_files", nargs="+", metavar="FILE", help="texts for a separate source tokenizer")
    parser.add_argument("--target_files", nargs="+", metavar="FILE", help="texts for a separate target tokenizer")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--kind", default="byte_bpe", help=f"one of {', '.join(TOKENIZER_KINDS)} [%(default)s]")
    parser.add_argument("--target_kind", help="kind of a separate target tokenizer, if different")
    parser.add_argument(
        "--vocab_size",
        type=int,
        help=f"maximum entries, special tokens included [{DEFAULT_VOCAB_SIZE} for "
        f"{', '.join(KINDS_THAT_FILL_A_VOCABULARY)}; else no limit]",
    )
    parser.add_argument("--min_frequency", type=int, help="minimum number of occurrences of a learned piece")
    parser.add_argument("--normalization", help="Unicode normalization, nfc, nfd, nfkc or nfkd [none]")
    parser.add_argument("--lowercase", action="store_true", help="lowercase all text")
    parser.add_argument("--joiner", help="for pretokenized: mark at the end of a piece inside a word [@@]")
    parser.add_argument(
        "--additional_special_tokens", nargs="+", default=[], metavar="TOKEN", help="such as language codes"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    arguments = parser.parse_args(words)
    has_files = [files is not None for files in (arguments.files, arguments.source_files, arguments.target_files)]
    is_separate = has_files == [False, True, True]
    if not is_separate and has_files != [True, False, False]:
        raise ValueError("Either `--files`, or both `--source_files` and `--target_files`, must be given.")
    output = Path(arguments.output)
    check_output(output, arguments.overwrite)
    names = ("kind", "target_kind", "vocab_size", "min_frequency", "normalization", "lowercase", "joiner")
    names += ("additional_special_tokens",)
    options = {name: getattr(arguments, name) for name in names}
    files = [*(arguments.files or ()), *(arguments.source_files or ()), *(arguments.target_files or ())]
    for name in files:
        check_files(name, None)
    if "byte" in (arguments.kind, arguments.target_kind):
        # Its training reads no text, which may be damaged or not UTF-8.
        collections.deque(iterate_lines(files), maxlen=0)
    sides = (arguments.source_files, arguments.target_files) if is_separate else (arguments.files, ())
    pair = TokenizerPair.train(*map(iterate_lines, sides), joint=not is_separate, **options)
    with folder_in_one_step(output.resolve()) as partial:
        pair.save_pretrained(partial)
    for side, tokenizer in (("source", pair.source), ("target", pair.target))[: 2 if is_separate else 1]:
        logger.info("%s: %d entries", side if is_separate else "both sides", len(tokenizer))
    logger.info("Written to %s", arguments.output)
