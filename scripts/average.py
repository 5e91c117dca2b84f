"""`metaphrase average RUN_OR_CHECKPOINTS --output DIR`: average the weights of several checkpoints."""

import argparse
import logging

from metaphrase.techniques.averaging import average_checkpoints, select_checkpoints

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    folders = arguments.folders
    if len(folders) == 1:
        folders = select_checkpoints(folders[0], last=arguments.last, best=arguments.best, metric=arguments.metric)
    elif any(option is not None for option in (arguments.last, arguments.best, arguments.metric)):
        raise ValueError(f"`--last`, `--best` and `--metric` need the folder of one run, got {len(folders)} folders.")
    written = average_checkpoints(folders, arguments.output, overwrite=arguments.overwrite)
    logger.info("Written to %s", written)
