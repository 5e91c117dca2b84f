"""Tests of subtitles: times, tags and all else of a file stay, and sentences go over events."""

import html
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identity_engine import identity_generator

from metaphrase.texts.subtitles import Subtitles
from metaphrase.texts.whole_texts import TextDecoder, read_file

SRT = """\
1
00:00:01,000 --> 00:00:02,000
<i>We saw the small</i>

2
00:00:02,500 --> 00:00:04,000
<i>dog & the cat.</i>

7
00:00:05,000 --> 00:00:06,000
- Is it <b>here</b>?
- No.

8
00:00:07,000 --> 00:00:08,000
{\\an8}A longer sentence is here, and
it has two lines of text.

9
00:00:09,000 --> 00:00:10,000
♪
"""
VTT = """\
WEBVTT - A talk
Kind: captions

STYLE
::cue { color: red }

NOTE not a text

e64f/12-0
00:01.000 --> 00:02.000 align:start position:0%
<v Bob>Tom &amp; Eva are <c.loud>here</c></v>

e64f/13-0
00:09.000 --> 00:10.000
and there.
"""
ASS = """\
[Script Info]
; A remark
Title: x

[Aegisub Extradata]
Data: 1

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
Comment: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,a comment
Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,{\\i1}the small, old\\Ndog{\\i0} and
Dialogue: 0,0:00:02.00,0:00:03.00,Sign,,0,0,0,,Exit
Dialogue: 0,0:00:02.00,0:00:03.00,Sign,,0,0,0,,{\\p1}m 0 0 l 1 1{\\p0}
Dialogue: 0,0:00:02.00,0:00:03.00,Song,,0,0,0,,{\\k20}la{\\k30}la
"""


@pytest.fixture
def decoded(align, tmp_path):
    """Returns the texts of a file, and the file with texts in upper case."""

    def decode(name, content):
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        file = read_file(name, (tmp_path / name).read_bytes())
        decoder = TextDecoder(identity_generator(str.upper), text_format="xml", has_lines=True)
        (tmp_path / "out").write_bytes(file.fill(decoder.decode(file.texts)))
        return file.texts, (tmp_path / "out").read_bytes().decode()

    return decode


def replaced(text, changes):
    for source, target in changes.items():
        assert source in text
        text = text.replace(source, target)
    return text


SRT_CHANGES = {
    "We saw the small": "WE SAW THE SMALL",
    "dog & the cat.": "DOG & THE CAT.",
    "Is it <b>here</b>?": "IS IT <b>HERE</b>?",
    "No.": "NO.",
    "A longer sentence is here, and\nit has two lines of": "A LONGER SENTENCE IS HERE, AND\nIT HAS TWO LINES OF",
    " text.": " TEXT.",
}
VTT_CHANGES = {"Tom &amp; Eva are <c.loud>here": "TOM &amp; EVA ARE <c.loud>HERE", "and there.": "AND THERE."}
ASS_CHANGES = {"{\\i1}the small, old\\Ndog{\\i0} and": "{\\i1}THE SMALL, OLD\\NDOG{\\i0} AND", ",,Exit": ",,EXIT"}
# The second cue of WebVTT comes too late to continue the first one.
FORMATS = [(".srt", SRT, SRT_CHANGES, 3), (".vtt", VTT, VTT_CHANGES, 2), (".ass", ASS, ASS_CHANGES, 2)]


@pytest.mark.parametrize(("suffix", "content", "changes", "num_texts"), FORMATS, ids=[name for name, *_ in FORMATS])
def test_all_but_the_words_stays(suffix, content, changes, num_texts, decoded):
    texts, output = decoded(f"talk{suffix}", content)
    assert output == replaced(content, changes) and len(texts) == num_texts
    _, output = decoded(f"talk{suffix}", "\ufeff" + content.replace("\n", "\r\n"))
    assert output == "\ufeff" + replaced(content, changes).replace("\n", "\r\n")


WORDS = st.sampled_from(["a", "dog,", "I", "<3", "1", "R&D", "&amp;", "5.5", "猫睡", "กำลัง", "ខ្មែរ", "a-->b", "—"])
TAGS = {
    ".srt": ["<i>", "</i>", "<b>", "</b>", '<font color="#f00">', "</font>", "{\\an8}", "{\\i1}", "{\\i0}"],
    ".vtt": ["<i>", "</i>", "<c.red>", "<c.loud>", "</c>", "<v Bob>", "</v>", "<lang en>"],
    ".ass": ["{\\i1}", "{\\i0}", "{\\b1}", "{\\b0}", "{keep this}", "{\\c&HFF&}", "{\\pos(1,2)}", "{\\an8\\fs9}"],
}


