"""`metaphrase average RUN_OR_CHECKPOINTS --output DIR`: average the weights of several checkpoints."""

import logging
from collections.abc import Sequence

from metaphrase.scripts.console import verb_parser
from metaphrase.training.checkpointing.averaging import DEFAULT_METRIC, average_checkpoints, select_checkpoints

logger = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "average", "Average the weights of several checkpoints. Tokenizers and settings are those of the last one."
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder of a run, or the checkpoints to average")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write the model to")
    parser.add_argument("--last", type=int, metavar="N", help="average the last N checkpoints of a run")
    parser.add_argument("--best", type=int, metavar="N", help="average the N checkpoints of a run with the best metric")
    parser.add_argument("--metric", help=f"metric for --best, as the trainer logs it [{DEFAULT_METRIC}]")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing average")
    arguments = parser.parse_args(words)
    folders = arguments.folders
    if len(folders) == 1:
        folders = select_checkpoints(folders[0], last=arguments.last, best=arguments.best, metric=arguments.metric)
    elif any(option is not None for option in (arguments.last, arguments.best, arguments.metric)):
        raise ValueError(f"`--last`, `--best` and `--metric` need the folder of one run, got {len(folders)} folders.")
    written = average_checkpoints(folders, arguments.output, overwrite=arguments.overwrite)
    logger.info("Written to %s", written)
