"""Tests of subtitles: times, tags and all else of a file stay, and sentences go over events."""

import pytest
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
        file = read_file(tmp_path / name)
        decoder = TextDecoder(identity_generator(str.upper), text_format="xml", has_lines=True)
        file.write(decoder.decode(file.texts), tmp_path / "out")
        return file.texts, (tmp_path / "out").read_bytes().decode()

    return decode


def replaced(text, changes):
    for source, target in changes.items():
        assert source in text
        text = text.replace(source, target)
    return text


def test_srt(decoded):
    texts, output = decoded("talk.srt", SRT)
    assert texts[0] == "We saw the small dog &amp; the cat." and len(texts) == 3
    changes = {
        "We saw the small": "WE SAW THE SMALL",
        "dog & the cat.": "DOG & THE CAT.",
        "Is it <b>here</b>?": "IS IT <b>HERE</b>?",
        "No.": "NO.",
        "A longer sentence is here, and\nit has two": "A LONGER SENTENCE IS HERE,\nAND IT HAS TWO",
        " lines of text.": " LINES OF TEXT.",
    }
    assert output == replaced(SRT, changes)
    _, output = decoded("talk.srt", "\ufeff" + SRT.replace("\n", "\r\n"))
    assert output == "\ufeff" + replaced(SRT, changes).replace("\n", "\r\n")


def test_vtt_keeps_settings_notes_and_names(decoded):
    texts, output = decoded("talk.vtt", VTT)
    # The second cue comes too late to continue the first one.
    assert len(texts) == 2
    changes = {"Tom &amp; Eva are <c.loud>here": "TOM &amp; EVA ARE <c.loud>HERE", "and there.": "AND THERE."}
    assert output == replaced(VTT, changes)


def test_ass_keeps_styles_comments_and_songs(decoded):
    texts, output = decoded("talk.ass", ASS)
    assert len(texts) == 2
    sentence = "{\\i1}the small, old\\Ndog{\\i0} and"
    assert output == replaced(ASS, {sentence: "{\\i1}THE SMALL, OLD DOG{\\i0} AND", ",,Exit": ",,EXIT"})


def test_unlike_tags_have_unlike_numbers(tmp_path):
    path = tmp_path / "talk.ass"
    texts = ("a{\\an1}b{\\an2}c{\\an3}d.", "{\\an4}e{\\an5}f.")
    path.write_text("".join(f"Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,{text}\n" for text in texts))
    file, content = Subtitles(path), path.read_text()
    file.write(file.texts, path)
    assert path.read_text() == content


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
    ],
)
def test_target_is_divided_among_events(tmp_path, texts, target, expected):
    (tmp_path / "talk.srt").write_text(events(*texts), encoding="utf-8")
    file = Subtitles(tmp_path / "talk.srt")
    [opening, *_] = [tag for tag in file.markup if "/" not in tag] or [""]
    target = target.replace("<", "\0").replace(">", opening.replace("<", "</")).replace("\0", opening)
    file.write([target], tmp_path / "out.srt")
    expected = [text.replace("<", "<b>").replace(" dd>", " dd</b>") for text in expected]
    assert (tmp_path / "out.srt").read_text(encoding="utf-8") == events(*expected)


def test_sentences_that_go_on(tmp_path):
    cases = {("One", "two."): 1, ("One.", "Two."): 2, ("One", "- Two."): 2, ("[A door]", "one."): 2}
    cases[tuple(f"part {number}" for number in range(1, 10))] = 2
    for texts, number in cases.items():
        (tmp_path / "talk.srt").write_text(events(*texts), encoding="utf-8")
        assert len(Subtitles(tmp_path / "talk.srt").texts) == number, texts


def test_command(run_generate, tmp_path):
    (tmp_path / "talk.srt").write_text(SRT, encoding="utf-8")
    run_generate("--file", tmp_path / "talk.srt", "--output", tmp_path / "out.srt")
    output = (tmp_path / "out.srt").read_text(encoding="utf-8")
    assert [line for line in output.split("\n") if "-->" in line] == [line for line in SRT.split("\n") if "-->" in line]
    assert output.count("<b>") == output.count("</b>") == 1 and "The" not in output


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("talk.srt", b"1\n00:00:01,000 --> 00:00:02,000\nM\xfcll\n", (), "must be UTF-8"),
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
    ".srt\n" + "-->" * 100_000,
    ".srt\n1\n00:00:01,000 --> 00:00:02,000\n<" + "a" * 100_000,
    ".vtt\n00:01.000 --> 00:02.000\n" + " " * 100_000,
    ".vtt\n00:01.000 --> 00:02.000\n<00:01.500>",
    ".ass\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,a" + "\\N" * 50_000 + "- b",
    ".ass\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,a" + "{" * 100_000 + "\\" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=["arrows", "open tag", "spaces", "time", "breaks", "braces"])
def test_hostile_lines_are_read_in_one_pass(text, tmp_path):
    # Patterns that try a line in many ways would not end.
    suffix, _, content = text.partition("\n")
    path = tmp_path / f"talk{suffix}"
    path.write_text(content, encoding="utf-8")
    subtitles = Subtitles(path)
    subtitles.write(subtitles.texts, path)
    assert len(subtitles.texts) <= 1
