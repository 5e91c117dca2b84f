"""`metaphrase compare A B --target F`: compare outputs of systems, as text, JSON and one HTML page."""

import argparse
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from metaphrase.evaluation.comparison import TestSet, compare, compute_segments, external_segments
from metaphrase.evaluation.metrics import check_metrics, check_references, check_writable, metric_options, write_metrics
from metaphrase.hub_card.figures import LOWER_IS_BETTER, spell_out
from metaphrase.hub_card.pages import (
    describe_tests,
    label_of,
    length_rows,
    score_rows,
    show_score,
    word_rows,
    write_comparison_page,
)
from metaphrase.inference.line_files import check_files, read_lines
from metaphrase.scripts.parsers import check_dependents, given_options
from metaphrase.scripts.parsers.verbs import METRICS

logger = logging.getLogger(__name__)

# Reports hold more.
NUM_PRINTED_SENTENCES = 3


def main(arguments: argparse.Namespace) -> None:
    arguments.metrics = list(dict.fromkeys(arguments.metrics))
    check_metrics(arguments.metrics, arguments.bleu_tokenize)
    options = metric_options(arguments.metrics, arguments.bleu_tokenize, arguments.lowercase)
    names = choose_names(arguments)
    check_outputs(arguments)
    test_set = read_test_set(arguments, names)
    check_references(test_set.references, arguments.metrics, "references")
    external = read_external_scores(arguments, test_set) if arguments.scores else None
    segments = compute_segments(test_set, arguments.metrics, options)
    if external is not None:
        segments[arguments.scores_name] = external_segments(external)
    lower_is_better = [name for name in arguments.metrics if name in LOWER_IS_BETTER]
    lower_is_better += [arguments.scores_name] * bool(arguments.scores_lower_is_better)
    path = arguments.train_target_file
    report = compare(
        test_set,
        segments,
        lower_is_better=lower_is_better,
        word_tokenizer=arguments.bleu_tokenize or "13a",
        lowercase=arguments.lowercase,
        training_targets=None if path is None else read_lines(path, arguments.max_line_characters),
        num_bootstrap_samples=arguments.paired_bs_n,
        num_randomization_trials=arguments.paired_ar_n,
        num_sentences=arguments.num_sentences,
    )
    for line in describe(report):
        print(spell_out(line, ("Cc", "Cf", "Cs", "Zl", "Zp")))
    for path in arguments.output:
        write_comparison_page(report, path) if path.endswith(".html") else write_metrics(path, report)
        logger.info("Written to %s", path)


def choose_names(arguments: argparse.Namespace) -> list[str]:
    """Return a name for each system: that of the command line, or of its file, or the path of its file.

    Raises:
        ValueError: If there are fewer than two systems, or their names are not as many or not different.
    """
    outputs, names = arguments.outputs, arguments.names
    if len(outputs) < 2:
        raise ValueError(f"`outputs` must be at least two files, got {outputs[0]!r} alone.")
    if names is None:
        names = [Path(path).name for path in outputs]
        names = names if len(set(names)) == len(names) else outputs
    if len(names) != len(outputs):
        raise ValueError(f"`names` must be one for each system, got {len(names)} for {len(outputs)} files.")
    if len(set(names)) < len(names):
        raise ValueError(f"`names` must be different, got {' '.join(names)!r}. Pass --names to name the systems.")
    return names


def check_outputs(arguments: argparse.Namespace) -> None:
    """Check options and files before any work.

    Raises:
        ValueError: If an option is out of its range or without effect, or an output has another format or would replace an
            input.
    """
    check_dependents(arguments, scores_name="scores", scores_lower_is_better="scores")
    for name in ("paired_bs_n", "paired_ar_n"):
        if getattr(arguments, name) < 2:
            raise ValueError(f"`{name}` must be at least 2, got {getattr(arguments, name)}.")
    arguments.scores_name = arguments.scores_name or "external"
    inputs = given_options(arguments, ("target", "source", "train_target_file"))
    for name in ("outputs", "scores"):
        inputs |= {f"{name}[{number}]": path for number, path in enumerate(getattr(arguments, name) or ())}
    for path in arguments.output:
        if not path.endswith((".json", ".html")):
            raise ValueError(f"`output` must end in .json or .html, got {path!r}.")
        check_files(inputs, check_writable(path))


