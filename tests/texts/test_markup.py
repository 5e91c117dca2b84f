"""Tests of HTML and XML: output is well-formed, tags keep their words, and what must stay stays."""

import html
import random
import re
from xml.etree import ElementTree

import pytest
from identity_engine import identity_generator
from tiny_generator import tiny_generator

from metaphrase.texts.markup import MarkedText, parse_markup
from metaphrase.texts.plan import Links
from metaphrase.texts.whole_texts import TextDecoder

WORDS = ["cat", "dog", "One.", "Two!", "&amp;", "&lt;", "x &gt; y", "Ende.", "Dr. Who", "3", "été"]
SPACES = (" ", "\n  ")
ANY_GAPS = ("", *SPACES)
INLINE, BLOCKS = ["b", "i", "a", "span", "em"], ["p", "div", "li", "td"]


def draw_inline(draw: random.Random, depth: int, gaps: tuple[str, ...]) -> str:
    parts = [draw.choice(gaps)]
    for _ in range(draw.randrange(1, 5)):
        kind = draw.randrange(8) if depth else 0
        if kind < 4:
            parts.append(" ".join(draw.choice(WORDS) for _ in range(draw.randrange(4))))
        elif kind == 4:
            parts.append(draw.choice(['<img src="a&amp;b"/>', "<!-- a < b -->", "<code>let x = 1;</code>", "<wbr/>"]))
        elif kind == 5:
            parts.append("<br/>")
        else:
            name = draw.choice(INLINE)
            parts.append(f"<{name} id='{draw.random()}'>{draw_inline(draw, depth - 1, gaps)}</{name}>")
        parts.append(draw.choice(gaps))
    return "".join(parts)


def draw_tree(draw: random.Random, gaps: tuple[str, ...], depth: int = 2) -> str:
    parts = []
    for _ in range(draw.randrange(1, 4)):
        name = draw.choice(BLOCKS)
        inner = draw_tree(draw, gaps, depth - 1) if depth and draw.random() < 0.4 else draw_inline(draw, 3, gaps)
        parts.append(f"<{name}>{inner}</{name}>" if draw.random() < 0.9 else inner)
    return "".join(parts)


@pytest.mark.parametrize("text_format", ["html", "xml"])
def test_identity_keeps_random_pages_and_any_alignment_keeps_them_well_formed(text_format, align):
    draw = random.Random(1)
    # A tag inside a word would move to the border of the word.
    pages = [f"<r>{draw_tree(draw, SPACES)}</r>" for _ in range(100)]
    outputs = TextDecoder(identity_generator(), text_format=text_format).decode(pages)
    assert ["".join(output.split()) for output in outputs] == ["".join(page.split()) for page in pages]
    align(lambda _, count: draw.choice([None, *range(count)]))
    pages = [f"<r>{draw_tree(draw, ANY_GAPS)}</r>" for _ in range(200)]
    generator = identity_generator(lambda text: " ".join(reversed(text.split())))
    outputs = TextDecoder(generator, text_format=text_format).decode(pages)
    for page, output in zip(pages, outputs, strict=True):
        ElementTree.fromstring(output)
        assert sorted(re.findall(r"<[^>]+>", output)) == sorted(re.findall(r"<[^>]+>", page))


PAGE = """<!DOCTYPE html><html><head><title>The cat</title><style>b { color: red }</style>
<script>if (a < b) run("x");</script></head>
<body class="x"><!-- stay --><p>The <a href="a?b=1&amp;c=2">small cat</a> is <code>x &lt; 1</code> here.</p>
<pre>the cat
 stays</pre><p translate="no">the <b>cat</b></p><p>A&nbsp;dog &copy; <span class="notranslate">Rex</span></p></body></html>"""


def test_page_keeps_what_must_stay(align):
    [output] = TextDecoder(identity_generator(str.upper), text_format="html").decode([PAGE])
    expected = PAGE
    for text in ("The cat<", "The <a", "small cat", "</a> is", "</code> here", "A&nbsp;dog"):
        changed = re.sub(r"(?<![</&\w])\w+(?![\w;>])", lambda word: word[0].upper(), text)
        expected = expected.replace(text, changed)
    assert output == expected


def test_a_word_far_away_does_not_stretch_an_element():
    words = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    links = Links(words, words, [1, 1, 0, 4, 1])
    assert links.find(2, 3) == (0, 3) and links.find(0, 1) == (4, 5) and links.find(4, 5) is None


def test_tags_follow_their_words(align):
    # The target has the words of the source in reverse order.
    align(lambda index, count: count - 1 - index)
    expected = {
        "<p>one <b>two <i>three</i></b> four<img> five</p>": "<p>five four<img> <b><i>three</i> two</b> one</p>",
        "<p>one two <img>three</p>": "<p><img>three two one</p>",
        "<p><b>one two</b> three</p>": "<p>three <b>two one</b></p>",
        "<p>one <b>two three</b></p>": "<p><b>three two</b> one</p>",
    }
    generator = identity_generator(lambda text: " ".join(reversed(text.split())))
    assert TextDecoder(generator, text_format="html").decode([*expected]) == [*expected.values()]


def test_elements_with_two_sentences_stay_whole(align):
    page = "<p>See <code>One. Two</code> here. Then go.</p>"
    [output] = TextDecoder(identity_generator(str.upper), text_format="html").decode([page])
    assert output == "<p>SEE <code>One. Two</code> HERE. THEN GO.</p>"
    page = "<p>One is <b>two. Three</b> is four.</p>"
    assert TextDecoder(identity_generator(), text_format="html").decode([page]) == [page]


@pytest.mark.parametrize(("layers", "layer"), [(2, -1), (6, -2)])
def test_the_layer_that_aligns_best_is_read(layers, layer, monkeypatch):
    def read(generator, sources, targets, **options):
        assert options == {"layer": layer}
        raise InterruptedError

    monkeypatch.setattr("metaphrase.texts.whole_texts.cross_attentions", read)
    with pytest.raises(InterruptedError):
        TextDecoder(tiny_generator(layers=layers), text_format="html").decode(["<p>the <b>cat</b> runs</p>"])


def test_xml_with_text_beside_tags_is_inline():
    parts = parse_markup("<doc><p>one <w>two</w></p><q><w>three</w></q></doc>", is_html=False)
    assert [part.text for part in parts if isinstance(part, MarkedText)] == ["one two", "three"]


def test_broken_markup_loses_nothing(align):
    pages = ["<b>one", "one</b> two", "<b><i>x</b></i>", "a < b", "<", "<p", "&amp", "x<!-- y", "<a b='c>d"]
    pages += [f"a &#{'9' * 5000};"]
    outputs = TextDecoder(identity_generator(), text_format="html").decode(pages)
    assert [html.unescape(output) for output in outputs] == pages
