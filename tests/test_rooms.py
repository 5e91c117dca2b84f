"""Tests of the rooms that docs/house.md describes: which room may import which, and how large folders are."""

import ast
import functools
import graphlib
import re
import sys
from collections import Counter
from pathlib import Path

from source_files import ROOT, SOURCES, TREES

MAX_FILES_PER_FOLDER = 20
LIBRARIES_OF_MODELING = {"torch", "transformers", "huggingface_hub"}
# Rooms by the room that may import them, from the table of the page. A sub-room without a row belongs to its parent.
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8").partition("## Which room may import")[2]
ROWS = re.findall(r"^\| `([\w/]+)` \| (.*) \|$", PAGE.partition("\n## ")[0], re.MULTILINE)
MAY_IMPORT = {room.replace("/", "."): re.findall(r"`([\w/.]+)`", cell.replace("/", ".")) for room, cell in ROWS}
MAY_IMPORT["scripts"] = list(MAY_IMPORT)
# Import names without `metaphrase.`, but for the room that has no other name.
MODULES = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in SOURCES}


def room_of(module):
    names = [module.rsplit(".", count)[0] for count in range(module.count(".") + 1)]
    return next((name for name in names if name in MAY_IMPORT), names[-1])


def import_statements(file):
    return [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_names(file):
    """Return the full name of all that a file imports, also inside functions."""
    for node in import_statements(file):
        base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ["metaphrase", *Path(file).parts[: -node.level], *base]
        yield from (".".join([*base, alias.name]) for alias in node.names)


@functools.cache
def imported_modules(file):
    """Return the modules of this package that a file imports, without itself."""
    full_names = imported_names(file)
    names = [name.removeprefix("metaphrase.") for name in full_names if name.startswith("metaphrase")]
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    assert modules <= MODULES.keys(), f"{file} imports {modules - MODULES.keys()}"
    return modules


def test_rooms_import_only_the_rooms_of_their_row():
    wrong = []
    for module, file in MODULES.items():
        allowed = {room_of(module), *MAY_IMPORT.get(room_of(module), [])}
        wrong += [f"{file} imports {other}" for other in imported_modules(file) if room_of(other) not in allowed]
    assert not wrong, "\n".join(wrong)
    assert {room_of(module) for module in MODULES} == MAY_IMPORT.keys()


def test_files_do_not_import_each_other_in_a_circle():
    graph = {module: imported_modules(file) for module, file in MODULES.items() if room_of(module) != "modeling"}
    # `static_order` raises CycleError for a circle.
    assert graph.keys() <= set(graphlib.TopologicalSorter(graph).static_order())


def test_modeling_is_flat_and_imports_three_libraries():
    """transformers copies a model's files to the Hub only from one folder, by their imports of the form `from .name import`."""
    for file in (file for file in SOURCES if file.startswith("modeling/")):
        assert file.count("/") == 1
        for node in import_statements(file):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module and "." not in node.module, f"{file}:{node.lineno}"
            elif file != "modeling/__init__.py":  # the only file that does not travel
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                libraries = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
                assert libraries <= LIBRARIES_OF_MODELING, f"{file}:{node.lineno}"


def test_folders_are_small():
    folders = Counter(Path(file).parent.as_posix() for file in SOURCES)
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES_PER_FOLDER} == {}
