"""Subtitles: texts of .srt, .vtt, .ass and .ssa files to decode, and the targets in their places. All else stays as it is."""

import html
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from metaphrase.errors import MetaphraseError

# Libraries for subtitles write a file anew. They lose the settings and comments of WebVTT, and further sections of ASS.
# A part of a line that stands once in a pattern cannot be tried in many ways, which would take hours for hostile lines.
_CUE = re.compile(r"^(?=[^\n]*-->)([^\n]*)()\n((?:(?![^\n]*-->)(?=[^\n]*\S)[^\n]*(?:\n|\Z))*)", re.MULTILINE)
_DIALOGUE = re.compile(r"^Dialogue:[^\n,]*,([^\n,]*,[^\n,]*),((?:[^\n,]*,){6})([^\n]*)", re.MULTILINE)
_TIME = re.compile(r"(?:(\d+):)?(\d+):(\d+)[.,](\d+)")
# Shapes, and songs with a time for each syllable.
_NO_TEXT = re.compile(r"\{[^{}]*\\(?:p[1-9]|[kK])")
_TAG = re.compile(r"(?P<tag><(?P<end>/?)(?P<name>[A-Za-z]\w*)\b[^<>]*>|\{\\(?P<style>[ibus])(?P<on>[01])\}|\{[^{}]*\})")
_TAG_OR_TEXT = re.compile(_TAG.pattern + r"|[^<{]+|.")
_HAS_TEXT = re.compile(r"[^\W_]")
_SENTENCE_END = re.compile(r"[.!?…:;。！？：；\])♪\"”»\-–—]$")
# Dashes of speakers, sounds in brackets, and songs.
_OWN_SENTENCE = re.compile(r"[-–—\[(♪>]")
_DASH = re.compile(r"(?:<[^<>]*>)*[-–—]")
_PIECE = re.compile(r"<[^<>]*>|&#?\w+;|\s+|.")
_CHINESE = re.compile(r"[\u3040-\u9fff]")
_MOST_SECONDS, _MOST_EVENTS = 2.0, 5
_LONGEST_LINE = 42


@dataclass
class _Event:
    span: tuple[int, int]  # in the file
    text: str
    before: str
    after: str
    style: str
    start: float
    end: float

    def goes_on(self, other: "_Event") -> bool:
        """Return True if the next event continues the sentence of this one."""
        is_near = abs(other.start - self.end) <= _MOST_SECONDS and self.style == other.style
        ends = _SENTENCE_END.search(_strip_tags(self.text)) or _OWN_SENTENCE.match(_strip_tags(other.text))
        return is_near and not ends


