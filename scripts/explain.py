"""`metaphrase explain MODEL`: write a page that shows what each stage of a model computes for a pair."""

import argparse
import logging
from pathlib import Path

from transformers import set_seed

from metaphrase.analysis.pages import write_explanation_page
from metaphrase.inference import Generator, explain
from metaphrase.inference.line_files import check_files
from metaphrase.scripts.parsers import chosen_generation_options, chosen_loading_options

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    targets = arguments.target or [None] * len(arguments.source)
    if len(targets) != len(arguments.source):
        raise ValueError(f"`source` and `target` must be equally many, got {len(arguments.source)} and {len(targets)}.")
    check_files({}, arguments.output)
    set_seed(arguments.seed)
    generator = Generator.from_pretrained(arguments.model, **chosen_loading_options(arguments))
    options = chosen_generation_options(arguments) | {"seed": arguments.seed}
    pairs = zip(arguments.source, targets, strict=True)
    explanations = [explain(generator, source, target, **options) for source, target in pairs]
    generator.log_counts(len(targets))
    name = Path(arguments.model).resolve().name if Path(arguments.model).is_dir() else arguments.model
    write_explanation_page(explanations, arguments.output, title=f"Explanation of {name}")
    logger.info("Written to %s", arguments.output)
