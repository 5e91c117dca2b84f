"""Comparison page: one HTML file without scripts that shows the report of `metaphrase compare`."""

import html
import os
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from metaphrase.hub_card.explanation_page import write_page
from metaphrase.hub_card.figures import SCORE_LABELS, spell_out

Row = Sequence[str]
# Words, single characters of scripts without spaces, and all else.
_PIECE = re.compile(r"\s+|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+|.", re.DOTALL)


def label_of(name: str) -> str:
    """Return the label of a score. An external score is its own label."""
    return SCORE_LABELS.get(name, name)


def show_score(name: str, value: float) -> str:
    """Return a score with two decimals, and an external one, which may lie between 0 and 1, with four."""
    return f"{value:.{2 if name in SCORE_LABELS else 4}f}"


def score_rows(report: dict[str, Any]) -> list[Row]:
    """Return the table of scores with intervals and probabilities, header first."""
    rows = [["score", "system", "value", "95 % interval", "difference", "p, bootstrap", "p, randomization"]]
    for name, part in report["scores"].items():
        label = label_of(name) + (" (lower is better)" if name in report["lower_is_better"] else "")
        for row in part["systems"]:
            interval = " to ".join(show_score(name, row["mean"] + sign * row["ci"]) for sign in (-1, 1))
            tests = ["baseline", "", ""]
            if "difference" in row:
                sign = "+" if row["difference"] >= 0 else ""
                values = (
                    _show_probability(row["difference"], row[f"p_{test}"]) for test in ("bootstrap", "randomization")
                )
                tests = [sign + show_score(name, row["difference"]), *values]
            rows.append([label, row["system"], show_score(name, row["score"]), interval, *tests])
            label = ""
    return rows


def _show_probability(difference: float, p: float) -> str:
    # sacreBLEU gives equal scores a low probability, on purpose.
    return "-" if difference == 0 else f"{'* ' if p < 0.05 else ''}{p:.4f}"


def length_rows(report: dict[str, Any]) -> list[Row]:
    """Return the table of scores by the length of the reference, header first."""
    columns = [(name, system) for name in report["scores"] for system in report["systems"]]
    rows = [["words", "sentences", *(f"{label_of(name)} {system}" for name, system in columns)]]
    for bucket in report["lengths"]:
        scores = (show_score(name, bucket["scores"][name][system]) for name, system in columns)
        rows.append([_range(bucket), f"{bucket['num_sentences']:,}", *scores])
    return rows


def word_rows(report: dict[str, Any]) -> list[Row]:
    """Return the table of the F1 of words by their frequency, header first."""
    rows = [["frequency", "words", *(f"F1 {system}" for system in report["systems"])]]
    for bucket in report["words"]:
        rows.append([_range(bucket), f"{bucket['num_words']:,}", *(f"{value:.2f}" for value in bucket["f1"].values())])
    return rows


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["from"], bucket["to"]
    return f"{low:,} or more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def describe_tests(report: dict[str, Any]) -> str:
    """Return a sentence on the tests of the scores."""
    return (
        f"Intervals and tests are those of sacreBLEU: {report['num_bootstrap_samples']:,} paired bootstrap resamples and "
        f"{report['num_randomization_trials']:,} trials of approximate randomization, seed {report['seed']}. "
        "* marks p < 0.05."
    )


def write_comparison_page(report: dict[str, Any], path: str | os.PathLike) -> Path:
    """Write the report of `metaphrase.evaluation.comparison.compare` as a page that loads no other file."""
    baseline, *systems = report["systems"]
    sections = (section for part in report["differences"] for section in _difference_sections(report, part))
    signatures = (
        f"<br>{_escape(label_of(name))}: {_escape(part['signature'])}" for name, part in report["scores"].items()
    )
    return write_page(
        path,
        "comparison_page.html",
        title=f"{', '.join(systems)} against {baseline}",
        num_sentences=f"{report['num_sentences']:,}",
        tests=_escape(describe_tests(report)) + "".join(signatures),
        scores=_table(score_rows(report), num_texts=2),
        lengths=_table(length_rows(report), num_texts=1),
        words=_table(word_rows(report), num_texts=1),
        words_counted_in=report["words_counted_in"],
        sorted_by=_escape(label_of(report["sorted_by"])),
        differences="\n".join(sections),
    )


def _escape(text: str) -> str:
    return html.escape(spell_out(text, ("Cc", "Cf", "Cs")))


def _table(rows: Sequence[Row], num_texts: int) -> str:
    """Return a table of texts, then numbers. A value in percent with its name in the header has a bar."""
    has_bar = [text.startswith(tuple(f"{label} " for label in (*SCORE_LABELS.values(), "F1"))) for text in rows[0]]

    def cell(column: int, text: str) -> str:
        if column < num_texts:
            return f"<td>{_escape(text)}"
        if not has_bar[column]:
            return f'<td class="number">{_escape(text)}'
        share = min(max(float(text) / 100, 0), 1)
        return f'<td class="number bar" style="--weight: {share:.3f}">{text}'

    head = "".join(
        f"<th{' class=number' * (column >= num_texts)}>{_escape(text)}" for column, text in enumerate(rows[0])
    )
    body = ("".join(cell(column, text) for column, text in enumerate(row)) for row in rows[1:])
    return f'<div class="scroll"><table><thead><tr>{head}</thead><tbody><tr>{"<tr>".join(body)}</tbody></table></div>'


def _difference_sections(report: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    for direction in ("better", "worse"):
        summary = f"{part['system']} is {direction} than {report['systems'][0]}: {len(part[direction])} sentences"
        articles = "\n".join(_sentence(report, entry) for entry in part[direction])
        yield f"<details open><summary>{_escape(summary)}</summary>\n{articles}</details>"


def _sentence(report: dict[str, Any], entry: dict[str, Any]) -> str:
    """Return a sentence with its outputs. Pieces of an output that the other output lacks are marked."""
    (first, first_text), (second, second_text) = entry["outputs"].items()
    scores = (
        f"{_escape(label_of(name))} {show_score(name, values[first])} → {show_score(name, values[second])}"
        for name, values in entry["scores"].items()
    )
    rows = [(name, _escape(entry[name])) for name in ("source", "reference") if name in entry]
    rows += [(_escape(first), _mark(first_text, second_text)), (_escape(second), _mark(second_text, first_text))]
    items = "".join(f'<dt>{name}<dd dir="auto">{text}' for name, text in rows)
    return f"<article><h3>line {entry['line']:,} · {' · '.join(scores)}</h3><dl>{items}</dl></article>"


def _mark(text: str, other: str) -> str:
    """Return the text with the pieces marked that the other text lacks."""
    pieces, other_pieces = _PIECE.findall(text), _PIECE.findall(other)
    parts = []
    for kind, start, end, _, _ in SequenceMatcher(None, pieces, other_pieces, autojunk=False).get_opcodes():
        part = _escape("".join(pieces[start:end]))
        parts.append(part if kind == "equal" or not part else f"<mark>{part}</mark>")
    return "".join(parts)
