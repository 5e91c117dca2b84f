"""`metaphrase compare A B --target F`: compare outputs of systems, as text, JSON and one HTML page."""

import argparse
import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from metaphrase.analysis import pages
from metaphrase.analysis.comparison import TestSet, compare, compute_segments, external_segments
from metaphrase.analysis.judges import load_judge
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.metrics import METRICS, metric_options, write_metrics
from metaphrase.inference.line_files import check_files
from metaphrase.scripts.parsers import check_dependents, given_options
from metaphrase.storage.folders import check_writable
from metaphrase.tokenization import iterate_lines
from metaphrase.training.recipe.recipe import LOWER_IS_BETTER

logger = logging.getLogger(__name__)

# Reports hold more.
NUM_PRINTED_SENTENCES = 3


def main(arguments: argparse.Namespace) -> None:
    metrics = list(dict.fromkeys(arguments.metrics))
    options = metric_options(metrics, arguments.bleu_tokenize, arguments.lowercase)
    check_dependents(arguments, scores_name="scores", scores_lower_is_better="scores")
    external_name = arguments.scores_name or "external"
    if external_name in METRICS:
        raise MetaphraseError(f"`scores_name` must not be the name of one of `metrics`, got {external_name!r}.")
    inputs = given_options(arguments, ("target", "source", "train_target_file"))
    for name in ("outputs", "scores"):
        inputs |= {f"{name}[{number}]": path for number, path in enumerate(getattr(arguments, name) or ())}
    for path in arguments.output:
        if not path.endswith((".json", ".html")):
            raise MetaphraseError(f"`output` must end in .json or .html, got {path!r}.")
        check_files(inputs, path)
        check_writable(Path(path).parent, "output")
    test_set, external = read_systems(arguments)
    segments = compute_segments(test_set, metrics, options)
    if external:
        segments[external_name] = external_segments(external)
    judges = [load_judge(name) for name in arguments.metric]
    if judges and test_set.sources is None:
        raise MetaphraseError("`source` must be given with `metric`, which reads the sources, too, got None.")
    outputs, references = test_set.outputs.items(), test_set.references
    for judge in judges:
        segments[judge.name] = {name: judge.segments(test_set.sources, texts, references) for name, texts in outputs}
    path = arguments.train_target_file
    lower = [judge.name for judge in judges if judge.is_better_lower]
    report = compare(
        test_set,
        segments,
        lower_is_better=[*LOWER_IS_BETTER, *lower, *[external_name] * bool(arguments.scores_lower_is_better)],
        word_tokenizer=arguments.bleu_tokenize or "13a",
        lowercase=arguments.lowercase,
        training_targets=None if path is None else iterate_lines(path, arguments.max_line_characters),
        num_bootstrap_samples=arguments.paired_bs_n,
        num_randomization_trials=arguments.paired_ar_n,
        num_sentences=arguments.num_sentences,
    )
    for line in describe(report):
        print(pages.spell_out(line, ("Cc", "Cf", "Cs", "Zl", "Zp")))
    for path in arguments.output:
        pages.write_comparison_page(report, path) if path.endswith(".html") else write_metrics(path, report)
        logger.info("Written to %s", path)


def read_systems(arguments: argparse.Namespace) -> tuple[TestSet, dict[str, list[float]]]:
    """Read outputs, references, sources, and the external scores of each system, none without files.

    A system has the name of the command line, or of its file, or its path.
    """
    paths = arguments.outputs
    names = arguments.names or [Path(path).name for path in paths]
    if arguments.names is None and len(set(names)) < len(names):
        names = paths
    if not len(paths) == len(names) == len(set(names)) > 1:
        raise MetaphraseError(
            "`outputs` must be at least two files, and `names` one for each and different, got "
            f"{' '.join(paths)!r} and {' '.join(names)!r}."
        )
    references = list(iterate_lines(arguments.target, arguments.max_line_characters))
    if not references:
        raise MetaphraseError(f"`target` must have at least one line, got the empty file {arguments.target!r}.")

    def read(option: str, path: str) -> list[str]:
        lines = list(iterate_lines(path, arguments.max_line_characters))
        if len(lines) != len(references):
            counts = f"{len(lines)} in {path!r} and {len(references)} in {arguments.target!r}"
            raise MetaphraseError(f"`{option}` must have as many lines as `target`, got {counts}.")
        return lines

    outputs = {name: read("outputs", path) for name, path in zip(names, paths, strict=True)}
    test_set = TestSet(outputs, references, arguments.source and read("source", arguments.source))
    paths, scores = arguments.scores or (), {}
    if len(paths) not in (0, len(names)):
        counts = f"{len(paths)} files for {len(names)} systems"
        raise MetaphraseError(f"`scores` must be one file for each system, got {counts}.")
    for name, path in zip(names, paths, strict=False):
        lines = read("scores", path)
        with contextlib.suppress(ValueError):
            scores[name] = [float(line) for line in lines]
        if not all(map(math.isfinite, scores.get(name, [math.nan]))):
            raise MetaphraseError(f"`scores` must hold a finite number on each line, got others in {path!r}.")
    return test_set, scores


def describe(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for a terminal."""
    yield f"SCORES OF {report['num_sentences']} SENTENCES"
    yield from align(pages.score_rows(report), num_texts=2)
    yield from (f"{pages.label_of(name)}: {part['signature']}" for name, part in report["scores"].items())
    yield from (pages.describe_tests(report), "", "SCORES BY LENGTH of the reference")
    yield from align(pages.length_rows(report), num_texts=1)
    yield from ("", f"WORDS BY FREQUENCY in the {report['words_counted_in']}")
    yield from align(pages.word_rows(report), num_texts=1)
    for part, direction in itertools.product(report["differences"], ("better", "worse")):
        systems = f"{part['system']} IS {direction.upper()} THAN {report['systems'][0]}"
        if part[direction]:
            yield from ("", f"{systems} IN THESE SENTENCES, by {pages.label_of(report['sorted_by'])}")
        for entry in part[direction][:NUM_PRINTED_SENTENCES]:
            yield f"line {entry['line']}"
            rows = [(f"  {name}", entry[name]) for name in ("source", "reference") if name in entry]
            for system, text in entry["outputs"].items():
                score = pages.show_score(report["sorted_by"], entry["scores"][report["sorted_by"]][system])
                rows.append((f"  {system} ({score})", text))
            yield from align(rows, num_texts=2)


def align(rows: Sequence[Sequence[str]], num_texts: int) -> Iterator[str]:
    """Yield the lines of a table: columns of texts at the left, then of numbers at the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
