"""`metaphrase adapt BASE OUTPUT`: make an encoder-decoder of a decoder-only model."""

import argparse
import logging

from metaphrase.conversion import adapt

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    written = adapt(
        arguments.base,
        arguments.output,
        encoder=arguments.encoder,
        encoder_layers=arguments.encoder_layers,
        decoder_layers=arguments.decoder_layers,
        cross_attention=arguments.cross_attention,
        dropout=arguments.dropout,
        overwrite=arguments.overwrite,
        max_shard_size=arguments.max_shard_size,
    )
    logger.info("Written to %s. Train it: `metaphrase train ... --model_name_or_path %s`", written, written)
