"""Truncation: token ids that are cut to a length, and end as a whole text does."""

from collections.abc import Callable, Sequence


def shared_end(encode: Callable[[list[str]], list[list[int]]]) -> list[int]:
    """The ids that end every text: the end of sequence and, by some tokenizers, the code of a language behind it.

    Args:
        encode: From texts to the ids of each, such as `TokenizerPair.encode_sources`.
    """
    empty, letter = encode(["", "a"])
    length = 0
    while length < min(len(empty), len(letter)) and empty[-1 - length] == letter[-1 - length]:
        length += 1
    return list(empty[len(empty) - length :])


def shorten(ids: Sequence[int], limit: int | None, end: Sequence[int]) -> list[int]:
    """The first so many ids, of which the last are still the end; `None` for no limit."""
    if limit is None or len(ids) <= limit:
        return list(ids)
    return [*ids[: max(limit - len(end), 0)], *end]
