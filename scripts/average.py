"""`metaphrase average RUN_OR_CHECKPOINTS --output DIR`: average the weights of several checkpoints."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import logging
from collections.abc import Sequence

from metaphrase.scripts.console import run
from metaphrase.training.checkpointing.averaging import DEFAULT_METRIC, average_checkpoints, select_checkpoints

logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase average",
        description="Average the weights of several checkpoints. Tokenizers and settings are those of the last one.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder of a run, or the checkpoints to average")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write the model to")
    parser.add_argument("--last", type=int, metavar="N", help="average the last N checkpoints of a run")
    parser.add_argument("--best", type=int, metavar="N", help="average the N checkpoints of a run with the best metric")
    parser.add_argument("--metric", help=f"metric for --best, as the trainer logs it [{DEFAULT_METRIC}]")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing average")
    return parser


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    folders = arguments.folders
    if len(folders) == 1:
        folders = select_checkpoints(folders[0], last=arguments.last, best=arguments.best, metric=arguments.metric)
    elif any(option is not None for option in (arguments.last, arguments.best, arguments.metric)):
        raise ValueError(f"`--last`, `--best` and `--metric` need the folder of one run, got {len(folders)} folders.")
    written = average_checkpoints(folders, arguments.output, overwrite=arguments.overwrite)
    logger.info("Written to %s", written)


if __name__ == "__main__":
    sys.exit(run(main, "average"))
