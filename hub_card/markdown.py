"""Markdown pieces: text and code that cannot break out of their place, and tables of them."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def plain(value: Any) -> str:
    """Returns a value as one line of running text, with every character that Markdown or HTML would read escaped."""
    text = _one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}#|~!$])", r"\\\1", text)


def from_plain(text: str) -> str:
    """Returns the text that `plain` wrote so."""
    return html.unescape(re.sub(r"\\(.)", r"\1", text))


def code(value: Any) -> str:
    """Returns a value as a span of code that may stand in a table."""
    text = _one_line(value).replace("|", "\\|")
    if not text:
        return "(empty)"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; header and cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bullets(items: Iterable[str]) -> str:
    """Returns a list of points that are Markdown already."""
    return "\n".join(f"- {item}" for item in items)


def number(value: Any) -> str:
    """Returns a number as people read it, to four digits, a truth as yes or no, and anything else as code."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return code(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
