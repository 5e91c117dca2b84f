"""Sentences of a text with markup and terms: what belongs to each, and where it stands in the target."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from metaphrase.errors import MetaphraseError
from metaphrase.inference.generator import Document
from metaphrase.texts.markup import Atom, Element, MarkedText

Span = tuple[int, int]
# A character of a script without spaces is a word of its own.
SPACELESS = r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
_WORD = re.compile(SPACELESS + r"|[^\W_]+|[^\w\s]|_+")


def find_words(text: str) -> list[Span]:
    """Return the offsets of words and punctuation marks."""
    return [match.span() for match in _WORD.finditer(text)]


@dataclass(frozen=True)
class Links:
    """Offsets of the words of a sentence and of its target, and the index of the source word of each target word."""

    source: list[Span]
    target: list[Span]
    best: list[int | None]

    def find(self, start: int, end: int) -> Span | None:
        """Return the offsets of the one run of target words that belongs to a part of the source."""
        return self._span_of({index for index, word in enumerate(self.source) if word[0] < end and word[1] > start})

    def find_gap(self, offset: int) -> int:
        """Return the offset in the target for a place between two source words."""
        following = next((index for index, word in enumerate(self.source) if word[0] == offset), None)
        touches = any(word[1] == offset for word in self.source)
        # A place directly before a word stays before its target. Any other one stands behind the target of the word before it.
        if following is not None and not touches and (span := self._span_of({following})):
            return span[0]
        for index in reversed([index for index, word in enumerate(self.source) if word[1] <= offset]):
            if span := self._span_of({index}):
                return span[1]
        return 0

    def _span_of(self, indices: set[int]) -> Span | None:
        # The run has the most words of the part, less those of other parts. So a word far away does not stretch it.
        best, best_sum, start, total = None, 0.0, 0, 0.0
        for position, index in enumerate(self.best):
            if total <= 0:
                start, total = position, 0.0
            # A word without a link weighs little.
            total += 1 if index in indices else -0.01 if index is None else -1
            if total > best_sum:
                best, best_sum = (self.target[start][0], self.target[position][1]), total
        return best


@dataclass
class Sentence:
    """A sentence of a marked text, with its atoms and the elements that have a tag inside it, by offsets in the sentence."""

    text: str
    elements: list[Element]  # without `opening` one begins with the sentence, without `closing` it ends with it
    atoms: list[Atom]
    escape: Callable[[str], str]  # turns a part of the target into markup

    def find_atoms(self, target: str) -> tuple[dict[Atom, Span], list[Atom]]:
        """Return where a target has the expected text of atoms, and the atoms whose text it lacks."""
        spans, missing = {}, []
        for atom in sorted((atom for atom in self.atoms if atom.expected), key=lambda atom: -len(atom.expected)):
            pattern = re.escape(atom.expected)
            if atom.ignore_case:
                # A term is no part of a longer word.
                pattern = rf"(?i:(?<!\w){pattern}(?!\w))"
            matches = (match.span() for match in re.finditer(pattern, target))
            span = next((span for span in matches if not _overlaps(span, spans.values())), None)
            if span is None:
                missing.append(atom)
            else:
                spans[atom] = span
        return spans, missing

    def render(self, target: str, links: Links) -> tuple[str, int]:
        """Return the target with all tags and atoms, and the number of atoms that the alignment had to place."""
        spans, missing = self.find_atoms(target)
        for atom, span in spans.items():
            if atom.ignore_case:
                atom.output = self.escape(target[slice(*span)])
        for atom in missing:
            span = links.find(atom.start, atom.end)
            most_words = 2 * len(self.text[atom.start : atom.end].split()) + 1
            # A model that does not know a word may look at it all the time. Its sentence must not be lost.
            if span is None or len(find_words(target[slice(*span)])) > most_words or _overlaps(span, spans.values()):
                offset = _snap(links.find_gap(atom.start), spans.values())
                span = (offset, offset)
                # Spaces part the term from the words around it.
                before, after = target[:offset][-1:].strip(), target[offset : offset + 1].isalnum()
                atom.output = " " * bool(before) + atom.output + " " * after
            spans[atom] = span
        filled = list(spans.values())
        spans |= {atom: (_snap(links.find_gap(atom.start), filled),) * 2 for atom in self.atoms if atom not in spans}
        full = sorted((atom for atom in self.atoms if spans[atom][0] < spans[atom][1]), key=spans.get)
        inner: dict[Element | None, list[Element | Atom]] = {}
        for part in (*self.elements, *(atom for atom in self.atoms if spans[atom][0] == spans[atom][1])):
            inner.setdefault(part.parent, []).append(part)

        def find_span(element: Element, start: int, end: int) -> Span:
            """Return the part of the target that an element encloses, between two offsets."""
            span = links.find(element.start, element.end) or (links.find_gap(element.start),) * 2
            parts = [span, *(spans[atom] for atom in full if element in _elements_around(atom))]
            atoms = [spans[atom] for atom in full]
            first = _snap(min(start for start, _ in parts), atoms, before=True)
            last = _snap(max(end for _, end in parts), atoms)
            first = min(max(first, start), end) if element.opening else start
            return first, min(max(last, first), end) if element.closing else end

        def render_text(start: int, end: int) -> Iterator[str]:
            """Yield a part of the target without elements. Atoms take the place of their spans."""
            for atom in full:
                first, last = spans[atom]
                if start <= first and last <= end:
                    yield self.escape(target[start:first])
                    yield atom.output
                    start = last
            yield self.escape(target[start:end])

        def rank(part: Element | Atom) -> int:
            # An element that begins with the sentence is first, one that ends with it is last.
            if isinstance(part, Atom) or (part.opening and part.closing):
                return 1
            return 0 if part.closing else 2

        def render_part(parent: Element | None, start: int, end: int) -> Iterator[str]:
            """Yield the markup of a part of the target, with the elements and the empty atoms directly inside `parent`."""
            parts = inner.get(parent, [])
            places = {part: spans[part] if isinstance(part, Atom) else find_span(part, start, end) for part in parts}
            for part in sorted(parts, key=lambda part: (rank(part), places[part][0], part.start)):
                first = min(max(places[part][0], start), end)
                yield from render_text(start, first)
                start = first
                if isinstance(part, Atom):
                    yield part.output
                    continue
                start = max(places[part][1], first)
                yield part.opening
                yield from render_part(part, first, start)
                yield part.closing
            yield from render_text(start, end)

        return "".join(render_part(None, 0, len(target))), len(missing)


def _overlaps(span: Span, taken: Iterable[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in taken)


def _snap(offset: int, spans: Iterable[Span], before: bool = False) -> int:
    """Return an offset outside of all spans, since no tag may stand inside an atom: behind a span, or before it."""
    return next((start if before else end for start, end in spans if start < offset < end), offset)


def _elements_around(part: Element | Atom) -> Iterator[Element]:
    """Yield the elements around a part, the innermost first."""
    while (part := part.parent) is not None:
        yield part


# Patterns with a name.
PATTERNS = {
    "url": r"(?:https?://|www\.)[^\s<>\"']*[^\s<>\"'.,;:!?)\]}]",
    "email": r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "placeholder": r"\{\{?[^{}\s]*\}?\}|%(?:\(\w+\))?[sdif]\b|\$\{[^{}\s]+\}",
    "number": r"\d+(?:[.,:/]\d+)*",
}


class Terms:
    """Patterns that stay as they are, and terms with a given translation."""

    def __init__(self, keep: Iterable[str] = (), glossary: Mapping[str, str] | None = None):
        """Compile patterns and terms. Raises `MetaphraseError` if an expression is wrong or a term is blank.

        Args:
            keep: Names of `PATTERNS`, or regular expressions.
            glossary: Target term by source term. A source term in lower case is found in any case.
        """
        try:
            self._patterns = [re.compile(PATTERNS.get(pattern, pattern)) for pattern in keep]
        except re.error as error:
            names = ", ".join(PATTERNS)
            raise MetaphraseError(f"`keep` must have names of {names}, or expressions: {error}.") from error
        self._terms = {source.strip(): target.strip() for source, target in (glossary or {}).items()}
        if wrong := [entry for entry in self._terms.items() if not all(entry)]:
            raise MetaphraseError(f"`glossary` must have a source and a target in each entry, got {wrong[0]}.")
        # A longer term wins.
        terms = "|".join(re.escape(source) for source in sorted(self._terms, key=len, reverse=True))
        self._term = re.compile(rf"(?<!\w)(?:{terms or '(?!)'})(?!\w)", re.IGNORECASE)

    def __bool__(self) -> bool:
        return bool(self._patterns or self._terms)

    def find(self, marked: MarkedText) -> list[Atom]:
        """Return the atoms that have text, in order: those of the markup, then patterns and terms outside of earlier ones."""
        atoms, text = [atom for atom in marked.atoms if atom.expected], marked.text
        matches = [(match, match.group(), False) for pattern in self._patterns for match in pattern.finditer(text)]
        for match in self._term.finditer(text):
            # Only a term in lower case equals another spelling in lower case.
            target = self._terms.get(match.group(), self._terms.get(match.group().lower()))
            matches.append((match, target, True))
        for match, expected, ignore_case in matches:
            start, end = match.span()
            if expected and all(end <= atom.start or atom.end <= start for atom in atoms):
                atoms.append(Atom(start, end, marked.escape(expected), expected, ignore_case=ignore_case))
        return sorted(atoms, key=lambda atom: atom.start)


def read_glossary(path: str | Path) -> dict[str, str]:
    """Read a file with a source term, a tab and a target term on each line; `MetaphraseError` for another number of columns."""
    rows = [line.split("\t") for line in Path(path).read_text("utf-8-sig").split("\n") if line.strip()]
    if wrong := [row for row in rows if len(row) != 2]:
        raise MetaphraseError(f"`glossary` must have two columns, source and target term, got {wrong[0]} in {path}.")
    return dict(rows)


def _cut_sentence(
    marked: MarkedText, near: Iterable[Element], atoms: Sequence[Atom], span: Span, claims: set[tuple]
) -> Sentence:
    """Return a sentence with its elements, which are among those near to it, and its atoms; add their tags to the claims."""
    start, end = span
    copies: dict[Element, Element] = {}

    def find_parent(part: Element | Atom) -> Element | None:
        return next((copies[element] for element in _elements_around(part) if element in copies), None)

    for element in near:
        opens = start < element.start < end or start == element.start < element.end < end
        closes = start < element.end < end or start < element.start < element.end == end
        opening, closing = element.opening if opens else "", element.closing if closes else ""
        claims.update((element, is_closing) for is_closing, tag in ((False, opening), (True, closing)) if tag)
        if opening or closing:
            offsets = max(element.start, start) - start, min(element.end, end) - start
            copies[element] = Element(*offsets, opening, closing, find_parent(element))
    inside = [atom for atom in atoms if start <= atom.start and atom.end <= end]
    inside += [atom for atom in marked.atoms if not atom.expected and start < atom.start < end]
    claims.update((atom, False) for atom in inside)
    moved = [replace(atom, start=atom.start - start, end=atom.end - start, parent=find_parent(atom)) for atom in inside]
    return Sentence(marked.text[start:end], list(copies.values()), moved, marked.escape)


def plan_text(marked: MarkedText, document: Document, terms: Terms) -> tuple[list[Sentence], list[str]]:
    """Return the sentences of a marked text, each with its tags and atoms, and the markup around them.

    A tag at the border of a sentence belongs to the layout, unless its element covers a part of that sentence alone. Of an
    element that covers several sentences, each sentence has the tags that stand inside it.
    """
    atoms = terms.find(marked)
    offset, spans = len(document.layout[0]), []
    for sentence, gap in zip(document.sentences, document.layout[1:], strict=True):
        start, end = offset, offset + len(sentence)
        offset = end + len(gap)
        # Join and extend sentences, so that each atom is inside a sentence or outside of all.
        for atom in atoms:
            if atom.start < end and start < atom.end:
                start, end = min(start, atom.start), max(end, atom.end)
        if spans and start < spans[-1][1]:
            start, end = spans[-1][0], max(spans.pop()[1], end)
        spans.append((start, end))
    claims: set[tuple[Element | Atom, bool]] = set()
    # A page may have thousands of elements and sentences.
    ends = sorted((offset, index) for index, part in enumerate(marked.elements) for offset in (part.start, part.end))
    sentences = []
    for span in spans:
        inner_ends = ends[bisect_left(ends, (span[0], 0)) : bisect_left(ends, (span[1] + 1, 0))]
        near = [marked.elements[index] for index in sorted({index for _, index in inner_ends})]
        sentences.append(_cut_sentence(marked, near, atoms, span, claims))
    parts = [(atom.start, atom.end, atom.output) for atom in atoms]
    parts += [(offset, offset, markup) for offset, markup, *claim in marked.tags if tuple(claim) not in claims]
    # Sorting keeps the order of tags at one offset.
    parts.sort(key=lambda part: part[:2])
    borders, layout = [0, *(offset for span in spans for offset in span), len(marked.text)], []
    for offset, end in zip(borders[::2], borders[1::2], strict=True):
        gap = ""
        inside = parts[bisect_left(parts, offset, key=itemgetter(0)) : bisect_left(parts, end + 1, key=itemgetter(0))]
        for first, last, markup in [part for part in inside if part[1] <= end]:
            gap += marked.escape(marked.text[offset:first]) + markup
            offset = last
        layout.append(gap + marked.escape(marked.text[offset:end]))
    return sentences, layout
