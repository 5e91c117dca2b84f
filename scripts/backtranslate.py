"""`metaphrase backtranslate MODEL`: write pairs of a synthetic source and a real target."""

import argparse
from collections.abc import Sequence

from metaphrase.data.pairs import pair_formatter
from metaphrase.inference.generator import ScoredText
from metaphrase.inference.line_files import num_lines
from metaphrase.scripts.generate import line_records, prepare, write_targets


def main(arguments: argparse.Namespace) -> None:
    # A model that writes the source language reads the targets of the pairs.
    options = {"num_return_sequences": 1} | prepare(arguments, {"input": arguments.input})
    format_pair = pair_formatter(arguments.output)
    start = f"{arguments.tag} " if arguments.tag else ""

    def format_pairs(index: int, record: tuple[str], candidates: Sequence[ScoredText]) -> str:
        [target] = record
        # A tag alone would be no blank source, and training would use the pair.
        sources = [start + candidate.text if candidate.text.strip() else "" for candidate in candidates]
        return "".join(format_pair(source, target) for source in sources)

    write_targets(arguments, options, line_records(arguments), num_lines(arguments.input), format_pairs)
