"""Editable install that type checkers and editors can follow. The rest of the build stands in pyproject.toml."""

import contextlib
import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

LINKS = ".editable"


def link_rooms(package_dir: dict[str, str]) -> None:
    """Make the folder `.editable/metaphrase`, with a link to each room of the code."""
    shutil.rmtree(LINKS, ignore_errors=True)
    package = Path(LINKS, "metaphrase")
    package.mkdir(parents=True)
    rooms = {name.removeprefix("metaphrase."): folder for name, folder in package_dir.items() if "." in name}
    files = {path.name: path for path in Path("metaphrase").iterdir() if path.is_file()}
    for name, path in {**rooms, **files}.items():
        os.symlink(Path(path).resolve(), package / name)


class LinkedEditable(editable_wheel):
    """By default, setuptools maps `modeling/` to `metaphrase.modeling` by a hook that only a running Python knows."""

    def finalize_options(self) -> None:
        # Where links are not allowed, as on some Windows machines, the hook remains.
        with contextlib.suppress(OSError):
            link_rooms(self.distribution.package_dir)
            self.distribution.package_dir = {"": LINKS}
        super().finalize_options()


setup(cmdclass={"editable_wheel": LinkedEditable})
