"""Tests of the rooms that docs/house.md describes: which room may import which, and how large folders and files are."""

import ast
import graphlib
import sys
from collections import Counter
from pathlib import Path

from source_files import SOURCES

MAX_FILES_PER_FOLDER, MAX_LINES_PER_FILE = 20, 900
LIBRARIES_OF_MODELING = {"torch", "transformers", "huggingface_hub"}
# A sub-room without a row belongs to its parent: `data.denoising` to `data`.
MAY_IMPORT = {
    # scripts: for `python -m metaphrase`.
    "metaphrase": "modeling ops decoding scripts",
    "modeling": "",
    "demo": "",
    "storage": "modeling",
    "tokenization": "storage modeling",
    "ops": "modeling",
    "data": "tokenization storage modeling",
    "filtering": "data tokenization storage modeling",
    "conversion": "conversion.ctranslate2 tokenization storage modeling",
    "conversion.ctranslate2": "conversion tokenization storage modeling",
    "decoding": "modeling",
    "decoding.searches": "decoding tokenization modeling",
    "inference.texts": "",
    "inference": "inference.texts decoding decoding.searches conversion.ctranslate2 tokenization storage modeling",
    "serving": "inference.texts inference decoding tokenization storage modeling",
    "evaluation": "inference data tokenization storage modeling",
    "training": "training.adapters training.recipe training.checkpointing "
    "evaluation inference filtering data tokenization storage modeling",
    "training.recipe": "training.adapters training.checkpointing evaluation data tokenization storage modeling",
    "training.adapters": "tokenization storage modeling",
    "training.checkpointing": "training.adapters data tokenization storage modeling",
    "training.planning": "training training.adapters training.recipe training.checkpointing "
    "data tokenization storage modeling ops",
    "training.choices": "training training.planning training.recipe training.checkpointing "
    "data tokenization storage modeling",
    "hub_card": "training training.recipe training.checkpointing inference tokenization storage modeling",
}
MAY_IMPORT["scripts"] = " ".join(MAY_IMPORT)
# Import names without `metaphrase.`, but for the room that has no other name.
MODULES = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in SOURCES}


def room_of(module):
    names = [module.rsplit(".", count)[0] for count in range(module.count(".") + 1)]
    return next((name for name in names if name in MAY_IMPORT), names[-1])


def import_statements(file):
    return [node for node in ast.walk(ast.parse(SOURCES[file])) if isinstance(node, ast.Import | ast.ImportFrom)]


def runtime_statements(file):
    """Return the import statements of a file without those for type hints, which form no circle."""
    blocks = [node for node in ast.walk(ast.parse(SOURCES[file])) if isinstance(node, ast.If)]
    hints = {line for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for line in lines_of(block)}
    return [node for node in import_statements(file) if node.lineno not in hints]


def lines_of(node):
    return range(node.lineno, node.end_lineno + 1)


def imported_names(file, statements=import_statements):
    """Return the full name of all that a file imports, also inside functions."""
    for node in statements(file):
        base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ["metaphrase", *Path(file).parts[: -node.level], *base]
        yield from (".".join([*base, alias.name]) for alias in node.names)


def imported_modules(file, statements=import_statements):
    """Return the modules of this package that a file imports, without itself."""
    full_names = imported_names(file, statements)
    names = [name.removeprefix("metaphrase.") for name in full_names if name.startswith("metaphrase")]
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    assert modules <= MODULES.keys(), f"{file} imports {modules - MODULES.keys()}"
    return modules


def test_rooms_import_only_the_rooms_of_their_row():
    wrong = []
    for module, file in MODULES.items():
        allowed = {room_of(module), *MAY_IMPORT.get(room_of(module), "").split()}
        wrong += [f"{file} imports {other}" for other in imported_modules(file) if room_of(other) not in allowed]
    assert not wrong, "\n".join(wrong)
    assert {room_of(module) for module in MODULES} == MAY_IMPORT.keys()


def test_files_do_not_import_each_other_in_a_circle():
    graph = {module: imported_modules(file, runtime_statements) for module, file in MODULES.items()}
    # `static_order` raises CycleError for a circle.
    assert set(graphlib.TopologicalSorter(graph).static_order()) == graph.keys()


def test_modeling_is_flat_and_imports_three_libraries():
    """transformers copies a model's files to the Hub only from one folder, by their imports of the form `from .name import`."""
    for file in (file for file in SOURCES if file.startswith("modeling/")):
        assert file.count("/") == 1
        for node in import_statements(file):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module and "." not in node.module, f"{file}:{node.lineno}"
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                libraries = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
                assert libraries <= LIBRARIES_OF_MODELING, f"{file}:{node.lineno}"


def test_folders_and_files_are_small():
    folders = Counter(Path(file).parent.as_posix() for file in SOURCES)
    lengths = {file: len(source.splitlines()) for file, source in SOURCES.items()}
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES_PER_FOLDER} == {}
    assert {file: length for file, length in lengths.items() if length > MAX_LINES_PER_FILE} == {}
