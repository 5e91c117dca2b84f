"""`metaphrase backtranslate MODEL` and `metaphrase distill TEACHER ...`: write pairs with a synthetic side."""

import argparse
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from metaphrase.data.pairs import READERS, SIDES, PairProblem, PairSource
from metaphrase.errors import MetaphraseError
from metaphrase.filtering.run import pair_formatter
from metaphrase.inference import expected_utilities
from metaphrase.inference.generator import ScoredText
from metaphrase.scripts.generate import prepare, write_targets
from metaphrase.scripts.parsers import check_dependents, given_options

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    # A model that writes the source language reads the targets of the pairs.
    options = {"num_return_sequences": 1} | prepare(arguments, {"input": arguments.input})
    format_pair = pair_formatter(arguments.output)
    start = f"{arguments.tag} " if arguments.tag else ""

    def format_pairs(index: int, record: tuple[str], candidates: Sequence[ScoredText]) -> str:
        # A tag alone would be no blank source, and training would use the pair.
        sources = [start + candidate.text if candidate.text.strip() else "" for candidate in candidates]
        return "".join(format_pair(source, record[0]) for source in sources)

    write_targets(arguments, options, format_pairs)


def distill(arguments: argparse.Namespace) -> None:
    """Run `metaphrase distill TEACHER ...`: write pairs of a source and the target of the teachers."""
    arguments.model, *more = arguments.teachers
    arguments.ensemble = more or None
    check_dependents(arguments, target="input", preferences="select")
    inputs = {"input": arguments.input} | given_options(arguments, ("target",))
    options = {"num_return_sequences": 1} | prepare(arguments, inputs)
    names, num_equal = ("prompt", "chosen", "rejected") if arguments.preferences else SIDES, 0
    format_pair, pairs, select = pair_formatter(arguments.output, names), chosen_pairs(arguments), arguments.select
    if select is not None and (pairs is None or options["num_return_sequences"] < 2):
        raise MetaphraseError(
            "`select` must come with pairs as input and `num_return_sequences` above 1, "
            f"got {'sources alone' if pairs is None else options['num_return_sequences']}."
        )

    def format_pairs(index: int, record: tuple[str, ...], candidates: Sequence[ScoredText]) -> str:
        nonlocal num_equal
        if select is not None:
            candidates = best_and_worst(candidates, record[1], select)
        if arguments.preferences:
            num_equal += len(candidates) < 2
            return format_pair(record[0], *(item.text for item in candidates)) if len(candidates) == 2 else ""
        candidates = candidates[:1] if select is not None else candidates
        return "".join(format_pair(record[0], candidate.text) for candidate in candidates)

    written: dict[str, Any] = {"num_targets": None if select is None else 1}
    if pairs is not None:
        # The lines of a file of pairs are no count: it may have a header, or hold all pairs in one line.
        written |= {"records": read_pairs(pairs), "total": sum(1 for _ in pairs.records())}
    write_targets(arguments, options, format_pairs, **written)
    if num_equal:
        logger.info("%d sources are left out, because all their candidates have equal scores.", num_equal)


def best_and_worst(candidates: Sequence[ScoredText], reference: str, metric: str) -> list[ScoredText]:
    """Return the candidates with the highest and the lowest score against a reference, the first ones; one if all are equal.

    Source: Kim and Rush 2016, arXiv 1606.07947, section 3.3 (sequence-level interpolation).
    """
    scores = expected_utilities([candidate.text for candidate in candidates], {reference: 1.0}, metric)
    return [candidates[index] for index in dict.fromkeys(map(scores.index, (max(scores), min(scores))))]


def chosen_pairs(arguments: argparse.Namespace) -> PairSource | None:
    """Return the files of pairs; `None` for sources alone."""
    options = given_options(arguments, ("source_column", "target_column", "max_line_characters"))
    if arguments.target is None and (arguments.input or "").removesuffix(".gz").endswith(tuple(READERS)):
        return PairSource(file=arguments.input, **options)
    for name in ("source_column", "target_column"):
        if name in options:
            raise MetaphraseError(f"`{name}` must come with one file of pairs as `input`, got {arguments.input!r}.")
    if arguments.target is None:
        return None
    return PairSource(source_file=arguments.input, target_file=arguments.target, **options)


def read_pairs(pairs: PairSource) -> Iterator[tuple[str, str]]:
    """Yield each source and its reference. A line that holds no pair is an error."""
    for record in pairs.records():
        if isinstance(record, PairProblem):
            raise MetaphraseError(f"{record.message} `metaphrase filter` drops such lines.")
        yield record
