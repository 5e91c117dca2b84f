"""`metaphrase convert SOURCE OUTPUT [--to FAMILY]`: convert T5, BART, Marian and others to Metaphrase, or back."""

import logging
from collections.abc import Sequence

from metaphrase.conversion import convert
from metaphrase.scripts.parsers import parse

logger = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    arguments, _ = parse("convert", words)
    written = convert(
        arguments.source,
        arguments.output,
        to=arguments.to,
        revision=arguments.revision,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
    )
    logger.info("Written to %s", written)
