"""Check of the English and the names that style.md describes: `python docs/prose.py` prints what breaks a rule."""

import ast
import io
import re
import sys
import tokenize
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS_PER_SENTENCE = 34
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
    """Return the sentences with too many words."""
    if len(text.split()) <= MAX_WORDS_PER_SENTENCE:
        return []
    blocks = NEW_SENTENCE.sub("\n\n", text).split("\n\n")
    sentences = [sentence for block in blocks for sentence in re.split(r"(?<=[.!?;])\s+", block)]
    return [sentence for sentence in sentences if len(re.findall(r"\S*\w\S*", sentence)) > MAX_WORDS_PER_SENTENCE]


def bound_names(tree):
    """Yield line and name of each argument, and of each variable or attribute that is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def check_source(source):
    """Yield line and text of what breaks a rule in a Python file."""
    tree = ast.parse(source)
    for line, text in (*strings(tree), *comments(source)):
        yield from ((line, f"long sentence: {sentence}") for sentence in long_sentences(text))
    for node in docstrings(tree):
        if WEAK_OPENING.match(node.value):
            yield node.lineno, f"a docstring must open with a verb or a noun: {node.value.partition('.')[0]}"
    yield from (
        (line, f"a name must say what it holds: {name}") for line, name in bound_names(tree) if name in WEAK_NAMES
    )


def check_page(text):
    """Yield line 0 and text of what breaks a rule in a page. Code, tables, headings and HTML are no sentences."""
    text = re.sub(r"(?s:```.*?```)|^[|#<].*$|\]\(.*?\)", "", text, flags=re.M)
    yield from ((0, f"long sentence: {sentence}") for sentence in long_sentences(text))


def main():
    """Print what breaks a rule, and return the exit status."""
    folders = ("hub_card", "modeling", "scripts", "tokenization", "metaphrase")
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())}"
        for path in (*sources, *pages)
        for line, text in (check_page if path.suffix == ".md" else check_source)(path.read_text(encoding="utf-8"))
    ]
    for problem in problems:
        print(problem)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
