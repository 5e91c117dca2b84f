"""`metaphrase backtranslate MODEL` and `metaphrase distill TEACHER ...`: write pairs with a synthetic side."""

import argparse
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from metaphrase.analysis.judges import Judge, load_judge
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
    check_dependents(arguments, target="input", preferences="metric" if arguments.metric else "select")
    if arguments.preferences and arguments.resume:
        # Sources that are left out cannot be counted in the file.
        raise MetaphraseError("`resume` must not be given with `preferences`, which leaves sources out.")
    inputs = {"input": arguments.input} | given_options(arguments, ("target",))
    options = {"num_return_sequences": 1} | prepare(arguments, inputs)
    names, num_equal = ("prompt", "chosen", "rejected") if arguments.preferences else SIDES, 0
    format_pair, pairs, select = pair_formatter(arguments.output, names), chosen_pairs(arguments), arguments.select
    lacks_pairs = select is not None and pairs is None
    if (select or arguments.metric) and (lacks_pairs or options["num_return_sequences"] < 2):
        raise MetaphraseError(
            f"`{'select' if select else 'metric'}` must come with {'pairs as input and ' * bool(select)}"
            "`num_return_sequences` above 1, "
            f"got {'sources alone' if lacks_pairs else options['num_return_sequences']}."
        )

    def format_pairs(index: int, record: tuple[str, ...], candidates: Sequence[ScoredText]) -> str:
        nonlocal num_equal
        if arguments.preferences:
            num_equal += len(candidates) < 2
            return format_pair(record[0], *(item.text for item in candidates)) if len(candidates) == 2 else ""
        return "".join(format_pair(record[0], candidate.text) for candidate in candidates)

    written: dict[str, Any] = {}
    if select or arguments.metric:
        judge = nearness(select) if select else load_judge(arguments.metric, False, device=arguments.device)
        size, with_worst = arguments.chunk_size, arguments.preferences
        written = {"num_targets": 1, "choose": lambda rows: choose(rows, judge, size, with_worst)}
    if pairs is not None:
        # The lines of a file of pairs are no count: it may have a header, or hold all pairs in one line.
        written |= {"records": read_pairs(pairs), "total": sum(1 for _ in pairs.records())}
    write_targets(arguments, options, format_pairs, **written)
    if num_equal:
        logger.info("%d sources are left out, because all their candidates have equal scores.", num_equal)


def nearness(metric: str) -> Judge:
    """Return the judge of a metric of sacreBLEU.

    Source: Kim and Rush 2016, arXiv 1606.07947, section 3.3 (sequence-level interpolation).
    """

    def score(_: Sequence[str], targets: Sequence[str], references: Sequence[str]) -> list[float]:
        pairs = zip(targets, references, strict=True)
        return [expected_utilities([target], {reference: 1.0}, metric)[0] for target, reference in pairs]

    return Judge(metric, score, False)


def choose(rows: Iterator[tuple], judge: Judge, chunk_size: int, with_worst: bool = False) -> Iterator[tuple]:
    """Yield the best candidate of each source, and also the worst: of equal ones the first, and one if all are equal.

    The judge scores a chunk in one call.
    """
    while chunk := list(itertools.islice(rows, chunk_size)):
        texts = [(record[0], item.text, *record[1:]) for candidates, record in chunk for item in candidates]
        values = iter(judge.utilities(*zip(*texts, strict=True)).tolist())
        for candidates, record in chunk:
            scores = list(itertools.islice(values, len(candidates)))
            ends = (max(scores), min(scores)) if with_worst else (max(scores),)
            yield [candidates[index] for index in dict.fromkeys(map(scores.index, ends))], record


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
