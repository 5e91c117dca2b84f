"""Word documents: texts of a .docx file to decode, and the targets in their places. All else stays as it is."""

import copy
import html
import io
import itertools
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from metaphrase.errors import MetaphraseError, naming_damaged_file, naming_extra

with naming_extra("files", "python-docx"):
    import docx
    from docx.opc.constants import CONTENT_TYPE
    from docx.opc.part import PartFactory, XmlPart
    from docx.oxml import OxmlElement
    from docx.oxml.ns import qn
    from lxml import etree

_HAS_TEXT = re.compile(r"[^\W_]")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # characters that XML cannot hold
_NOTES = (CONTENT_TYPE.WML_FOOTNOTES, CONTENT_TYPE.WML_ENDNOTES)
_PARTS = (CONTENT_TYPE.WML_DOCUMENT_MAIN, CONTENT_TYPE.WML_HEADER, CONTENT_TYPE.WML_FOOTER, *_NOTES)
_PARAGRAPH, _RUN, _TEXT, _FORMATTING, _FIELD_MARK = map(qn, ("w:p", "w:r", "w:t", "w:rPr", "w:fldChar"))
_CONTAINERS = {*map(qn, ("w:hyperlink", "w:ins", "w:moveTo", "w:smartTag", "w:customXml", "w:sdt", "w:dir", "w:bdo"))}
_CHARACTERS = {"w:tab": "\t", "w:br": "\n", "w:cr": "\n", "w:noBreakHyphen": "\u2011", "w:softHyphen": ""}
_CHARACTERS = {qn(name): text for name, text in _CHARACTERS.items()}
# Text of an element. The reading of a word in ruby text is not that of its target.
_TEXT_PATHS = {_TEXT: ".", qn("w:ruby"): f"{qn('w:rubyBase')}//{_TEXT}"}
_NO_CONTENT = {*map(qn, ("w:proofErr", "w:lastRenderedPageBreak"))}  # marks of the spelling and the pages of the source
_NO_LOOK = {*map(qn, ("w:lang", "w:noProof"))}  # parts runs that look the same


class WordFile:
    """A .docx file. Its `texts` are the paragraphs of the body, tables, text boxes, headers, footers and notes, as XML.

    Formatted words are in elements. Images, references and fields are elements that stay as they are.
    """

    def __init__(self, name: str, data: bytes, most_bytes: int):
        """Read a file. Raises `MetaphraseError` if this is no Word document, or unpacks to more than `most_bytes`."""
        # By default the library does not parse notes.
        PartFactory.part_type_for.update(dict.fromkeys(_NOTES, XmlPart))
        with naming_damaged_file(name, "a Word document"), zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            names = archive.namelist() if size <= most_bytes else []
            num_tags = sum(archive.read(part).count(b"<") for part in names)
        # An element takes far more memory than its tag.
        if max(size, 16 * num_tags) > most_bytes:
            most, sizes = f"{most_bytes >> 20} MB and {most_bytes // 16} tags", f"{size >> 20} MB and {num_tags}"
            raise MetaphraseError(f"A .docx file must unpack to at most {most}, got {sizes} in {name!r}.")
        with naming_damaged_file(name, "a Word document"):
            self._document = docx.Document(io.BytesIO(data))
        self._paragraphs = []
        for part in self._document.part.package.iter_parts():
            if part.content_type in _PARTS:
                # A field, such as a table of contents, may go over many paragraphs. One without an end is none.
                fields = _Fields(part.element)
                paragraphs = (_Paragraph(element, fields) for element in part.element.iter(_PARAGRAPH))
                # Paragraphs without letters and digits have no text.
                self._paragraphs += [paragraph for paragraph in paragraphs if paragraph.text]
        self.texts = [paragraph.text for paragraph in self._paragraphs]

    def fill(self, targets: Sequence[str]) -> bytes:
        """Return the document with the targets of the texts."""
        for paragraph, target in zip(self._paragraphs, targets, strict=True):
            paragraph.fill(target)
        self._document.save(file := io.BytesIO())
        return file.getvalue()


class _Piece(NamedTuple):
    """A part of a paragraph."""

    # `text` with the formatting of its run; `kept` element, or that of a `field`; `begin` or `end` of a container such as a link
    kind: str
    content: Any
    formatting: Any = None

    @property
    def key(self) -> tuple:
        """Equal for neighbors that are one part."""
        if self.kind == "text":
            parts = () if self.formatting is None else self.formatting
            return self.kind, *(etree.tostring(part) for part in parts if part.tag not in _NO_LOOK)
        return (self.kind,) if self.kind == "field" else (self.kind, id(self.content))


