"""Source limits: which source is too long for a model with a table of positions."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from metaphrase.modeling.pipeline_support import longest_source
from metaphrase.tokenization import TextFrame, shorten


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
            f"{self.number} (in a file: line {self.number}). A `max_source_length` of at most {self.limit} cuts them."
        )


class TooLongTargetError(TooLongError):
    """A target that is given has more tokens than its model has positions."""

    def __str__(self) -> str:
        return (
            f"A target must not have more tokens than the model has positions, {self.limit}, got {self.num_tokens} in number "
            f"{self.number} (in a file: line {self.number})."
        )


def check_source_length(length: int, encode: Callable[[list[str]], list[list[int]]], prefix: str) -> None:
    """Checks a `max_source_length`.

    Args:
        length: To check.
        encode: From source texts to the ids of each.
        prefix: Stands before every source.

    Raises:
        ValueError: If it leaves no place for a token, or none behind the prefix.
    """
    frame = TextFrame.of(encode)
    if length <= frame.length:
        raise ValueError(
            f"`max_source_length` must be at least {frame.length + 1}, a token and what stands around every text, got {length}."
        )
    # What texts with the prefix begin with, whatever follows.
    texts = encode([prefix + text for text in ("a", "1", ".")])
    num_shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*texts, strict=False)))
    if prefix and num_shared < min(map(len, texts)) - len(frame.end) and length <= num_shared + len(frame.end):
        raise ValueError(
            f"`max_source_length` must leave a token for the text behind `source_prefix`, got {length} for a prefix that takes "
            f"{num_shared + len(frame.end)} with what stands around every text."
        )


def count_cut(whole: Sequence[Sequence[int]], cut: Sequence[Sequence[int]]) -> int:
    """How many of the sources lost their end."""
    return sum(map(operator.ne, whole, cut))


def cut_to_positions(generator: Any, sources: Sequence[list[int]]) -> list[list[int]]:
    """Ids of which none has more than a generator's model has positions."""
    limit = longest_source(generator.model)
    if limit is None or all(len(source) <= limit for source in sources):
        return list(sources)
    end = TextFrame.of(generator.tokenizers.encode_sources).end
    return [shorten(source, limit, end) for source in sources]


def check_sources(model: Any, sources: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
    """Checks ids before anything is computed.

    Args:
        model: That shall read them.
        sources: Ids of each source.
        numbers: Of each source, from 1.

    Raises:
        TooLongError: If one is longer than the model can read.
    """
    limit = longest_source(model)
    for number, source in zip(numbers, sources, strict=True):
        if limit is not None and len(source) > limit:
            raise TooLongError(number, len(source), limit)


@contextlib.contextmanager
def numbering(numbers: Sequence[int]) -> Iterator[None]:
    """Numbers sources of a selection, which an engine has found too long, as those of the whole."""
    try:
        yield
    except TooLongError as error:
        raise type(error)(numbers[error.number - 1], error.num_tokens, error.limit) from None


@contextlib.contextmanager
def counting_on(done: int) -> Iterator[None]:
    """Numbers the sources of a part as those of the whole, in which so many come before it."""
    try:
        yield
    except TooLongError as error:
        raise type(error)(done + error.number, error.num_tokens, error.limit) from None
