"""HTML and XML: texts to decode, and the tags around them, which return to the words that they enclosed."""

import html
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

# Comments and other markup that is no tag; tags, whose quotes may hold `>`; text. As in HTML, markup without an end goes on to
# the end of the page, so that reading takes time in proportion to the page.
_TOKEN = re.compile(
    r"""<!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)|<\?.*?(?:\?>|\Z)|<![^>]*(?:>|\Z)"""
    r"""|<(?P<end>/?)(?P<name>[A-Za-z_:][^\s/>]*)(?:[^"'>]|"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))*+(?:>|\Z)|[^<]+|<""",
    re.DOTALL,
)
_KEPT = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*(?:"[^"]*|'[^']*|)\bnotranslate\b""", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|\w+);")
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
    """A part of a text that tags enclose.

    Attributes:
        start: Offset in the text.
        end: Offset behind the last character.
        opening: The opening tag; empty if it stands before the text.
        closing: The closing tag; empty if it stands behind the text.
        parent: The element around this one.
    """

    start: int
    end: int
    opening: str
    closing: str = ""
    parent: "Element | None" = None


@dataclass(eq=False)
class Atom:
    """A part of a text that stays as it is.

    Attributes:
        start: Offset in the text.
        end: Offset behind the last character; equal to `start` for markup without text.
        output: What stands in the place of the part.
        expected: What the decoded text should contain in that place.
        parent: The element around this atom.
        ignore_case: True if the decoded text may write `expected` in another case, and keeps it.
    """

    start: int
    end: int
    output: str
    expected: str = ""
    parent: Element | None = None
    ignore_case: bool = False


@dataclass(frozen=True)
class Tag:
    """A tag of an element, or an atom without text.

    Attributes:
        offset: Where the tag stands in the text.
        owner: Its element, or the atom.
        is_closing: True for the closing tag of an element.
    """

    offset: int
    owner: Element | Atom
    is_closing: bool = False

    @property
    def markup(self) -> str:
        if isinstance(self.owner, Atom):
            return self.owner.output
        return self.owner.closing if self.is_closing else self.owner.opening


@dataclass
class MarkedText:
    """Text between two block tags.

    Attributes:
        text: The text without tags, entities replaced by their characters.
        elements: Elements, each behind the element around it.
        atoms: Parts that stay as they are, in order.
        tags: Tags and atoms without text, in order.
        entities: Entities of the text by their character.
        is_markup: False for plain text, whose characters stand for themselves.
    """

    text: str = ""
    elements: list[Element] = field(default_factory=list)
    atoms: list[Atom] = field(default_factory=list)
    tags: list["Tag"] = field(default_factory=list)
    entities: dict[str, str] = field(default_factory=dict)
    is_markup: bool = True

    def escape(self, text: str) -> str:
        """Return the text as markup, with the entities that the source has."""
        if not self.is_markup:
            return text
        return "".join(self.entities.get(letter) or html.escape(letter, quote=False) for letter in text)


@dataclass
class _Token:
    raw: str
    name: str = ""  # of a tag
    is_end: bool = False
    is_empty: bool = False

    @property
    def is_text(self) -> bool:
        return not self.name and (self.raw == "<" or not self.raw.startswith("<"))


def parse_markup(page: str, is_html: bool = True, keep_tags: Collection[str] = ()) -> list[str | MarkedText]:
    """Return the parts of a page in order: markup that stays as it is, and texts.

    In XML, an element is part of a sentence if text stands beside it. Tags that do not match are kept where they stand.

    Args:
        page: HTML or XML.
        is_html: False for XML.
        keep_tags: Names of further elements whose content is no text to translate.
    """
    return _Parser(page, is_html, keep_tags).parse()


class _Parser:
    def __init__(self, page: str, is_html: bool, keep_tags: Collection[str]):
        self.is_html = is_html
        self.keep_tags = {name.lower() if is_html else name for name in keep_tags}
        self.kept_names = self.keep_tags | _INLINE_KEPT | _BLOCK_KEPT if is_html else self.keep_tags
        self.tokens = list(_read_tokens(page, is_html))
        self.ends = _find_ends(self.tokens)
        self.parts: list[str | MarkedText] = []
        self.inline = set() if is_html else _find_inline(self.tokens)
        self.begin()

    def begin(self) -> None:
        """Begin a text behind a block tag."""
        self.current, self.raw, self.open = MarkedText(), [], []
        self.num_open: Counter[str] = Counter()
        # Elements that only a closing tag shows, the innermost first; and what has no parent yet.
        self.outer: list[Element] = []
        self.roots: list[Element | Atom] = []

    def parse(self) -> list[str | MarkedText]:
        position = 0
        while position < len(self.tokens):
            token = self.tokens[position]
            if not token.is_end and (token.name in self.kept_names or (token.name and _KEPT.search(token.raw))):
                end = (position if token.is_empty else self.ends.get(position, position)) + 1
                self.add_kept(token.name, self.tokens[position:end])
            else:
                end = position + 1
                self.add(token, position)
            position = end
        self.finish()
        return self.parts

    def add(self, token: _Token, position: int) -> None:
        if token.is_text:
            self.add_text(token.raw)
        elif token.raw.startswith("<!--"):
            self.add_atom(token.raw)
        elif not token.name or not (token.name in _INLINE if self.is_html else position in self.inline):
            self.add_block(token.raw)
        elif token.is_empty:
            self.add_atom(token.raw)
        elif token.is_end:
            self.close(token)
        else:
            element = Element(len(self.current.text), -1, token.raw, parent=self.parent())
            self.open.append((token.name, element))
            self.num_open[token.name] += 1
            self.current.elements.append(element)
            self.add_root(element)
            self.add_tag(token.raw, element)

    def parent(self) -> Element | None:
        return self.open[-1][1] if self.open else None

    def add_root(self, owner: Element | Atom) -> None:
        if owner.parent is None:
            self.roots.append(owner)

    def add_tag(self, raw: str, owner: Element | Atom, is_closing: bool = False) -> None:
        self.raw.append(raw)
        self.current.tags.append(Tag(len(self.current.text), owner, is_closing))

    def add_text(self, raw: str) -> None:
        self.raw.append(raw)
        for entity in _ENTITY.findall(raw):
            if len(letter := html.unescape(entity)) == 1:
                self.current.entities.setdefault(letter, entity)
        self.current.text += _ENTITY.sub(lambda match: html.unescape(match.group()), raw)

    def add_atom(self, raw: str, text: str = "") -> None:
        start = len(self.current.text)
        atom = Atom(start, start + len(text), raw, text, self.parent())
        self.current.atoms.append(atom)
        self.add_root(atom)
        if text:
            self.raw.append(raw)
            self.current.text += text
        else:
            self.add_tag(raw, atom)

    def add_kept(self, name: str, tokens: Sequence[_Token]) -> None:
        raw = "".join(token.raw for token in tokens)
        if self.is_html and name not in _INLINE | _INLINE_KEPT | self.keep_tags:
            self.add_block(raw)
        else:
            self.add_atom(raw, " ".join("".join(html.unescape(token.raw) for token in tokens if token.is_text).split()))

    def add_block(self, raw: str) -> None:
        self.finish()
        self.parts.append(raw)
        self.begin()

    def close(self, token: _Token) -> None:
        if not self.num_open[token.name]:
            # The element was opened before a block tag, so it is around all that stands before this tag.
            element = Element(0, len(self.current.text), "")
            for inner in self.roots:
                inner.parent = element
            self.roots = [element]
            self.outer.append(element)
        else:
            name = ""
            while name != token.name:
                name, element = self.open.pop()
                self.num_open[name] -= 1
                element.end = len(self.current.text)
        element.closing = token.raw
        self.add_tag(token.raw, element, is_closing=True)

    def finish(self) -> None:
        """End a text at a block tag. An element that is still open goes on behind the tag."""
        for _, element in self.open:
            element.end = len(self.current.text)
        self.current.elements[:0] = reversed(self.outer)
        if _HAS_TEXT.search(self.current.text):
            self.parts.append(self.current)
        elif self.raw:
            self.parts.append("".join(self.raw))


def _read_tokens(page: str, is_html: bool) -> Iterator[_Token]:
    """Yield tags, comments and texts. Together they are the page."""
    position = 0
    while match := _TOKEN.match(page, position):
        raw, position, name = match.group(), match.end(), match["name"] or ""
        name = name.lower() if is_html else name
        is_empty = bool(name) and (raw.endswith("/>") or (is_html and name in _EMPTY))
        yield _Token(raw, name, bool(match["end"]), is_empty and not match["end"])
        if is_html and name in _RAW and not match["end"]:
            end = re.compile(f"</{name}", re.IGNORECASE).search(page, position)
            stop = end.start() if end else len(page)
            if stop > position:
                yield _Token(page[position:stop])
            position = stop


def _find_ends(tokens: Sequence[_Token]) -> dict[int, int]:
    """Return the position of the closing tag for that of each opening tag."""
    waiting: dict[str, list[int]] = {}
    ends: dict[int, int] = {}
    for position, token in enumerate(tokens):
        if token.name and not token.is_empty:
            starts = waiting.setdefault(token.name, [])
            if not token.is_end:
                starts.append(position)
            elif starts:
                ends[starts.pop()] = position
    return ends


def _find_inline(tokens: Sequence[_Token]) -> set[int]:
    """Return the positions of XML tags that stand in an element with text of its own."""
    inline: set[int] = set()
    # For each open element the positions of its children's tags, with None for text.
    levels: list[list[int | None]] = [[]]

    def close(level: list[int | None]) -> None:
        if None in level:
            inline.update(position for position in level if position is not None)

    for position, token in enumerate(tokens):
        if token.name and token.is_end and len(levels) > 1:
            close(levels.pop())
        if token.name:
            levels[-1].append(position)
        elif token.is_text and _HAS_TEXT.search(token.raw):
            levels[-1].append(None)
        if token.name and not token.is_end and not token.is_empty:
            levels.append([])
    for level in levels:
        close(level)
    return inline
