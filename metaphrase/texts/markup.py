"""HTML and XML: texts to decode, and the tags around them, which return to the words that they enclosed."""

import html
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Comments and other markup that is no tag; tags, whose quotes may hold `>`; text. As in HTML, markup without an end goes on to
# the end of the page, so that reading takes time in proportion to the page.
_TOKEN = re.compile(
    r"""<!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)|<\?.*?(?:\?>|\Z)|<![^>]*(?:>|\Z)"""
    r"""|<(?P<end>/?)(?P<name>[A-Za-z_:][^\s/>]*)(?:[^"'>]|"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))*+(?:>|\Z)|[^<]+|<""",
    re.DOTALL,
)
_KEPT = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*(?:"[^"]*|'[^']*|)\bnotranslate\b""", re.IGNORECASE)
# A number with more digits is no character.
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|\w+);")
_HAS_TEXT = re.compile(r"[^\W_]")
# Elements inside a sentence.
_INLINE = {
    *("a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "data", "del", "dfn", "em", "font", "i", "img", "ins"),
    *("label", "mark", "q", "rp", "rt", "ruby", "s", "small", "span", "strike", "strong", "sub", "sup", "time", "tt"),
    *("u", "wbr"),
}
_EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
# Elements whose content is no text to translate: a word of the sentence, or a block.
_INLINE_KEPT, _BLOCK_KEPT = {"code", "kbd", "samp", "var", "math"}, {"pre", "script", "style", "svg", "textarea"}
# Their content is no markup.
_RAW = {"script", "style", "textarea"}


@dataclass(eq=False)
class Element:
    """A part of a text that tags enclose, by offsets. A tag that stands outside of the text is empty."""

    start: int
    end: int
    opening: str
    closing: str = ""
    parent: "Element | None" = None


@dataclass(eq=False)
class Atom:
    """A part of a text that stays as it is. Markup without text has equal offsets."""

    start: int
    end: int
    output: str  # stands in the place of the part
    expected: str = ""  # should be in the decoded text in that place
    parent: Element | None = None
    ignore_case: bool = False  # True if the decoded text may write `expected` in another case, and keeps it


class Tag(NamedTuple):
    """A tag of an element, or an atom without text, at an offset of the text."""

    offset: int
    markup: str
    owner: Element | Atom
    is_closing: bool = False


@dataclass
class MarkedText:
    """Text between two block tags, without tags, entities replaced by their characters. In plain text all stands for itself."""

    text: str = ""
    # Each stands behind the element around it.
    elements: list[Element] = field(default_factory=list)
    atoms: list[Atom] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    # By their character.
    entities: dict[str, str] = field(default_factory=dict)
    is_markup: bool = True

    def escape(self, text: str) -> str:
        """Return the text as markup, with the entities that the source has."""
        if not self.is_markup:
            return text
        return "".join(self.entities.get(letter) or html.escape(letter, quote=False) for letter in text)


class _Token(NamedTuple):
    raw: str
    name: str = ""  # of a tag
    is_end: bool = False
    is_empty: bool = False
    is_text: bool = False


def parse_markup(page: str, is_html: bool = True, keep_tags: Collection[str] = ()) -> list[str | MarkedText]:
    """Return the parts of a page in order: markup that stays as it is, and texts.

    In XML, an element is part of a sentence if text stands beside it. Tags that do not match are kept where they stand.
    `keep_tags` are names of further elements whose content is no text to translate.
    """
    keep_tags = {name.lower() if is_html else name for name in keep_tags}
    kept_names = keep_tags | _INLINE_KEPT | _BLOCK_KEPT if is_html else keep_tags
    inline_kept = _INLINE | _INLINE_KEPT | keep_tags
    tokens = list(_read_tokens(page, is_html))
    ends, inline = _match_tags(tokens)
    parts: list[str | MarkedText] = []
    builder, position, first = _Builder(), 0, 0
    while position < len(tokens):
        token, start = tokens[position], position
        position += 1
        is_block = False
        if not token.is_end and (token.name in kept_names or (token.name and _KEPT.search(token.raw))):
            position = (start if token.is_empty else ends.get(start, start)) + 1
            is_block = is_html and token.name not in inline_kept
            if not is_block:
                part = tokens[start:position]
                text = "".join(_unescape(token.raw) for token in part if token.is_text)
                builder.add_atom("".join(token.raw for token in part), " ".join(text.split()))
        elif token.is_text:
            builder.add_text(token.raw)
        elif token.raw.startswith("<!--"):
            builder.add_atom(token.raw)
        elif not token.name or not (token.name in _INLINE if is_html else start in inline):
            is_block = True
        elif token.is_empty:
            builder.add_atom(token.raw)
        elif token.is_end:
            builder.close(token)
        else:
            builder.open(token)
        if is_block:
            parts += [builder.finish(tokens[first:start]), "".join(token.raw for token in tokens[start:position])]
            builder, first = _Builder(), position
    return [*parts, builder.finish(tokens[first:])]


class _Builder:
    """Builder of a text between two block tags."""

    def __init__(self):
        self.marked = MarkedText()
        # Names and elements, the innermost last, and how many have each name.
        self.open_elements: list[tuple[str, Element | None]] = [("", None)]
        self.num_open: Counter[str] = Counter()
        # Elements that only a closing tag shows, the innermost first; and what has no parent yet.
        self.outer: list[Element] = []
        self.roots: list[Element | Atom] = []

    def add_text(self, raw: str) -> None:
        for entity in _ENTITY.findall(raw):
            if len(letter := html.unescape(entity)) == 1:
                self.marked.entities.setdefault(letter, entity)
        self.marked.text += _unescape(raw)

    def add_atom(self, raw: str, text: str = "") -> None:
        start = len(self.marked.text)
        atom = Atom(start, start + len(text), raw, text, self.open_elements[-1][1])
        self.marked.atoms.append(atom)
        self._add(raw, atom, is_tag=not text)
        self.marked.text += text

    def open(self, token: _Token) -> None:
        element = Element(len(self.marked.text), -1, token.raw, parent=self.open_elements[-1][1])
        self.marked.elements.append(element)
        self._add(token.raw, element)
        self.open_elements.append((token.name, element))
        self.num_open[token.name] += 1

    def _add(self, raw: str, owner: Element | Atom, is_tag: bool = True) -> None:
        if owner.parent is None:
            self.roots.append(owner)
        if is_tag:
            self.marked.tags.append(Tag(len(self.marked.text), raw, owner))

    def close(self, token: _Token) -> None:
        if not self.num_open[token.name]:
            # The element was opened before a block tag, so it is around all that stands before this tag.
            element = Element(0, len(self.marked.text), "")
            for inner in self.roots:
                inner.parent = element
            self.roots = [element]
            self.outer.append(element)
        else:
            name = ""
            while name != token.name:
                name, element = self.open_elements.pop()
                self.num_open[name] -= 1
                element.end = len(self.marked.text)
        element.closing = token.raw
        self.marked.tags.append(Tag(len(self.marked.text), token.raw, element, is_closing=True))

    def finish(self, tokens: Sequence[_Token]) -> str | MarkedText:
        """Return the text of the tokens, or their markup alone. An element that is still open goes on behind the block tag."""
        if not _HAS_TEXT.search(self.marked.text):
            return "".join(token.raw for token in tokens)
        for _, element in self.open_elements[1:]:
            element.end = len(self.marked.text)
        self.marked.elements[:0] = reversed(self.outer)
        return self.marked


def _unescape(raw: str) -> str:
    return _ENTITY.sub(lambda match: html.unescape(match.group()), raw)


def _read_tokens(page: str, is_html: bool) -> Iterator[_Token]:
    position = 0
    while match := _TOKEN.match(page, position):
        raw, position, name = match.group(), match.end(), match["name"] or ""
        name = name.lower() if is_html else name
        is_empty = bool(name) and (raw.endswith("/>") or (is_html and name in _EMPTY))
        is_text = not name and (raw == "<" or not raw.startswith("<"))
        yield _Token(raw, name, bool(match["end"]), is_empty and not match["end"], is_text)
        if is_html and name in _RAW and not match["end"]:
            end = re.compile(f"</{name}", re.IGNORECASE).search(page, position)
            stop = end.start() if end else len(page)
            if stop > position:
                yield _Token(page[position:stop], is_text=True)
            position = stop


def _match_tags(tokens: Sequence[_Token]) -> tuple[dict[int, int], set[int | None]]:
    """Return the position of the closing tag of each opening tag, and those of all tags in an element with text of its own."""
    starts, ends = defaultdict(list), {}
    # For each element the positions of its children's tags, with None for text. The elements of `levels` are open.
    elements: list[list[int | None]] = [[]]
    levels = elements[:]
    for position, token in enumerate(tokens):
        if token.is_text and _HAS_TEXT.search(token.raw):
            levels[-1].append(None)
        if not token.name:
            continue
        if token.is_end:
            if starts[token.name]:
                ends[starts[token.name].pop()] = position
            if len(levels) > 1:
                levels.pop()
        levels[-1].append(position)
        if not token.is_end and not token.is_empty:
            starts[token.name].append(position)
            elements.append([])
            levels.append(elements[-1])
    return ends, {position for element in elements if None in element for position in element}
