"""Hints for mistyped names in error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean 'x'?" with the known name most like `name`; an empty text if none is similar.

    Args:
        name: What was given.
        known: All valid names.
        cutoff: Least similarity, from 0 to 1.
    """
    nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
