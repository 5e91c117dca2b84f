"""Truncation: token ids that are cut to a length, and end as a whole text does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Some may be unknown to a vocabulary, and encoded as nothing.
_PROBES = ("a", "1", ".", "的")


@dataclass(frozen=True)
class TextFrame:
    """What an encoder puts around every text.

    Attributes:
        length: How many ids that are.
        end: Those behind the text: the end of sequence and, by some tokenizers, the code of a language behind it.
    """

    length: int
    end: list[int]

    @classmethod
    def of(cls, encode: Callable[[list[str]], list[list[int]]]) -> "TextFrame":
        """Asks an encoder, from texts to the ids of each, such as `TokenizerPair.encode_sources`."""
        empty, *others = encode(["", *_PROBES])
        probe = next((ids for ids in others if len(ids) > len(empty)), None)
        # Where nothing can be told from the empty text, the end of sequence is the last.
        length = 0 if probe is not None else min(len(empty), 1)
        while probe is not None and length < len(empty) and empty[-1 - length] == probe[-1 - length]:
            length += 1
        return cls(len(empty), list(empty[len(empty) - length :]))


def shorten(row: Sequence[Any], limit: int | None, end: Sequence[Any]) -> list[Any]:
    """The first entries of a row, such as token ids, of which the last are the end; `None` for no limit."""
    if limit is None or len(row) <= limit:
        return list(row)
    return [*row[: max(limit - len(end), 0)], *end]
