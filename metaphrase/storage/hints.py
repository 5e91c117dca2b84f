"""Texts of error messages: what must hold, what was given, and the nearest known name. This file imports no heavy library."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


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
