"""Errors and checks for sources that are too long for a model."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from metaphrase.modeling.pipeline_support import longest_source
from metaphrase.tokenization import TextFrame, shorten

if TYPE_CHECKING:
    from metaphrase.inference.generator import Generator


# Most tokens of a source for a model without a limit, such as T5, unless a batch may have more. The memory for attention grows
# with the square of this number.
MAX_TOKENS_WITHOUT_POSITIONS = 8192


class TooLongError(ValueError):
    """A source has more tokens than its model has positions, or than fit into memory.

    Attributes:
        number: Number of the source, from 1; in a file that of the line.
        num_tokens: Tokens of the source, with end of sequence.
        limit: Most tokens.
        side: `source`, or `target` for a target that was given.
        has_positions: True if the limit is that of the model's positions.
    """

    def __init__(self, number: int, num_tokens: int, limit: int, side: str = "source", has_positions: bool = True):
        # An error from another process is rebuilt from these arguments.
        super().__init__(number, num_tokens, limit, side, has_positions)
        self.number, self.num_tokens, self.limit, self.side = number, num_tokens, limit, side
        self.has_positions = has_positions

    def __str__(self) -> str:
        hint = f" Set `max_source_length` to {self.limit} or less to truncate it." if self.side == "source" else ""
        hint += "" if self.has_positions else " Set `max_tokens_per_batch` to read it whole, with more memory."
        reason = "than the model has positions" if self.has_positions else "than `max_tokens_per_batch` or the default"
        return (
            f"A {self.side} must not have more tokens {reason}, {self.limit}, got {self.num_tokens} in "
            f"number {self.number} (in a file: line {self.number}).{hint}"
        )


def check_source_length(length: int, encode: Callable[[list[str]], list[list[int]]], prefix: str) -> None:
    """Check a `max_source_length`.

    Args:
        length: The value to check.
        encode: Encodes source texts.
        prefix: Text before every source.

    Raises:
        ValueError: If the length has no room for a token of the text beside special tokens and prefix.
    """
    frame = TextFrame.of(encode)
    if length <= frame.length:
        raise ValueError(
            f"`max_source_length` must be at least {frame.length + 1}, one token and the special tokens, got {length}."
        )
    # Count the tokens of the prefix: those that different texts share at their beginning.
    texts = encode([prefix + text for text in ("a", "1", ".")])
    num_shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*texts, strict=False)))
    if prefix and num_shared < min(map(len, texts)) - len(frame.end) and length <= num_shared + len(frame.end):
        raise ValueError(
            f"`max_source_length` must be above {num_shared + len(frame.end)}, the tokens of `source_prefix` with special "
            f"tokens, got {length}."
        )


def count_cut(uncut: Sequence[Sequence[int]], cut: Sequence[Sequence[int]]) -> int:
    """Return the number of truncated sources."""
    return sum(map(operator.ne, uncut, cut))


def cut_to_positions(generator: "Generator", sources: Sequence[list[int]]) -> list[list[int]]:
    """Return the ids of each source, truncated to the number of positions of a generator's model."""
    limit, end = longest_source(generator.model), TextFrame.of(generator.tokenizers.encode_sources).end
    return [shorten(source, limit, end) for source in sources]


def check_sources(generator: "Generator", sources: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
    """Check the lengths of sources.

    Args:
        generator: The reader.
        sources: Ids of each source.
        numbers: Number of each source, from 1.

    Raises:
        TooLongError: If a source has more tokens than the model has positions, or than fit into memory.
    """
    positions = longest_source(generator.model)
    limit = max(MAX_TOKENS_WITHOUT_POSITIONS, generator.max_tokens_per_batch) if positions is None else positions
    for number, source in zip(numbers, sources, strict=True):
        if len(source) > limit:
            raise TooLongError(number, len(source), limit, has_positions=positions is not None)


@contextlib.contextmanager
def numbering(numbers: Sequence[int]) -> Iterator[None]:
    """Replace the number in a `TooLongError`: source i of a selection has number `numbers[i - 1]`."""
    try:
        yield
    except TooLongError as error:
        raise TooLongError(numbers[error.number - 1], *error.args[1:]) from None
