"""Source limits: how long a source may be for a model with a table of positions, and which one is too long."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


class TooLongError(ValueError):
    """A source has more tokens than its model has positions.

    Attributes:
        number: Of the source, from 1; in a file that of its line.
        num_tokens: That it has, with its end of sequence.
        limit: That the model can read.
    """

    def __init__(self, number: int, num_tokens: int, limit: int):
        """Takes the attributes, which must be all that there is: an error may come from another process."""
        super().__init__(number, num_tokens, limit)
        self.number, self.num_tokens, self.limit = number, num_tokens, limit

    def __str__(self) -> str:
        return (
            f"A source must not have more tokens than the model has positions, {self.limit}, got {self.num_tokens} in number "
            f"{self.number} (in a file: line {self.number})."
        )


def source_limit(model: Any) -> int | None:
    """Most tokens of a source, the end of sequence counted; `None` where the model itself sets no limit, or is an engine."""
    encoder = model.get_encoder() if hasattr(model, "get_encoder") else None
    table = getattr(encoder, "embed_positions", None)
    # FSMT's table grows when it must.
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):
        return None
    return table.num_embeddings - getattr(table, "offset", 0)


def check_sources(model: Any, sources: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
    """Checks ids before anything is computed.

    Args:
        model: That shall read them.
        sources: Ids of each source.
        numbers: Of each source, from 1.

    Raises:
        TooLongError: If one is longer than the model can read.
    """
    limit = source_limit(model)
    for number, source in zip(numbers, sources, strict=True):
        if limit is not None and len(source) > limit:
            raise TooLongError(number, len(source), limit)


@contextlib.contextmanager
def counting_on(done: int) -> Iterator[None]:
    """Numbers the sources of a part as those of the whole, in which so many come before it."""
    try:
        yield
    except TooLongError as error:
        raise TooLongError(done + error.number, error.num_tokens, error.limit) from None
