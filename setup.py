"""Packages from the folders, and an editable install that type checkers can follow. The rest stands in pyproject.toml.

A folder at the top level is a package below the namespace `metaphrase`: modeling/ is imported as metaphrase.modeling.
"""

import contextlib
import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

LINKS = ".editable"
ROOMS = sorted(path.parent.name for path in Path().glob("*/__init__.py") if path.parent.name != "metaphrase")
FOLDERS = sorted(path.parent.as_posix() for room in ROOMS for path in Path(room).rglob("__init__.py"))


def link_rooms() -> None:
    """Make the folder `.editable/metaphrase`, with a link to each room of the code."""
    shutil.rmtree(LINKS, ignore_errors=True)
    package = Path(LINKS, "metaphrase")
    package.mkdir(parents=True)
    for path in (*map(Path, ROOMS), *(path for path in Path("metaphrase").iterdir() if path.is_file())):
        os.symlink(path.resolve(), package / path.name)


class LinkedEditable(editable_wheel):
    """By default, setuptools maps `modeling/` to `metaphrase.modeling` by a hook that only a running Python knows."""

    def finalize_options(self) -> None:
        # Where links are not allowed, as on some Windows machines, the hook remains.
        with contextlib.suppress(OSError):
            link_rooms()
            self.distribution.package_dir = {"": LINKS}
        super().finalize_options()


setup(
    packages=["metaphrase", *("metaphrase." + folder.replace("/", ".") for folder in FOLDERS)],
    package_dir={"metaphrase": "metaphrase"} | {f"metaphrase.{room}": room for room in ROOMS},
    cmdclass={"editable_wheel": LinkedEditable},
)
