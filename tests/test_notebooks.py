import ast
import json
import re

import pytest
from source_files import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# Pictures that a reader must see when all cells have run.
NUM_PICTURES = {"train": 1, "fine_tune": 0, "look_inside": 2, "evaluate": 1}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean_and_its_imports_exist(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert len({cell["id"] for cell in cells}) == len(cells) in range(10, 21)
    assert not [cell for cell in cells if cell["metadata"] or cell.get("outputs") or cell.get("execution_count")]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not (path.parent / link).is_file()] == []
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse(code)):
        # Jupyter itself brings IPython.
        if isinstance(node, ast.Import | ast.ImportFrom) and "IPython" not in ast.unparse(node):
            exec(ast.unparse(node), {})


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # A cell that fails is an error. The kernel works in an empty folder, without a model in runs/demo.
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == NUM_PICTURES[path.stem]
