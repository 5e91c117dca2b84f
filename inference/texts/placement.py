"""Put tags and kept parts of a sentence into its decoded text, by a word alignment."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from metaphrase.inference.texts.markup import Atom, Element

Span = tuple[int, int]
# A character of a script without spaces is a word of its own.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+|[^\w\s]|_+"
)


def find_words(text: str) -> list[Span]:
    """Return the offsets of words and punctuation marks."""
    return [match.span() for match in _WORD.finditer(text)]


@dataclass(frozen=True)
class Links:
    """Words of a sentence and of its target.

    Attributes:
        source: Offsets of each source word.
        target: Offsets of each target word.
        best: Index of the source word of each target word, or `None`.
    """

    source: list[Span]
    target: list[Span]
    best: list[int | None]

    def find(self, start: int, end: int) -> Span | None:
        """Return the offsets of the target words that belong to a part of the source: one run of words.

        The run has the most words of the part, less those of other parts. So a word far away does not stretch it.
        """
        return self._span_of({index for index, word in enumerate(self.source) if word[0] < end and word[1] > start})

    def find_gap(self, offset: int) -> int:
        """Return the offset in the target for a place between two source words.

        A place directly before a word stays before its target. Any other one stands behind the target of the word before it.
        """
        following = next((index for index, word in enumerate(self.source) if word[0] == offset), None)
        touches = any(word[1] == offset for word in self.source)
        if following is not None and not touches and (span := self._span_of({following})):
            return span[0]
        for index in reversed([index for index, word in enumerate(self.source) if word[1] <= offset]):
            if span := self._span_of({index}):
                return span[1]
        return 0

    def _span_of(self, indices: set[int]) -> Span | None:
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
    """A sentence of a marked text.

    Attributes:
        text: The sentence.
        elements: Elements with a tag inside the sentence, each behind the element around it; offsets in the sentence. Without
            `opening` an element begins with the sentence, without `closing` it ends with it.
        atoms: Parts that stay as they are.
    """

    text: str
    elements: list[Element]
    atoms: list[Atom]

    def find_atoms(self, target: str) -> tuple[dict[Atom, Span], list[Atom]]:
        """Return where a target has the expected text of atoms, and the atoms whose text it lacks."""
        spans, missing = {}, []
        for atom in sorted(self.atoms, key=lambda atom: -len(atom.expected)):
            if not atom.expected:
                continue
            # A term is no part of a longer word.
            before, after = ("(?<!\\w)", "(?!\\w)") if atom.ignore_case else ("", "")
            flags = re.IGNORECASE if atom.ignore_case else 0
            matches = (match.span() for match in re.finditer(before + re.escape(atom.expected) + after, target, flags))
            span = next((span for span in matches if not _overlaps(span, spans.values())), None)
            if span is None:
                missing.append(atom)
            else:
                spans[atom] = span
        return spans, missing

    def render(self, target: str, links: Links, escape: Callable[[str], str]) -> tuple[str, int]:
        """Return the target with all tags and atoms, and the number of atoms that the alignment had to place.

        Args:
            target: The decoded text.
            links: Alignment of the two.
            escape: Turns a part of the target into markup.
        """
        spans, missing = self.find_atoms(target)
        for atom, span in spans.items():
            if atom.ignore_case:
                atom.output = escape(target[slice(*span)])
        for atom in missing:
            span = links.find(atom.start, atom.end)
            most_words = 2 * len(self.text[atom.start : atom.end].split()) + 1
            # A model that does not know a word may look at it all the time. Its sentence must not be lost.
            if span is None or len(find_words(target[slice(*span)])) > most_words or _overlaps(span, spans.values()):
                span = (_snap(links.find_gap(atom.start), spans.values()),) * 2
                atom.output = _with_spaces(atom.output, target, span[0])
            spans[atom] = span
        for atom in self.atoms:
            if atom not in spans:
                spans[atom] = (_snap(links.find_gap(atom.start), spans.values()),) * 2
        return "".join(_Renderer(self, target, links, escape, spans).render_part(None, 0, len(target))), len(missing)


def _overlaps(span: Span, taken: Iterable[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in taken)


def _with_spaces(text: str, target: str, offset: int) -> str:
    """Return a term to insert into a target, with the spaces that part it from the words around it."""
    before, after = target[:offset][-1:], target[offset : offset + 1]
    return " " * bool(before.strip()) + text + " " * after.isalnum()


def _snap(offset: int, spans: Iterable[Span], before: bool = False) -> int:
    """Return an offset outside of all spans, since no tag may stand inside an atom: behind a span, or before it."""
    return next((start if before else end for start, end in spans if start < offset < end), offset)


class _Renderer:
    def __init__(
        self, sentence: Sentence, target: str, links: Links, escape: Callable[[str], str], spans: dict[Atom, Span]
    ):
        self.target, self.links, self.escape, self.spans = target, links, escape, spans
        self.atoms = [atom for atom in sentence.atoms if not _is_empty(spans[atom])]
        self.inner: dict[Element | None, list[Element | Atom]] = {}
        for part in (*sentence.elements, *(atom for atom in sentence.atoms if _is_empty(spans[atom]))):
            self.inner.setdefault(part.parent, []).append(part)

    def render_part(self, parent: Element | None, start: int, end: int) -> Iterator[str]:
        """Yield the markup of a part of the target, with the elements and the empty atoms directly inside `parent`."""
        spans = {}
        for part in self.inner.get(parent, []):
            spans[part] = self.spans[part] if isinstance(part, Atom) else self.find_span(part, start, end)
        position = start
        for part in sorted(spans, key=lambda part: (_rank(part), spans[part][0], part.start)):
            first = min(max(spans[part][0], position), end)
            yield from self.render_text(position, first)
            position = first
            if isinstance(part, Atom):
                yield part.output
                continue
            position = max(spans[part][1], first)
            yield part.opening
            yield from self.render_part(part, first, position)
            yield part.closing
        yield from self.render_text(position, end)

    def find_span(self, element: Element, start: int, end: int) -> Span:
        """Return the part of the target that an element encloses, between two offsets."""
        span = self.links.find(element.start, element.end) or (self.links.find_gap(element.start),) * 2
        inner = [self.spans[atom] for atom in self.atoms if _is_inside(atom, element)]
        first, last = min([span[0], *(other[0] for other in inner)]), max([span[1], *(other[1] for other in inner)])
        atoms = [self.spans[atom] for atom in self.atoms]
        first, last = _snap(first, atoms, before=True), _snap(last, atoms)
        first = min(max(first, start), end) if element.opening else start
        return first, min(max(last, first), end) if element.closing else end

    def render_text(self, start: int, end: int) -> Iterator[str]:
        """Yield a part of the target without elements. Atoms take the place of their spans."""
        for atom in sorted(self.atoms, key=self.spans.get):
            first, last = self.spans[atom]
            if start <= first and last <= end:
                yield self.escape(self.target[start:first])
                yield atom.output
                start = last
        yield self.escape(self.target[start:end])


def _is_empty(span: Span) -> bool:
    return span[0] == span[1]


def _rank(part: Element | Atom) -> int:
    """Return the order of parts: one that begins with the sentence is first, one that ends with it is last."""
    if isinstance(part, Atom) or (part.opening and part.closing):
        return 1
    return 0 if part.closing else 2


def _is_inside(atom: Atom, element: Element) -> bool:
    parent = atom.parent
    while parent is not None and parent is not element:
        parent = parent.parent
    return parent is element