class _Paragraph:
    """A paragraph, and its text as XML. The numbers in the tags are indices of `_parts`."""

    def __init__(self, element: Any, fields: "_Fields"):
        self._element, self.text = element, ""
        pieces = list(_read_pieces(element, fields))
        if not any(piece.kind == "text" and _HAS_TEXT.search(piece.content) for piece in pieces):
            return
        lengths: Counter[tuple] = Counter()
        for piece in pieces:
            lengths[piece.key] += len(piece.content) if piece.kind == "text" else 0
        # Most characters have this formatting. They need no element.
        usual = max(lengths, key=lengths.get)
        self._parts = [list(neighbors) for _, neighbors in itertools.groupby(pieces, key=lambda piece: piece.key)]
        open_numbers = []
        for number, part in enumerate(self._parts):
            kind, _, formatting = part[0]
            if kind == "text":
                texts = [piece.content for piece in part]
            else:
                # The text that a field shows.
                texts = [text.text or "" for piece in part if kind == "field" for text in piece.content.iter(_TEXT)]
            text = html.escape("".join(texts), quote=False)
            if kind == "begin":
                open_numbers.append(number)
                self.text += f"<t{number}>"
            elif kind == "end":
                self.text += f"</t{open_numbers.pop()}>"
            elif kind == "text" and part[0].key == usual:
                self._formatting = formatting
                self.text += text
            elif kind == "text":
                self.text += f"<t{number}>{text}</t{number}>"
            else:
                self.text += f'<t{number} translate="no">{text}</t{number}>'

    def fill(self, target: str) -> None:
        root = etree.fromstring(f"<t>{_FORBIDDEN.sub('', target)}</t>", etree.XMLParser(huge_tree=True))
        self._fill(self._element, root, self._formatting)

    def _fill(self, holder: Any, node: Any, formatting: Any) -> None:
        # Bookmarks and comments are about the whole paragraph, since their words may part.
        ends = [child for child in holder if str(child.tag).endswith("End")]
        for child in list(holder):
            if not _stays_in_front(child):
                holder.remove(child)
        self._add(holder, node, formatting)
        holder.extend(ends)

    def _add(self, holder: Any, node: Any, formatting: Any) -> None:
        if node.text:
            _add_run(holder, formatting).text = node.text
        for child in node:
            part = self._parts[int(child.tag[1:])]
            kind, content, own_formatting = part[0]
            if kind == "text":
                self._add(holder, child, own_formatting)
            elif kind == "begin":
                holder.append(content)
                self._fill(_holder_of(content), child, formatting)
            elif kind == "kept" and content.getparent() is not None:
                _add_run(holder, own_formatting).append(content)
            else:
                holder.extend(piece.content for piece in part)
            if child.tail:
                _add_run(holder, formatting).text = child.tail


class _Fields:
    """The begins and ends of fields in a part, and the number of fields that are open where it is read."""

    def __init__(self, root: Any):
        self.num_open, self.steps, begins = 0, dict[Any, int](), []
        for mark in root.iter(_FIELD_MARK):
            if (kind := mark.get(qn("w:fldCharType"))) == "begin":
                begins.append(mark)
            elif kind == "end" and begins:
                self.steps |= {begins.pop(): 1, mark: -1}


def _read_pieces(holder: Any, fields: _Fields) -> Iterator[_Piece]:
    for child in holder:
        if _stays_in_front(child) or str(child.tag).endswith("End") or child.tag in _NO_CONTENT:
            continue
        if child.tag in _CONTAINERS and not fields.num_open:
            yield _Piece("begin", child)
            yield from _read_pieces(_holder_of(child), fields)
            yield _Piece("end", child)
            continue
        marks = list(child.iter(_FIELD_MARK))
        if marks or fields.num_open or child.tag == qn("w:fldSimple"):
            fields.num_open += sum(fields.steps.get(mark, 0) for mark in marks)
            yield _Piece("field", child)
        elif child.tag != _RUN:
            yield _Piece("kept", child)
        else:
            formatting = child.find(_FORMATTING)
            for item in child:
                text = _CHARACTERS.get(item.tag)
                if path := _TEXT_PATHS.get(item.tag):
                    text = re.sub(r"\s", " ", "".join(part.text or "" for part in item.iterfind(path)))
                if text is None or item.get(qn("w:type"), "textWrapping") != "textWrapping":
                    if item.tag != _FORMATTING and item.tag not in _NO_CONTENT:
                        yield _Piece("kept", item, formatting)
                else:
                    yield _Piece("text", text, formatting)


def _stays_in_front(child: Any) -> bool:
    # Properties, and the beginnings of bookmarks and comments.
    return str(child.tag).endswith(("Pr", "Start"))


def _holder_of(container: Any) -> Any:
    content = container.find(qn("w:sdtContent"))
    return container if content is None else content


def _add_run(holder: Any, formatting: Any) -> Any:
    run = OxmlElement("w:r")
    if formatting is not None:
        run.append(copy.deepcopy(formatting))
    holder.append(run)
    return run
