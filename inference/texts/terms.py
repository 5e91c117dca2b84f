"""Parts of a source that every target must keep or name by a given term."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Patterns with a name.
PATTERNS = {
    "url": r"(?:https?://|www\.)[^\s<>\"']*[^\s<>\"'.,;:!?)\]}]",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "placeholder": r"\{\{?[^{}\s]*\}?\}|%(?:\(\w+\))?[sdif]\b|\$\{[^{}\s]+\}",
    "number": r"\d+(?:[.,:/]\d+)*",
}

_LOOP = re.compile(r"(\S.{0,79}?)(?:\s*\1){3,}", re.DOTALL)
# Dots and laughter are no loops.
_SHORTEST_LOOP = 12


@dataclass(frozen=True)
class Phrase:
    """A part of a source, from offset `start` to `end`, and what its target must contain."""

    start: int
    end: int
    expected: str
    ignore_case: bool = False


class Terms:
    """Patterns that stay as they are, and terms with a given translation."""

    def __init__(self, keep: Iterable[str] = (), glossary: Mapping[str, str] | None = None):
        """Compile patterns and terms.

        Args:
            keep: Names of `PATTERNS`, or regular expressions.
            glossary: Target term by source term. A source term in lower case is found in any case.

        Raises:
            ValueError: If an expression or a term is wrong.
        """
        self._patterns = [_compile(pattern) for pattern in keep]
        self._terms = {}
        for source, target in (glossary or {}).items():
            if not source.strip() or not target.strip():
                raise ValueError(
                    f"`glossary` must have a source and a target in each entry, got {source!r} and {target!r}."
                )
            self._terms[source.strip()] = target.strip()
        self._folded = {source: target for source, target in self._terms.items() if source == source.lower()}
        # A longer term wins.
        terms = "|".join(re.escape(source) for source in sorted(self._terms, key=len, reverse=True))
        self._term = re.compile(rf"(?<!\w)(?:{terms})(?!\w)", re.IGNORECASE) if terms else None

    @property
    def glossary(self) -> dict[str, str]:
        """Target term by source term."""
        return dict(self._terms)

    def __bool__(self) -> bool:
        return bool(self._patterns or self._terms)

    def find(self, text: str) -> list[Phrase]:
        """Return the phrases of a text in order. Earlier patterns win, and terms come last."""
        phrases: list[Phrase] = []
        for pattern in self._patterns:
            phrases += (Phrase(*match.span(), match.group()) for match in pattern.finditer(text) if match.group())
        for match in self._term.finditer(text) if self._term else ():
            target = self._terms.get(match.group(), self._folded.get(match.group().lower()))
            if target is not None:
                phrases.append(Phrase(*match.span(), target, ignore_case=True))
        chosen: list[Phrase] = []
        for phrase in phrases:
            if all(phrase.end <= other.start or other.end <= phrase.start for other in chosen):
                chosen.append(phrase)
        return sorted(chosen, key=lambda phrase: phrase.start)


def _compile(pattern: str) -> re.Pattern:
    try:
        return re.compile(PATTERNS.get(pattern, pattern))
    except re.error as error:
        names = ", ".join(PATTERNS)
        raise ValueError(
            f"`keep` must have a name of {names}, or a regular expression, got {pattern!r}: {error}."
        ) from None


def read_glossary(path: str | Path) -> dict[str, str]:
    """Read a file with a source term, a tab and a target term on each line.

    Raises:
        ValueError: If a line has not two columns.
    """
    terms = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        parts = line.split("\t")
        if len(parts) != 2 or not all(part.strip() for part in parts):
            raise ValueError(
                f"`glossary` must have a source term, a tab and a target term, got line {number} of {path}: {line!r}."
            )
        terms[parts[0]] = parts[1]
    return terms


def find_loop(source: str, target: str) -> str | None:
    """Return a part of a target that follows itself three times or more, if the source has no such part."""
    match = next((match for match in _LOOP.finditer(target) if len(match.group()) >= _SHORTEST_LOOP), None)
    return match.group(1) if match and not _LOOP.search(source) else None
