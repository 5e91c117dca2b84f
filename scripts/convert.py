"""`metaphrase convert` and `metaphrase adapt`: make models of ours from models of other classes."""

import argparse
import logging

from metaphrase import conversion

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    options = {name: getattr(arguments, name) for name in ("revision", "overwrite", "max_shard_size")}
    if (files := arguments.trim_vocabulary) is None:
        written = conversion.convert(arguments.source, arguments.output, to=arguments.to, **options)
    elif arguments.to in (None, "metaphrase"):
        written = conversion.trim_vocabulary(arguments.source, arguments.output, files, **options)
    else:
        raise ValueError(
            f"`to` must be left out with `trim_vocabulary`, got {arguments.to!r}: trim the model first, then convert it."
        )
    logger.info("Written to %s", written)


def adapt(arguments: argparse.Namespace) -> None:
    """Run `metaphrase adapt BASE OUTPUT`."""
    names = ("encoder", "encoder_layers", "decoder_layers", "cross_attention", "dropout", "overwrite", "max_shard_size")
    options = {name: getattr(arguments, name) for name in names}
    written = conversion.adapt(arguments.base, arguments.output, **options)
    logger.info("Written to %s. Train it: `metaphrase train ... --model_name_or_path %s`", written, written)
