"""Tests of the English and the names that docs/style.md describes. The numbers at the top may fall, never grow."""

import ast
import io
import re
import tokenize
from itertools import groupby

from source_files import ROOT, SOURCES, TREES

# Lower each number when the tree has fewer.
MAX_SHARE_OF_WEAK_OPENINGS = 0.001
MAX_LONG_SENTENCES = 18
MAX_WEAK_NAMES = 0

MAX_WORDS_PER_SENTENCE = 30
WEAK_OPENING = re.compile(r"\W*(as|how|lets|of|so|that|those|what|when|where|whether|which|who|whom|whose|why)\b", re.I)
WEAK_NAMES = {"asked", "each", "found", "given", "kept", "others", "own", "seen"}
# An item of a list, or an argument in a docstring, begins a new sentence.
NEW_SENTENCE = re.compile(r"^(?=\s*([-*] |\d+\. |[`*\w][^:.\n]{0,60}:( |$)))", re.MULTILINE)


def docstrings(tree):
    """Return the nodes of the docstrings of a file."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [node.body[0].value for node in owners if ast.get_docstring(node) is not None]


def strings(tree):
    """Yield line and text of each docstring, help text, error message and log line."""
    documentation = {id(node) for node in docstrings(tree)}
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in node.values}
    for node in formatted:
        yield (
            node.lineno,
            "".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else "X" for part in node.values),
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            # Other strings hold tables, too, and are wrapped by the source, not by line breaks.
            yield node.lineno, node.value if id(node) in documentation else node.value.replace("\n", "\n\n")


def comments(source):
    """Yield line and text of each block of comments."""
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    # In a block all lines stand in one column, and line and index differ by the same number.
    for _, block in groupby(enumerate(tokens), key=lambda item: (item[1].start[0] - item[0], item[1].start[1])):
        lines = [token for _, token in block]
        yield lines[0].start[0], "\n".join(token.string.lstrip("# ") for token in lines)


def long_sentences(text):
    if len(text.split()) <= MAX_WORDS_PER_SENTENCE:
        return []
    blocks = NEW_SENTENCE.sub("\n\n", text).split("\n\n")
    sentences = [sentence for block in blocks for sentence in re.split(r"(?<=[.!?])\s+", block)]
    return [sentence for sentence in sentences if len(re.findall(r"\S*\w\S*", sentence)) > MAX_WORDS_PER_SENTENCE]


def bound_names(tree):
    """Yield line and name of each argument, and of each variable or attribute that is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def check(texts, limit):
    lines = [f"{file}:{line}: {' '.join(text.split())}" for file, line, text in texts]
    assert len(lines) <= limit, "\n".join([f"got {len(lines)}, at most {limit:.0f} are allowed:", *lines])


def test_docstrings_open_with_a_verb_or_a_noun():
    openings = [(file, node.lineno, node.value) for file, tree in TREES.items() for node in docstrings(tree)]
    weak = [opening for opening in openings if WEAK_OPENING.match(opening[-1])]
    check(weak, MAX_SHARE_OF_WEAK_OPENINGS * len(openings))


def test_sentences_are_short():
    texts = [(file, *text) for file, tree in TREES.items() for text in (*strings(tree), *comments(SOURCES[file]))]
    check([(file, line, long) for file, line, text in texts for long in long_sentences(text)], MAX_LONG_SENTENCES)


def test_sentences_of_pages_are_short():
    pages = {
        path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
    }
    # Code, tables, headings, HTML and the targets of links are no sentences.
    texts = {path: re.sub(r"(?s:```.*?```)|^[|#<].*$|\]\(.*?\)", "", text, flags=re.M) for path, text in pages.items()}
    check([(path.name, 0, long) for path, text in texts.items() for long in long_sentences(text)], 0)


def test_names_say_what_they_hold():
    names = [(file, *name) for file, tree in TREES.items() for name in bound_names(tree)]
    check([name for name in names if name[-1] in WEAK_NAMES], MAX_WEAK_NAMES)