@st.composite
def subtitles(draw, suffix):
    """The content of a file, whose lines have single spaces."""
    content = {".srt": "", ".vtt": "WEBVTT\n\nNOTE a --> b\n\n", ".ass": "[Events]\n; a\n"}[suffix]
    seconds = 0.0
    for number in range(draw(st.integers(1, 8))):
        lines = []
        for _ in range(draw(st.integers(1, 2))):
            words = draw(st.lists(WORDS, min_size=1, max_size=6))
            for place in draw(st.lists(st.integers(0, len(words) - 1), max_size=4)):
                tag = draw(st.sampled_from(TAGS[suffix]))
                words[place] = words[place] + tag if "/" in tag or "0}" in tag else tag + words[place]
            line = draw(st.sampled_from(["", "", "- "])) + " ".join(words) + draw(st.sampled_from(["", ".", "?"]))
            lines.append(line.replace("<3", "3").replace("R&D", "R") if suffix == ".vtt" else line)
        times = [f"0:00:{value:05.2f}" for value in (seconds, seconds + 1)]
        seconds += draw(st.sampled_from([1.0, 1.5, 5.0]))
        if suffix == ".ass":
            style = draw(st.sampled_from(["Default", "Sign"]))
            content += f"Dialogue: 0,{times[0]},{times[1]},{style},,0,0,0,," + "\\N".join(lines) + "\n"
        else:
            head = draw(st.sampled_from([f"{number}\n", "" if suffix == ".srt" else "name\n"]))
            place = draw(st.sampled_from(["", " X1:1 line:0"]))
            content += f"{head}{times[0]}0 --> {times[1]}0{place}\n" + "\n".join(lines) + "\n\n"
    return content


@pytest.mark.parametrize("suffix", TAGS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_texts_of_a_file_written_back_are_the_file(suffix, data):
    content = data.draw(subtitles(suffix))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"talk{suffix}")
        path.write_text(content, encoding="utf-8")
        file = Subtitles(str(path), path.read_bytes())
        path.write_bytes(file.fill(file.texts))
        assert path.read_text(encoding="utf-8") == content
        assert sum(text.count("dog,") for text in file.texts) == content.count("dog,")


def events(*texts):
    return "\n".join(f"{i}\n00:00:0{i},000 --> 00:00:0{i},900\n{text}\n" for i, text in enumerate(texts, start=1))


@pytest.mark.parametrize(
    ("texts", "target", "expected"),
    [
        # By the lengths of the events, between words, and outside of tags.
        (("one", "two three"), "aa bb cc dd ee ff", ("aa bb", "cc dd ee ff")),
        (("one two", "<b>three four</b> five"), "aa bb <cc dd> ee", ("aa bb", "<cc dd> ee")),
        # A text without spaces.
        (("one", "two"), "猫睡觉了", ("猫睡", "觉了")),
        (("one", "two"), "aa", ("aa", "")),
        # Signs stay with their consonants, in Thai, Burmese and Khmer.
        (("one", "two"), "น้ำไม่น้ำไม่", ("น้ำไม่", "น้ำไม่")),
        (("one", "two"), "မြန်မာ", ("မြန်", "မာ")),
        (("one", "two"), "ស្រីស្រី", ("ស្រី", "ស្រី")),
    ],
)
def test_target_is_divided_among_events(tmp_path, texts, target, expected):
    (tmp_path / "talk.srt").write_text(events(*texts), encoding="utf-8")
    file = Subtitles(str(tmp_path / "talk.srt"), (tmp_path / "talk.srt").read_bytes())
    [opening, closing] = re.findall("<[^<>]*>", file.texts[0]) or ["", ""]
    target = target.replace("<", "\0").replace(">", closing).replace("\0", opening)
    (tmp_path / "out.srt").write_bytes(file.fill([target]))
    expected = [text.replace("<", "<b>").replace(" dd>", " dd</b>") for text in expected]
    assert (tmp_path / "out.srt").read_text(encoding="utf-8") == events(*expected)


