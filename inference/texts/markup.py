"""HTML and XML: texts to decode, and the tags around them, which return to the words that they enclosed."""

import bisect
import html
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

# Openings and closings of markup that is no tag.
_SPECIAL = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<?", "?>"), ("<!", ">"))
_TAG = re.compile(r"<(/?)([A-Za-z_:][^\s/>]*)")
_KEPT = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*(?:"[^"]*|'[^']*|)\bnotranslate\b""", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|\w+);")
_HAS_TEXT = re.compile(r"[^\W_]")
# Elements inside a sentence.
_INLINE = set(
    re.findall(
        r"\w+",
        """
    a abbr acronym b bdi bdo big cite data del dfn em font i img ins label mark q rp rt ruby s small span strike strong sub sup
    time tt u wbr
""",
    )
)
_EMPTY = set(re.findall(r"\w+", "area base br col embed hr img input link meta param source track wbr"))
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
            end = self.find_kept_end(position)
            raw = "".join(part.raw for part in self.tokens[position:end])
            if end > position + 1 or (token.name and self.is_kept(token)):
                self.add_kept(token, raw, self.tokens[position:end])
            else:
                self.add(token, position)
            position = end
        self.finish()
        return self.parts

    def add(self, token: _Token, position: int) -> None:
        if not token.name:
            if token.raw.startswith("<") and len(token.raw) > 1:
                self.add_atom(token.raw) if token.raw.startswith("<!--") else self.add_block(token.raw)
            else:
                self.add_text(token.raw)
        elif not self.is_inline(token, position):
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

    def is_inline(self, token: _Token, position: int) -> bool:
        return token.name in _INLINE if self.is_html else position in self.inline

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

    def add_kept(self, token: _Token, raw: str, tokens: Sequence[_Token]) -> None:
        if self.is_html and token.name not in _INLINE | _INLINE_KEPT | self.keep_tags:
            self.add_block(raw)
        else:
            text = "".join(html.unescape(part.raw) for part in tokens if not part.name and not part.raw.startswith("<"))
            self.add_atom(raw, " ".join(text.split()))

    def add_block(self, raw: str) -> None:
        self.finish()
        self.parts.append(raw)
        self.begin()

    def close(self, token: _Token) -> None:
        if not self.num_open[token.name]:
            # The element was opened before a block tag, so it is around all that stands before this tag.
            element = Element(0, len(self.current.text), "", token.raw)
            for inner in self.roots:
                inner.parent = element
            self.roots = [element]
            self.outer.append(element)
            self.add_tag(token.raw, element, is_closing=True)
            return
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

    def find_kept_end(self, position: int) -> int:
        """Return the position behind an element whose content stays as it is, or behind this token."""
        token = self.tokens[position]
        if not token.name or token.is_end or token.is_empty or not self.is_kept(token):
            return position + 1
        return self.ends.get(position, position) + 1

    def is_kept(self, token: _Token) -> bool:
        if token.is_end:
            return False
        names = self.keep_tags | _INLINE_KEPT | _BLOCK_KEPT if self.is_html else self.keep_tags
        return token.name in names or _KEPT.search(token.raw) is not None


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


def _read_tokens(page: str, is_html: bool) -> Iterator[_Token]:
    """Yield tags, comments and texts. Together they are the page."""
    position, scanner = 0, _Scanner(page)
    while position < len(page):
        raw = page[position : scanner.find_end(position)]
        position += len(raw)
        tag = _TAG.match(raw) if len(raw) > 1 else None
        if tag is None:
            yield _Token(raw)
            continue
        name = tag[2].lower() if is_html else tag[2]
        is_empty = raw.endswith("/>") or (is_html and name in _EMPTY)
        yield _Token(raw, name, bool(tag[1]), is_empty and not tag[1])
        if is_html and name in _RAW and not tag[1]:
            end = re.compile(f"</{name}", re.IGNORECASE).search(page, position)
            stop = end.start() if end else len(page)
            if stop > position:
                yield _Token(page[position:stop])
            position = stop


class _Scanner:
    """Finds the ends of tags, comments and texts. The time grows with the length of the page, whatever lacks its end."""

    def __init__(self, page: str):
        self.page = page
        self._last = {closing: page.rfind(closing) for closing in ("'", '"', *(closing for _, closing in _SPECIAL))}
        self._marks = [match.start() for match in re.finditer("[\"'>]", page)]
        # Offsets outside of quotes from which no end of a tag follows.
        self._endless: set[int] = set()

    def find_end(self, start: int) -> int:
        """Return the offset behind the tag, comment or text that begins at `start`."""
        page = self.page
        if page[start] != "<":
            following = page.find("<", start)
            return len(page) if following < 0 else following
        for opening, closing in _SPECIAL:
            begin = start + len(opening)
            if page.startswith(opening, start) and begin <= self._last[closing]:
                return page.find(closing, begin) + len(closing)
        tag = _TAG.match(page, start)
        return (tag and self._find_tag_end(tag.end())) or start + 1

    def _find_tag_end(self, position: int) -> int | None:
        """Return the offset behind the first `>` outside of quotes, or `None`."""
        passed = []
        while position not in self._endless:
            passed.append(position)
            index = bisect.bisect_left(self._marks, position)
            if index == len(self._marks):
                break
            position = self._marks[index]
            mark = self.page[position]
            if mark == ">":
                return position + 1
            if self._last[mark] == position:
                break
            position = self.page.find(mark, position + 1) + 1
        self._endless.update(passed)
        return None


def _find_inline(tokens: Sequence[_Token]) -> set[int]:
    """Return the positions of XML tags that stand in an element with text of its own."""
    # For each open element: has it text, and where are the tags of its children?
    levels: list[tuple[list[bool], list[int]]] = [([False], [])]
    inline: set[int] = set()
    for position, token in enumerate(tokens):
        has_text, children = levels[-1]
        if not token.name:
            has_text[0] |= not token.raw.startswith("<") and _HAS_TEXT.search(token.raw) is not None
        elif token.is_empty:
            children.append(position)
        elif not token.is_end:
            children.append(position)
            levels.append(([False], []))
        elif len(levels) > 1:
            _keep_inline(levels.pop(), inline)
            levels[-1][1].append(position)
    while levels:
        _keep_inline(levels.pop(), inline)
    return inline


def _keep_inline(level: tuple[list[bool], list[int]], inline: set[int]) -> None:
    (has_text,), children = level
    if has_text:
        inline.update(children)
