"""The exception of a user's mistake, how to tell a mistake from a bug, and the texts of errors. No heavy library is imported."""

import contextlib
import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Note of an error that the first process has raised and shown.
OF_FIRST_PROCESS = "The first process has raised this error, and all end with it."
_PACKAGE = Path(__file__).parent
# Errors of damaged weights, of a field of the wrong type in a configuration, and of the network.
_ERRORS_OF_LIBRARIES = {"SafetensorError", "StrictDataclassError", "HTTPError"}
# Words of pydantic, and of this package.
_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


class MetaphraseError(ValueError):
    """A user's mistake. The message says what is wrong, what was given and how to mend it."""


@contextlib.contextmanager
def naming_extra(extra: str, library: str) -> Iterator[None]:
    """Name the extra in the error if a library that is imported in this context is not installed."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{library} is not installed: pip install metaphrase[{extra}]") from error


@contextlib.contextmanager
def naming_damaged_file(path: str | os.PathLike, expected: str) -> Iterator[None]:
    """Name the file in each of the many errors that libraries raise for damaged files."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise MetaphraseError(f"{path} must be {expected}, got {type(error).__name__}: {text}") from error


def is_mistake(error: BaseException) -> bool:
    """Return True if a user needs only the message of an error, and False for a bug, whose traceback helps.

    A ValueError is a mistake if a library or the network raises it, because they check what a user gives. If it starts
    in other code of this package and is no `MetaphraseError`, it is a bug.
    """
    # EOFError: a truncated .gz file.
    if isinstance(error, MetaphraseError | OSError | ImportError | EOFError | UnicodeDecodeError):
        return True
    if _ERRORS_OF_LIBRARIES & {kind.__name__ for kind in type(error).__mro__}:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not isinstance(error, ValueError) or trace is None:
        return False
    file = Path(trace.tb_frame.f_code.co_filename)
    return not file.is_relative_to(_PACKAGE) or file.parent == _PACKAGE / "modeling"


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean 'x'?" with the known name most like `name`; an empty text if none is similar by `cutoff`, 0 to 1."""
    nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def explain_error(error: Any) -> str:
    """Return one sentence on the first field that a `ValidationError` of pydantic names: what must hold, what was given."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    # Members of a union stand behind the names of fields, such as `list[str]`.
    names = [str(part) for part in first["loc"] if "[" not in str(part) and part not in ("int", "str", "bool", "float")]
    name, text = f"`{'.'.join(names)}`", first["msg"]
    if first["type"] == "missing":
        return f"{name} must be given."
    for word, replacement in _WORDS.items():
        text = text.replace(word, replacement)
    return f"{name} {text}, got {reprlib.repr(first['input'])}."
