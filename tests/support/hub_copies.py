"""The files of a Hub copy, and an interpreter that cannot import this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import metaphrase.modeling

SOURCES = sorted(Path(metaphrase.modeling.__file__).parent.glob("*.py"))
FLAT_FILES = {path.name for path in SOURCES} - {"__init__.py"}

_WITHOUT_PACKAGE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path_hooks = [hook for hook in sys.path_hooks if "editable" not in repr(hook).lower()]
# An installed wheel has no such finder, so the name is closed, too.
sys.modules["metaphrase"] = None
import torch
torch.set_num_threads(1)
"""
_END = """
import json
assert not [name for name in sys.modules if name.startswith("metaphrase.")]
print("REPORT " + json.dumps(report))
"""


def report_without_package(script, folder, *arguments):
    """Run a script without package, network and the caller's Python settings, and return its variable `report`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(folder / "home"), "HF_MODULES_CACHE": str(folder / "modules")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", _WITHOUT_PACKAGE + script + _END, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))