class Subtitles:
    """A file of subtitles.

    Attributes:
        texts: The texts to decode, as XML. A sentence that goes over several events is in one of them.
    """

    def __init__(self, path: Path):
        """Read a file. Raises `MetaphraseError` if the file is not UTF-8, or UTF-16 with a mark."""
        data, suffix = path.read_bytes(), path.suffix.lower()
        encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
        try:
            content = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise MetaphraseError(f"Subtitles must be UTF-8, got {path}: {error}. Convert them first.") from error
        self.newline = "\r\n" if "\r\n" in content else "\n"
        self.content = content.replace("\r\n", "\n")
        self.is_vtt, self.is_ass = suffix == ".vtt", suffix in (".ass", ".ssa")
        # The markup of each numbered tag. A number is that of a piece of a text.
        self.markup: dict[str, str] = {}
        self._num_pieces = 0
        self._groups: list[list[_Event]] = []
        for event in self._read_events():
            last = self._groups[-1] if self._groups else []
            if last and len(last) < _MOST_EVENTS and last[-1].goes_on(event):
                last.append(event)
            else:
                self._groups.append([event])
        self.texts = [" ".join(event.text for event in group) for group in self._groups]

    def write(self, targets: Sequence[str], path: Path) -> None:
        """Write the file with the targets of the texts. A target is divided among its events by their lengths."""
        parts, position = [], 0
        for group, target in zip(self._groups, targets, strict=True):
            lengths = [len(_strip_tags(event.text)) for event in group]
            for event, text in zip(group, _divide(target, lengths), strict=True):
                if len(_strip_tags(text)) > _LONGEST_LINE and "\n" not in text:
                    text = "\n".join(_divide(text, [1, 1]))
                pieces = re.split(r"(<[^<>]*>)", text)
                if not self.is_vtt:
                    pieces[::2] = map(html.unescape, pieces[::2])
                text = "".join(self.markup.get(piece, piece) for piece in pieces)
                start, end = event.span
                parts += [self.content[position:start], self._join_lines(event.before + text + event.after)]
                position = end
        content = "".join([*parts, self.content[position:]])
        path.write_text(content, encoding="utf-8", newline=self.newline)

    def _join_lines(self, text: str) -> str:
        return text.replace("\n", "\\N") if self.is_ass else text

    def _read_events(self) -> Iterator[_Event]:
        for match in (_DIALOGUE if self.is_ass else _CUE).finditer(self.content):
            raw = match[3].rstrip()
            span = match.start(3), match.start(3) + len(raw)
            # Times of single words.
            raw = re.sub(r"<[\d:.]+>", "", raw)
            times = [
                3600 * int(hours or 0) + 60 * int(minutes) + float(f"{seconds}.{fraction}")
                for hours, minutes, seconds, fraction in _TIME.findall(match[1])[:2]
            ]
            if len(times) < 2 or _NO_TEXT.search(raw) or not _HAS_TEXT.search(_TAG.sub("", raw)):
                continue
            if self.is_ass:
                raw = re.sub(r"\\[Nn]", "\n", raw).replace("\\h", "\u00a0")
            yield _Event(span, *self._number_tags(raw), match[2], *times)

    def _number_tags(self, raw: str) -> tuple[str, str, str]:
        """Return a text with numbered tags, and the markup before and behind all of its words."""
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
        parts, offset = [], self._num_pieces
        self._num_pieces += len(pieces)
        for index, piece in enumerate(pieces[first:last], start=first):
            if not piece["tag"]:
                # Only WebVTT has entities.
                parts.append(piece.group() if self.is_vtt else html.escape(piece.group(), quote=False))
                continue
            form = "</t{}>" if index in openers else "<t{}>" if index in partners else '<t{} translate="no"/>'
            parts.append(form.format(offset + openers.get(index, index)))
            self.markup[parts[-1]] = piece.group()
        lines = [line.strip() for line in "".join(parts).split("\n") if line.strip()]
        # A line break is a space, but not before the dash of another speaker.
        text = "".join(("\n" if _DASH.match(line) else " ") + line for line in lines)
        return text[1:], *("".join(piece.group() for piece in part) for part in (pieces[:first], pieces[last:]))


def _strip_tags(text: str) -> str:
    return html.unescape(re.sub(r"<[^<>]*>", "", text)).strip()


def _divide(text: str, shares: Sequence[int]) -> list[str]:
    """Cut a text into parts of about these shares, between words, and outside of elements if there is such a place.

    Chinese and Japanese text is cut anywhere.
    """
    pieces = [match.group() for match in _PIECE.finditer(text)]
    lengths, depths, length, depth = [], [], 0, 0
    for piece in pieces:
        lengths.append(length)
        depths.append(depth)
        if piece.startswith("<"):
            depth += 0 if piece.endswith("/>") else -1 if piece.startswith("</") else 1
        else:
            length += len(piece) if piece.isspace() else 1
    gaps = [index for index, piece in enumerate(pieces) if piece.isspace() or _CHINESE.match(piece)]
    outer = [index for index in gaps if not depths[index]]
    gaps = outer if len(outer) >= len(shares) - 1 else gaps
    parts, position, done = [], 0, 0
    for number, share in enumerate(shares[:-1], start=1):
        done += share
        # Later parts need a place, too.
        free = [index for index in gaps if index > position][: (number - len(shares) + 1) or None]
        cut = min(free, key=lambda index: abs(lengths[index] - length * done / sum(shares)), default=len(pieces))
        parts.append("".join(pieces[position:cut]).strip())
        position = cut
    return [*parts, "".join(pieces[position:]).strip()]
