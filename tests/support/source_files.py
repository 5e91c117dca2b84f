import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The folder `metaphrase/` has links to the first four.
FOLDERS = ("hub_card", "modeling", "scripts", "tokenization", "metaphrase")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TREES = {file: ast.parse(source) for file, source in SOURCES.items()}
