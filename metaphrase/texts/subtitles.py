"""Subtitles: texts of .srt, .vtt, .ass and .ssa files to decode, and the targets in their places. All else stays as it is."""

import html
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from metaphrase.errors import naming_damaged_file
from metaphrase.texts.plan import SPACELESS

# Libraries write a file anew. pysubs2 loses numbers, positions and comments; webvtt-py changes times.
# A part of a line that stands once in a pattern cannot be tried in many ways, which would take hours for hostile lines.
_TIMES = r"([ \t]*\d[\d:., \t]*-->[ \t]*\d[^\n]*\n?)"
# A number before the times is no text. In WebVTT, nor are a line before the times and a note behind an empty line.
_SRT_HEAD = re.compile(rf"^(?:\d+[ \t]*\n)?{_TIMES}", re.MULTILINE)
_NOTE = r"(?<=\n\n)(?:NOTE|STYLE|REGION)\b[^\n]*(?:\n[^\n]+)*"
_VTT_HEAD = re.compile(rf"^(?:{_NOTE}|(?:(?:\d+[ \t]*|(?<=\n\n)[^\n]+)\n)?{_TIMES})", re.MULTILINE)
_DIALOGUE = re.compile(r"^Dialogue:[^\n,]*,([^\n,]*,[^\n,]*),((?:[^\n,]*,){6})([^\n]*)", re.MULTILINE)
_TIME = re.compile(r"(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9}(?:[.,]\d{1,9})?)")
_WORD_TIME = re.compile(r"<(?:\d+:)?\d+:\d+\.\d+>")
_NO_TEXT = re.compile(r"\{[^{}]*\\(?:p[1-9]|[kK])")  # shapes, and songs with a time for each syllable
_TAG = re.compile(r"(?P<tag><(?P<end>/?)(?P<name>[A-Za-z]\w*)\b[^<>]*>|\{\\(?P<style>[ibus])(?P<on>[01])\}|\{[^{}]*\})")
_TAG_OR_TEXT = re.compile(_TAG.pattern + r"|[^<{]+|.")
_MARKUP = re.compile(r'<[^<>"]*"([^<>"]*)"[^<>]*>')
_HAS_TEXT = re.compile(r"[^\W_]")
_SENTENCE_END = re.compile(r"[.!?…:;。！？：；។။\])♪\"”»\-–—]$")
_OWN_SENTENCE = re.compile(r"[-–—\[(♪>]")  # dashes of speakers, sounds in brackets, and songs
_DASH = re.compile(r"(?:<[^<>]*>)*[-–—]")
# Marks and vowels of Thai, Lao, Burmese and Khmer stay with their consonants.
_PIECE = re.compile(
    r"<[^<>]*>|&#?\w+;|\s+|(?:[\u0e40-\u0e44\u0ec0-\u0ec4](?=[\u0e00-\u0eff]))?.(?:[\u1000-\u1021]\u1037?\u103a|[\u1039\u17d2]."
    r"|[\u0e2f-\u0e3a\u0e45-\u0e4e\u0eaf-\u0ebd\u0ec6-\u0ece\u102b-\u1038\u103a-\u103e\u1056-\u1059\u17b4-\u17d3\u17dd])*"
)
_GAP = re.compile(rf"\s|{SPACELESS}")
_MOST_SECONDS, _MOST_EVENTS = 2.0, 5
_LONGEST_LINE = 42


@dataclass
class _Event:
    span: tuple[int, int]  # in the file
    text: str
    # Sizes of the lines that were joined, for each line of the text.
    rows: list[list[int]]
    before: str
    after: str
    style: str
    start: float
    end: float

    def goes_on(self, other: "_Event") -> bool:
        is_near = abs(other.start - self.end) <= _MOST_SECONDS and self.style == other.style
        ends = _SENTENCE_END.search(_strip_tags(self.text)) or _OWN_SENTENCE.match(_strip_tags(other.text))
        return is_near and not ends


