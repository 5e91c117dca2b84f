"""`metaphrase convert SOURCE OUTPUT [--to FAMILY]`: convert T5, BART, Marian and others to Metaphrase, or back."""

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
        description="Convert a checkpoint of a known family to a Metaphrase model that computes the same. With --to, convert a "
        "Metaphrase model to a family, whose models need no code of Metaphrase. Tokenizers and generation settings are "
        f"copied. Families: {', '.join(FAMILIES)}.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="folder or Hub id, with weights in safetensors")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write")
    parser.add_argument("--to", metavar="FAMILY", help="family to convert a Metaphrase model to")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing conversion")
    parser.add_argument(
        "--max_shard_size",
        default=DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help="maximum size of a file of weights, such as 500MB [%(default)s]",
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
