"""`metaphrase convert` and `metaphrase adapt`: make models of ours from models of other classes."""

import argparse
import logging

from metaphrase import conversion

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    written = conversion.convert(
        arguments.source,
        arguments.output,
        to=arguments.to,
        revision=arguments.revision,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
    )
    logger.info("Written to %s", written)


def adapt(arguments: argparse.Namespace) -> None:
    """Run `metaphrase adapt BASE OUTPUT`."""
    names = ("encoder", "encoder_layers", "decoder_layers", "cross_attention", "dropout", "overwrite", "max_shard_size")
    options = {name: getattr(arguments, name) for name in names}
    written = conversion.adapt(arguments.base, arguments.output, **options)
    logger.info("Written to %s. Train it: `metaphrase train ... --model_name_or_path %s`", written, written)