class Subtitles:
    """A file of subtitles. Its `texts` are XML. A sentence that goes over several events is in one of them."""

    def __init__(self, name: str, data: bytes):
        """Read a file. Raises `MetaphraseError` if the file is not UTF-8, or UTF-16 with a mark."""
        suffix = Path(name).suffix.lower()
        encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
        with naming_damaged_file(name, "subtitles in UTF-8, or UTF-16 with a mark"):
            content = data.decode(encoding)
        self.newline = "\r\n" if "\r\n" in content else "\n"
        self.content = content.replace("\r\n", "\n")
        self.is_vtt, self.is_ass = suffix == ".vtt", suffix in (".ass", ".ssa")
        self._groups: list[list[_Event]] = []
        for event in self._read_events():
            last = self._groups[-1] if self._groups else []
            if last and len(last) < _MOST_EVENTS and last[-1].goes_on(event):
                last.append(event)
            else:
                self._groups.append([event])
        self.texts = [" ".join(event.text for event in group) for group in self._groups]

    def fill(self, targets: Sequence[str]) -> bytes:
        """Return the file with the targets of the texts. A target is divided among events and lines by their lengths."""
        parts, position = [], 0
        for group, target in zip(self._groups, targets, strict=True):
            sizes = [sum(map(sum, event.rows)) for event in group]
            for event, text in zip(group, _divide(target, sizes), strict=True):
                lines = text.split("\n")
                rows = event.rows if len(lines) == len(event.rows) else [[0]] * len(lines)
                pieces = _MARKUP.split("\n".join(map(_break_line, lines, rows)))
                # Only the text of WebVTT has entities.
                pieces = [html.unescape(piece) if i % 2 or not self.is_vtt else piece for i, piece in enumerate(pieces)]
                text = "".join([event.before, *pieces, event.after])
                if self.is_ass:
                    text = text.replace("\n", "\\N").replace("\u00a0", "\\h")
                start, end = event.span
                parts += [self.content[position:start], text]
                position = end
        return "".join([*parts, self.content[position:]]).replace("\n", self.newline).encode()

    def _read_events(self) -> Iterator[_Event]:
        if self.is_ass:
            events = [(match[1], match[2], match.span(3)) for match in _DIALOGUE.finditer(self.content)]
        else:
            heads = list((_VTT_HEAD if self.is_vtt else _SRT_HEAD).finditer(self.content))
            ends = [*(head.start() for head in heads[1:]), len(self.content)]
            events = [(head[1], "", (head.end(), end)) for head, end in zip(heads, ends, strict=False) if head[1]]
        for line, style, (start, end) in events:
            raw = self.content[start:end]
            start, end = start + len(raw) - len(raw.lstrip()), start + len(raw.rstrip())
            # Times of single words would be wrong in a target.
            raw = _WORD_TIME.sub("", raw.strip()) if self.is_vtt else raw.strip()
            if _NO_TEXT.search(raw) or not _HAS_TEXT.search(_TAG.sub("", raw)):
                continue
            times = [
                3600 * int(hours or 0) + 60 * int(minutes) + float(seconds.replace(",", "."))
                for hours, minutes, seconds in _TIME.findall(line)[:2]
            ]
            if self.is_ass:
                raw = re.sub(r"\\[Nn]", "\n", raw).replace("\\h", "\u00a0")
            # An event without times goes on in no other one.
            yield _Event((start, end), *self._mark_tags(raw), style, *[*times, math.nan, math.nan][:2])

    def _mark_tags(self, raw: str) -> tuple[str, list[list[int]], str, str]:
        """Return a text whose tags are XML, the sizes of its lines, and the markup before and behind all of its words.

        A tag holds its own markup as a value.
        """
        pieces = list(_TAG_OR_TEXT.finditer(raw))
        partners, opened = {}, defaultdict(list)
        for index, piece in enumerate(pieces):
            if name := piece["name"] or piece["style"]:
                if not (piece["end"] or piece["on"] == "0"):
                    opened[name].append(index)
                elif opened[name]:
                    partners[opened[name].pop()] = index
        openers = {last: first for first, last in partners.items()}
        first, last = 0, len(pieces)
        while True:
            if pieces[first]["tag"] and first not in partners:
                first += 1
            elif pieces[last - 1]["tag"] and last - 1 not in openers:
                last -= 1
            elif partners.get(first) == last - 1:
                first, last = first + 1, last - 1
            else:
                break
        inner = ""
        for index, piece in enumerate(pieces[first:last], start=first):
            if not piece["tag"]:
                inner += piece.group().replace("<", "&lt;") if self.is_vtt else html.escape(piece.group(), quote=False)
                continue
            name, slash = piece["name"] or piece["style"] or "t", "/" * (index in openers)
            end = "" if index in openers or index in partners else ' translate="no"/'
            inner += f'<{slash}{name} v="{html.escape(piece.group())}"{end}>'
        before, after = ("".join(piece.group() for piece in part) for part in (pieces[:first], pieces[last:]))
        before += inner[: len(inner) - len(inner.lstrip())]
        after = inner[len(inner.rstrip()) :] + after
        rows: list[list[str]] = []
        for line in filter(None, map(str.strip, inner.split("\n"))):
            # A line break is a space, but not before the dash of another speaker.
            if not rows or _DASH.match(line):
                rows.append([])
            rows[-1].append(line)
        return "\n".join(map(" ".join, rows)), [list(map(_size, row)) for row in rows], before, after


def _strip_tags(text: str) -> str:
    return html.unescape(re.sub(r"<[^<>]*>", "", text)).strip()


def _size(text: str) -> int:
    """Return the number of characters that are no white space."""
    return sum(map(len, _strip_tags(text).split()))


def _break_line(text: str, sizes: Sequence[int]) -> str:
    """Return the target of joined lines, as many lines. A line that is too long and grows becomes two."""
    if len(sizes) == 1 and len(_strip_tags(text)) > _LONGEST_LINE and _size(text) > sizes[0]:
        sizes = [1, 1]
    return "\n".join(filter(None, _divide(text, sizes, splits_elements=True)))


def _divide(text: str, shares: Sequence[int], splits_elements: bool = False) -> list[str]:
    """Cut a text into parts of about these shares, between words (Chinese anywhere), and outside of elements if possible."""
    if len(shares) == 1:
        return [text.strip()]
    pieces = [match.group() for match in _PIECE.finditer(text)]
    lengths, depths, length, depth = [], [], 0, 0
    for piece in pieces:
        lengths.append(length)
        depths.append(depth)
        if piece.startswith("<"):
            depth += 0 if piece.endswith("/>") else -1 if piece.startswith("</") else 1
        length += _size(piece)
    gaps = [index for index, piece in enumerate(pieces) if _GAP.match(piece)]
    outer = [index for index in gaps if not depths[index]]
    gaps = outer if len(outer) >= len(shares) - 1 and not splits_elements else gaps
    parts, position, done = [], 0, 0
    for number, share in enumerate(shares[:-1], start=1):
        done += share
        # Later parts need a place, too.
        free = [index for index in gaps if index > position][: (number - len(shares) + 1) or None]
        place = length * done / max(1, sum(shares))
        cut = min(free, key=lambda index: abs(lengths[index] - place), default=len(pieces))
        parts.append("".join(pieces[position:cut]).strip())
        position = cut
    return [*parts, "".join(pieces[position:]).strip()]
