"""The source files of the package."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}
TREES = {file: ast.parse(source) for file, source in SOURCES.items()}
