"""Whole texts: sentences to decode, and the layout between them, which stays as it is."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import sentencex

# Line breaks, tabs, and the spaces around them.
_GAPS = re.compile(r"\s*[\n\r\t\v\f\x1c-\x1f\x85\u2028\u2029]\s*")
# Indentation, and marks of lists, quotes and headings.
_MARKS = re.compile(r"\s*(?:(?:[-*+•‣▪◦–—·]|#{1,6}|>+|\(?\d{1,3}[.)]|\(?[A-Za-z]\))\s+)*")
_SPACE = re.compile(r"\s")
_HAS_TEXT = re.compile(r"[^\W_]")
# Places to cut a sentence that is too long, the best first: behind marks of a clause, then between words, then anywhere.
_CUTS = (
    re.compile(r"(?<=[;:])\s+|(?<=[；：])"),
    re.compile(r"(?<=[,،])\s+|(?<=[，、])|\s+(?=[–—(])"),
    re.compile(r"\s+"),
)


@dataclass(frozen=True)
class Document:
    """A text in parts.

    Attributes:
        sentences: Texts to decode, without white space around them.
        layout: Text before the first sentence, between sentences, and behind the last one.
    """

    sentences: list[str] = field(default_factory=list)
    layout: list[str] = field(default_factory=lambda: [""])

    def join(self, sentences: Sequence[str]) -> str:
        """Return the text with other sentences."""
        first, *gaps = self.layout
        return first + "".join(part for pair in zip(sentences, gaps, strict=True) for part in pair)


class SentenceSplitter:
    """Splits texts into sentences that a model can read.

    The splitter is sentencex. Its rules and abbreviations cover some 300 languages, and it needs no model.

    Attributes:
        num_cut: Sentences that were too long and were cut into parts.
    """

    def __init__(self, language: str, find_long: Callable[[list[str]], list[bool]]):
        """Set up a splitter.

        Args:
            language: Code of the texts' language, such as de. An unknown language gets the rules of English.
            find_long: Returns True for each text that has more tokens than the model takes.
        """
        self.language = language
        self.find_long = find_long
        self.num_cut = 0

    def split(self, texts: Sequence[str], has_lines: bool = True) -> list[Document]:
        """Return the parts of each text. `Document.join` of the sentences returns the text, character by character.

        Args:
            texts: Texts of any length.
            has_lines: False if a line break is a space, and no mark of a list begins a line.
        """
        find_parts = self._find_parts if has_lines else self._find_sentences
        documents = [_join_parts(find_parts(text)) for text in texts]
        long = self.find_long([sentence for document in documents for sentence in document.sentences])
        self.num_cut += sum(long)
        flags = iter(long)
        return [self._cut(document, [next(flags) for _ in document.sentences]) for document in documents]

    def _find_parts(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yield the parts of a text in order: True and a sentence, or False and layout."""
        start = 0
        for gap in [*_GAPS.finditer(text), None]:
            line = text[start : gap.start() if gap else None]
            marks = _MARKS.match(line).group()
            yield False, marks
            yield from self._find_sentences(line[len(marks) :])
            if gap:
                yield False, gap.group()
                start = gap.end()

    def _find_sentences(self, line: str) -> Iterator[tuple[bool, str]]:
        end = 0
        # sentencex fails on some white space other than a plain space.
        for part in sentencex.segment(self.language, _SPACE.sub(" ", line)):
            start, end = end, end + len(part)
            yield from _strip(line[start:end])

    def _cut(self, document: Document, is_long: list[bool]) -> Document:
        if not any(is_long):
            return document
        parts = [(False, document.layout[0])]
        for sentence, flag, gap in zip(document.sentences, is_long, document.layout[1:], strict=True):
            pieces = self._halve(sentence) if flag else [sentence]
            parts += [part for piece in pieces for part in _strip(piece)]
            parts.append((False, gap))
        return _join_parts(parts)

    def _halve(self, text: str) -> list[str]:
        """Cut a text near its middle, and each part again while it is too long."""
        if len(text) < 2:
            return [text]
        third, middle = len(text) // 3, len(text) // 2
        offsets = ([match.end() for match in pattern.finditer(text)] for pattern in _CUTS)
        inside = ([offset for offset in row if third <= offset <= len(text) - third] for row in offsets)
        cut = next((min(row, key=lambda offset: abs(offset - middle)) for row in inside if row), middle)
        parts = [text[:cut], text[cut:]]
        return [
            piece
            for part, is_long in zip(parts, self.find_long(parts), strict=True)
            for piece in (self._halve(part) if is_long else [part])
        ]


def _strip(text: str) -> Iterator[tuple[bool, str]]:
    """Yield a text with the white space around it as layout. A text without letters and digits is layout as a whole."""
    if not _HAS_TEXT.search(text):
        yield False, text
        return
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    yield from ((False, text[:start]), (True, text[start:end]), (False, text[end:]))


def _join_parts(parts: Iterator[tuple[bool, str]] | Sequence[tuple[bool, str]]) -> Document:
    document = Document()
    for is_sentence, text in parts:
        if is_sentence:
            document.sentences.append(text)
            document.layout.append("")
        else:
            document.layout[-1] += text
    return document


def keep_whole(texts: Sequence[str]) -> list[Document]:
    """Return each text as one sentence. A blank text has none, and its layout is empty."""
    return [Document([text], ["", ""]) if text.strip() else Document() for text in texts]
