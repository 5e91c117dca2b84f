"""`metaphrase convert SOURCE OUTPUT [--to FAMILY]`: convert T5, BART, Marian and others to Metaphrase, or back."""

import argparse
import logging

from metaphrase.conversion import convert

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    written = convert(
        arguments.source,
        arguments.output,
        to=arguments.to,
        revision=arguments.revision,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
    )
    logger.info("Written to %s", written)
