"""Patience: weights are copied for what is run often, or at once for who wants the same to the last bit from the first run on."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_has_none: ContextVar[bool] = ContextVar("has_no_patience", default=False)


class Patience:
    """How often something may still be asked for before it is copied."""

    def __init__(self, count: int):
        self._left = count

    def is_over(self) -> bool:
        """Whether it is to be copied now; each question takes from the patience."""
        self._left -= 1
        return self._left < 0 or _has_none.get()


@contextlib.contextmanager
def without_patience() -> Iterator[None]:
    """Copies are made at once meanwhile.

    A product with a copy rounds in another way, so that what is made of a text would depend on how many came before it.
    """
    token = _has_none.set(True)
    try:
        yield
    finally:
        _has_none.reset(token)