def read_test_set(arguments: argparse.Namespace, names: list[str]) -> TestSet:
    """Read outputs, references and sources.

    Raises:
        ValueError: If the files are empty, or their numbers of lines differ.
    """
    references = list(read_lines(arguments.target, arguments.max_line_characters))
    if not references:
        raise ValueError(f"`target` must have at least one line, got the empty file {arguments.target!r}.")
    outputs = [read_column(arguments, "outputs", path, references) for path in arguments.outputs]
    source = arguments.source
    sources = None if source is None else read_column(arguments, "source", source, references)
    return TestSet(dict(zip(names, outputs, strict=True)), references, sources)


def read_external_scores(arguments: argparse.Namespace, test_set: TestSet) -> dict[str, list[float]]:
    """Read the external scores of each system.

    Raises:
        ValueError: If there is not a file for each system, a line is no finite number, or the name is that of another score.
    """
    paths, names = arguments.scores, list(test_set.outputs)
    if len(paths) != len(names):
        raise ValueError(f"`scores` must be one file for each system, got {len(paths)} files for {len(names)} systems.")
    if arguments.scores_name in METRICS:
        raise ValueError(f"`scores_name` must not be the name of one of `metrics`, got {arguments.scores_name!r}.")
    columns = [read_column(arguments, "scores", path, test_set.references) for path in paths]
    return {
        name: [read_number(line, number, path) for number, line in enumerate(column, 1)]
        for name, path, column in zip(names, paths, columns, strict=True)
    }


def read_column(arguments: argparse.Namespace, name: str, path: str, references: list[str]) -> list[str]:
    """Read a file with as many lines as there are references.

    Raises:
        ValueError: If the number of lines is another one.
    """
    lines = list(read_lines(path, arguments.max_line_characters))
    if len(lines) != len(references):
        counts = f"{len(lines)} in {path!r} and {len(references)} in {arguments.target!r}"
        raise ValueError(f"`{name}` must have as many lines as `target`, got {counts}.")
    return lines


def read_number(line: str, number: int, path: str) -> float:
    """Return the finite number of a line."""
    try:
        value = float(line)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"`scores` must hold one finite number in each line, got {line!r} in line {number} of {path!r}."
        )
    return value


def describe(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for a terminal."""
    yield f"SCORES OF {report['num_sentences']} SENTENCES"
    yield from align(score_rows(report), num_texts=2)
    yield from (f"{label_of(name)}: {part['signature']}" for name, part in report["scores"].items())
    yield from (describe_tests(report), "", "SCORES BY LENGTH of the reference")
    yield from align(length_rows(report), num_texts=1)
    yield from ("", f"WORDS BY FREQUENCY in the {report['words_counted_in']}")
    yield from align(word_rows(report), num_texts=1)
    for part, direction in itertools.product(report["differences"], ("better", "worse")):
        systems = f"{part['system']} IS {direction.upper()} THAN {report['systems'][0]}"
        if part[direction]:
            yield from ("", f"{systems} IN THESE SENTENCES, by {label_of(report['sorted_by'])}")
        for entry in part[direction][:NUM_PRINTED_SENTENCES]:
            yield f"line {entry['line']}"
            yield from align(list(sentence_rows(entry, report["sorted_by"])), num_texts=2)


def sentence_rows(entry: dict[str, Any], sorted_by: str) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of a sentence's source, reference and outputs."""
    yield from ((f"  {name}", entry[name]) for name in ("source", "reference") if name in entry)
    for system, text in entry["outputs"].items():
        yield f"  {system} ({show_score(sorted_by, entry['scores'][sorted_by][system])})", text


def align(rows: Sequence[Sequence[str]], num_texts: int) -> Iterator[str]:
    """Yield the lines of a table: columns of texts at the left, then of numbers at the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