def test_sentences_that_go_on(tmp_path):
    cases = {("One", "two."): 1, ("One.", "Two."): 2, ("One", "- Two."): 2, ("[A door]", "one."): 2}
    cases[tuple(f"part {number}" for number in range(1, 10))] = 2
    for texts, number in cases.items():
        (tmp_path / "talk.srt").write_text(events(*texts), encoding="utf-8")
        assert len(Subtitles(str(tmp_path / "talk.srt"), (tmp_path / "talk.srt").read_bytes()).texts) == number, texts


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        # Automatic captions begin with a line that is a space, and have times of words.
        ("a.vtt", "00:01.000 --> 00:02.000\n \na<00:00:01.500><c> dog</c>.\n \n", ["a<c> dog</c>."]),
        ("a.vtt", "00:01.000 --> 00:02.000\n<c.red></c><00:01.500>\n", []),
        # Text behind an empty line and with an arrow is text, and that of a note is none.
        (
            "a.vtt",
            "00:01.000 --> 00:02.000\na\n\nb --> c\n\nid\n00:03.000 --> 00:04.000\nd\n\nNOTE e\n1:1 --> 1:2\nf",
            ["a b --> c d"],
        ),
        (
            "a.srt",
            "1\n00:00:01,000 --> 00:00:02,000\n\na\n \nb --> c.\n\n2\n0:0:3,0 --> 0:0:4,0\nd",
            ["a b --> c.", "d"],
        ),
        # Events without an empty line between them.
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\na.\n2\n00:00:03,000 --> 00:00:04,000\nb 2", ["a.", "b 2"]),
        # Without times that can be read, an event stands alone.
        ("a.srt", "1\n1 --> 2\na\n\n2\n3 --> 4\nb", ["a", "b"]),
        # Numbers in brackets are no times.
        ("a.srt", "00:00:01,000 --> 00:00:02,000\na <3> <5.5>", ["a <3> <5.5>"]),
        ("a.vtt", "00:01.000 --> 00:02.000\na <3> <5.5>", ["a <3> <5.5>"]),
        ("a.ass", "Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,a <3>", ["a <3>"]),
    ],
)
def test_all_text_of_an_event_is_read(tmp_path, name, content, texts):
    (tmp_path / name).write_text("WEBVTT\n\n" * name.endswith("vtt") + content, encoding="utf-8")
    file = Subtitles(str(tmp_path / name), (tmp_path / name).read_bytes())
    assert [html.unescape(re.sub(' v="[^"]*"', "", text)) for text in file.texts] == texts
    (tmp_path / name).write_bytes(file.fill([f"{text}!" for text in file.texts]))
    [*lines] = (tmp_path / name).read_text(encoding="utf-8").splitlines()
    assert sum("!" in line for line in lines) == len(texts)


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("talk.srt", b"1\n00:00:01,000 --> 00:00:02,000\nM\xfcll\n", (), "must be subtitles in UTF-8"),
        ("talk.srt", b"no subtitles", (), "must hold text"),
        ("talk.pdf", b"", (), r"must end in one of \.srt"),
        ("talk.srt", SRT.encode(), ("--format", "html"), "`format` must be left out"),
        ("talk.srt", SRT.encode(), ("--resume",), "Leave out `resume`"),
        ("talk.srt", SRT.encode(), ("--output", "out.txt"), r"`output` must be a file that ends in \.srt"),
    ],
)
def test_errors_leave_the_output(run_generate, monkeypatch, tmp_path, name, content, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"out.{name}").write_text("old")
    words = ("--output", f"out.{name}", *words, *["--overwrite"] * ("--resume" not in words))
    with pytest.raises(ValueError, match=message):
        run_generate("--file", name, *words)
    assert (tmp_path / f"out.{name}").read_text() == "old"


HOSTILE = [
    ".srt\n1-->" + "1" * 100_000 + "\na",
    ".srt\n" + "-->" * 100_000,
    ".srt\n1\n00:00:01,000 --> 00:00:02,000\n<" + "a" * 100_000,
    ".vtt\n00:01.000 --> 00:02.000\n" + " " * 100_000,
    ".vtt\n00:01.000 --> 00:02.000\n<00:01.500>",
    ".ass\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,a" + "\\N" * 50_000 + "- b",
    ".ass\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,a" + "{" * 100_000 + "\\" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=["digits", "arrows", "open tag", "spaces", "time", "breaks", "braces"])
def test_hostile_lines_are_read_in_one_pass(text, tmp_path):
    # Patterns that try a line in many ways would not end.
    suffix, _, content = text.partition("\n")
    path = tmp_path / f"talk{suffix}"
    path.write_text(content, encoding="utf-8")
    subtitles = Subtitles(str(path), path.read_bytes())
    path.write_bytes(subtitles.fill(subtitles.texts))
    assert len(subtitles.texts) <= 1
