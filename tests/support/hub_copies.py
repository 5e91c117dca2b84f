"""The files of a Hub copy, and an environment that loads it without this package's caches."""

import os
from pathlib import Path

import metaphrase.modeling

SOURCES = sorted(Path(metaphrase.modeling.__file__).parent.glob("*.py"))
FLAT_FILES = {path.name for path in SOURCES} - {"__init__.py"}


def offline_environment(folder):
    """Return environment variables without network, with an empty cache, and without the caller's Python settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
    }
