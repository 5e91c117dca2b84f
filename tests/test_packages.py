"""Tests of the packages that docs/house.md describes: which may import which, and how large folders are."""

import ast
import functools
import graphlib
import re
import sys
from collections import Counter
from pathlib import Path

from source_files import FOLDERS, ROOT, SOURCES, TREES

MAX_FILES_PER_FOLDER = 20
# These numbers may fall, never grow.
MAX_SOURCE_LINES, MAX_SOURCE_FILES, MAX_RAISES = 33_000, 165, 400
MAX_TEST_LINES = 29_750
# Limits of the code that travels to the Hub beside the weights.
MAX_HUB_LINES, MAX_HUB_FILES = 2_260, 10
FOLDERS_AT_THE_TOP = {*FOLDERS, "benchmarks", "docs", "tests"}
LIBRARIES_OF_MODELING = {"torch", "transformers", "huggingface_hub"}
# The packages in the order of the table: each may import those above it.
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8").partition("## Which package may import which")[2]
ROWS = re.findall(r"^\| (core|speed|choices|reach|command) \| `(\w+)` \|", PAGE.partition("\n## ")[0], re.MULTILINE)
PACKAGES = [package for _, package in ROWS]
CORE = {package for ring, package in ROWS if ring == "core"}
# The subcommands of the core, which import nothing else.
CORE_SCRIPTS = {f"scripts.{name}" for name in ("__main__", "train", "evaluate", "generate", "push", "parsers")}
MODULES = {
    file.removeprefix("metaphrase/").removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
    for file in SOURCES
}
MODULES["metaphrase"] = MODULES.pop("__init__")


def package_of(module):
    return module.partition(".")[0]


def import_statements(file):
    return [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_names(file):
    """Return the full name of all that a file imports, also inside functions."""
    for node in import_statements(file):
        base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ["metaphrase", *Path(file.removeprefix("metaphrase/")).parts[: -node.level], *base]
        yield from (".".join([*base, alias.name]) for alias in node.names)


@functools.cache
def imported_modules(file):
    full_names = imported_names(file)
    names = [name.removeprefix("metaphrase.") for name in full_names if name.startswith("metaphrase")]
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    assert modules <= MODULES.keys(), f"{file} imports {modules - MODULES.keys()}"
    return modules


def test_packages_import_only_those_above_them():
    own = {module for module in MODULES if module in ("metaphrase", "__main__", "errors", "plugins", "presets")}
    assert {package_of(module) for module in MODULES.keys() - own} == set(PACKAGES)
    wrong = []
    for module in MODULES.keys() - own:
        is_core = module in CORE_SCRIPTS or module.startswith("scripts.parsers")
        is_core &= module != "scripts.parsers.rings"
        above = CORE if is_core else PACKAGES[: PACKAGES.index(package_of(module))]
        allowed = {*above, *own, package_of(module)}
        wrong += [
            f"{module} imports {other}"
            for other in imported_modules(MODULES[module])
            if package_of(other) not in allowed
        ]
    assert not wrong, "\n".join(sorted(wrong))


def test_files_do_not_import_each_other_in_a_circle():
    graph = {module: imported_modules(file) for module, file in MODULES.items() if package_of(module) != "modeling"}
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


def test_package_can_be_read():
    lines = {file: source.count("\n") for file, source in SOURCES.items()}
    travelling = [file for file in SOURCES if file.startswith("modeling/") and file != "modeling/__init__.py"]
    assert sum(lines.values()) <= MAX_SOURCE_LINES and len(lines) <= MAX_SOURCE_FILES
    assert sum(isinstance(node, ast.Raise) for tree in TREES.values() for node in ast.walk(tree)) <= MAX_RAISES
    assert len(travelling) <= MAX_HUB_FILES and sum(lines[file] for file in travelling) <= MAX_HUB_LINES
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    assert sum(text.count("\n") for text in tests) <= MAX_TEST_LINES
    assert {path.parent.name for path in ROOT.glob("*/*.py")} == FOLDERS_AT_THE_TOP
