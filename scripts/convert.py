"""`metaphrase convert SOURCE OUTPUT [--to FAMILY]`: a checkpoint of T5, BART, Marian ... as Metaphrase's, or the other way."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import logging
from collections.abc import Sequence

from metaphrase.conversion import FAMILIES, convert
from metaphrase.conversion.folders import DEFAULT_SHARD_SIZE
from metaphrase.scripts.console import run

logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase convert",
        description="Writes a checkpoint of a known family as a Metaphrase model, which computes the same, or, with --to, "
        "a Metaphrase model as one of a family, which then needs no code of ours. Tokenizers and generation settings come "
        f"along. Families: {', '.join(FAMILIES)}.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="folder, or name on the Hub, with weights in safetensors")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write")
    parser.add_argument("--to", metavar="FAMILY", help="of a Metaphrase model: the family to write")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--overwrite", action="store_true", help="replace a conversion that is there already")
    parser.add_argument(
        "--max_shard_size",
        default=DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help="most bytes of one file of weights, as 500MB [%(default)s]",
    )
    return parser


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    written = convert(
        arguments.source,
        arguments.output,
        to=arguments.to,
        revision=arguments.revision,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
    )
    logger.info("Written to %s", written)


if __name__ == "__main__":
    sys.exit(run(main, "convert"))
