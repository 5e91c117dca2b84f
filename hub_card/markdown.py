"""Write escaped text and code in Markdown, and tables of them."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def plain(value: Any) -> str:
    """Return a value as one line of text, with the special characters of Markdown and HTML escaped."""
    text = _one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}#|~!$])", r"\\\1", text)


def from_plain(text: str) -> str:
    """Undo `plain`."""
    return html.unescape(re.sub(r"\\(.)", r"\1", text))


def code(value: Any) -> str:
    """Return a value as a span of code that may stand in a table."""
    text = _one_line(value).replace("|", "\\|")
    if not text:
        return "(empty)"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Header and cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bullets(items: Iterable[str]) -> str:
    """Return a bullet list. The items are Markdown."""
    return "\n".join(f"- {item}" for item in items)


def number(value: Any) -> str:
    """Return a number with at most four digits, a boolean as yes or no, and any other value as code."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return code(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
