"""`metaphrase convert SOURCE OUTPUT [--to FAMILY]`: convert T5, BART, Marian and others to Metaphrase, or back."""

import logging
from collections.abc import Sequence

from metaphrase.conversion import FAMILIES, convert
from metaphrase.conversion.folders import DEFAULT_SHARD_SIZE
from metaphrase.scripts.console import verb_parser

logger = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "convert",
        "Convert a checkpoint of a known family to a Metaphrase model that computes the same. With --to, convert a "
        "Metaphrase model to a family, whose models need no code of Metaphrase. Tokenizers and generation settings are "
        f"copied. Families: {', '.join(FAMILIES)}.",
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
    arguments = parser.parse_args(words)
    written = convert(
        arguments.source,
        arguments.output,
        to=arguments.to,
        revision=arguments.revision,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
    )
    logger.info("Written to %s", written)
