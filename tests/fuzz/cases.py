"""A case of the fuzz tests: a command line that meets broken input."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """A command line for `metaphrase.scripts.__main__.main`, and a name that says what is broken.

    Attributes:
        name: What is broken.
        words: The command line.
        expected: Contents that files must have after exit status 0, where the broken part cannot matter.
    """

    name: str
    words: list[str]
    expected: Mapping[Path, bytes] = {}
