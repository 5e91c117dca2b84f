import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

# The tests need no network: npm has installed the package before.
VARIABLE = "METAPHRASE_NODE_MODULES"
PACKAGE = "@huggingface/transformers"


def node_modules() -> Path:
    """Return the folder of npm's packages, or skip the test."""
    folder = os.environ.get(VARIABLE)
    if shutil.which("node") is None:
        pytest.skip("needs node")
    if folder is None or not (Path(folder) / PACKAGE).is_dir():
        pytest.skip(f"needs {VARIABLE}, a node_modules with {PACKAGE}")
    return Path(folder)


def run_node(folder: Path, script: str, values: object = None) -> str:
    """Run a module in a folder that has npm's packages, with `values` as its input. Return its output."""
    link = folder / "node_modules"
    if not link.exists():
        link.symlink_to(node_modules())
    path = folder / "script.mjs"
    path.write_text(script, encoding="utf-8")
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    options |= {"env": os.environ | {"HF_HUB_OFFLINE": "1"}, "input": json.dumps(values)}
    result = subprocess.run(["node", path.name], cwd=folder, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout
