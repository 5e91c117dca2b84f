"""A marked text as sentences, with the markup between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from metaphrase.inference.texts.documents import Document
from metaphrase.inference.texts.markup import Atom, Element, MarkedText, Tag
from metaphrase.inference.texts.placement import Sentence
from metaphrase.inference.texts.terms import Terms

Span = tuple[int, int]
_Claim = tuple[Element | Atom, bool]  # owner, and True for its closing tag


@dataclass(frozen=True)
class TextPlan:
    """Sentences to decode, and what stands between them.

    Attributes:
        sentences: Sentences with the tags and the atoms inside.
        layout: Markup before the first sentence, between sentences, and behind the last one.
        marked: The text that they come from.
    """

    sentences: list[Sentence]
    layout: list[str]
    marked: MarkedText

    @classmethod
    def of(cls, marked: MarkedText, document: Document, terms: Terms) -> "TextPlan":
        """Give each tag and each atom to a sentence, or to the layout.

        A tag at the border of a sentence belongs to the layout, unless its element covers a part of that sentence alone. Of an
        element that covers several sentences, each sentence has the tags that stand inside it.
        """
        atoms = _find_atoms(marked, terms)
        spans = _extend(_find_spans(document), [(atom.start, atom.end) for atom in atoms])
        claims: set[_Claim] = set()
        sentences = [_cut_sentence(marked, atoms, span, claims) for span in spans]
        tags = [tag for tag in marked.tags if (tag.owner, tag.is_closing) not in claims]
        borders = [0, *(offset for span in spans for offset in span), len(marked.text)]
        layout = [
            _render_gap(marked, atoms, tags, (start, end))
            for start, end in zip(borders[::2], borders[1::2], strict=True)
        ]
        return cls(sentences, layout, marked)

    def join(self, sentences: Sequence[str]) -> str:
        """Return the markup with decoded sentences."""
        first, *gaps = self.layout
        return first + "".join(part for pair in zip(sentences, gaps, strict=True) for part in pair)


def _find_atoms(marked: MarkedText, terms: Terms) -> list[Atom]:
    """Return the atoms that have text, and the terms outside of them, in order."""
    atoms = [atom for atom in marked.atoms if atom.expected]
    for phrase in terms.find(marked.text):
        if all(phrase.end <= atom.start or atom.end <= phrase.start for atom in atoms):
            output = marked.escape(phrase.expected)
            atoms.append(Atom(phrase.start, phrase.end, output, phrase.expected, ignore_case=phrase.ignore_case))
    return sorted(atoms, key=lambda atom: atom.start)


def _find_spans(document: Document) -> list[Span]:
    offset, spans = len(document.layout[0]), []
    for sentence, gap in zip(document.sentences, document.layout[1:], strict=True):
        spans.append((offset, offset + len(sentence)))
        offset += len(sentence) + len(gap)
    return spans


def _extend(spans: Sequence[Span], atoms: Sequence[Span]) -> list[Span]:
    """Join and extend sentences, so that each atom is inside a sentence or outside of all."""
    extended: list[Span] = []
    for start, end in spans:
        for first, last in atoms:
            if first < end and start < last:
                start, end = min(start, first), max(end, last)
        if extended and start < extended[-1][1]:
            start, end = extended[-1][0], max(extended.pop()[1], end)
        extended.append((start, end))
    return extended


def _cut_sentence(marked: MarkedText, atoms: Sequence[Atom], span: Span, claims: set[_Claim]) -> Sentence:
    """Return a sentence with its elements and atoms, and add their tags to the claims."""
    start, end = span
    copies: dict[Element, Element] = {}
    for element in marked.elements:
        opens, closes = _claims_tags(element, start, end)
        claims.update((element, is_closing) for is_closing, flag in ((False, opens), (True, closes)) if flag)
        if opens or closes:
            offsets = max(element.start, start) - start, min(element.end, end) - start
            tags = element.opening if opens else "", element.closing if closes else ""
            copies[element] = Element(*offsets, *tags, _find_parent(element, copies))
    inside = [atom for atom in atoms if start <= atom.start and atom.end <= end]
    inside += [atom for atom in marked.atoms if not atom.expected and start < atom.start < end]
    claims.update((atom, False) for atom in inside)
    moved = [
        replace(atom, start=atom.start - start, end=atom.end - start, parent=_find_parent(atom, copies))
        for atom in inside
    ]
    return Sentence(marked.text[start:end], list(copies.values()), moved)


def _claims_tags(element: Element, start: int, end: int) -> tuple[bool, bool]:
    """Return True for each tag of an element, opening and closing, that belongs into a sentence."""
    opens = start < element.start < end or start == element.start < element.end < end
    closes = start < element.end < end or start < element.start < element.end == end
    return opens and bool(element.opening), closes and bool(element.closing)


def _find_parent(part: Element | Atom, copies: dict[Element, Element]) -> Element | None:
    parent = part.parent
    while parent is not None and parent not in copies:
        parent = parent.parent
    return copies.get(parent)


def _render_gap(marked: MarkedText, atoms: Sequence[Atom], tags: Sequence[Tag], span: Span) -> str:
    """Return the markup of a part between sentences, with the tags at its borders."""
    return "".join(_parts_of_gap(marked, atoms, tags, span))


def _parts_of_gap(marked: MarkedText, atoms: Sequence[Atom], tags: Sequence[Tag], span: Span) -> Iterator[str]:
    offset, end = span
    inside = [(atom.start, atom.end, atom.output) for atom in atoms if offset <= atom.start and atom.end <= end]
    inside += [(tag.offset, tag.offset, tag.markup) for tag in tags if offset <= tag.offset <= end]
    # Sorting keeps the order of tags at one offset.
    for first, last, markup in sorted(inside, key=lambda part: part[:2]):
        yield marked.escape(marked.text[offset:first])
        yield markup
        offset = last
    yield marked.escape(marked.text[offset:end])
