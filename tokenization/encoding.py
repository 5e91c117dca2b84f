"""Ids of a phrase inside a text, and truncation of ids that keeps the end of sequence."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

# Texts to put before a phrase; the first one that keeps its own tokens is used.
_ANCHORS = ("a", ",", "1", "the")
# Unicode name prefixes of scripts without spaces between words.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE")
# A vocabulary may encode some of these as nothing.
_PROBES = ("a", "1", ".", "的")


def encode_phrase(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids that write a phrase in a target.

    Inside a text, a space precedes a word. A phrase that begins with punctuation may also follow without a space, and a
    phrase in a script without spaces, such as Chinese or Thai, always does. White space around the phrase is ignored.

    Args:
        tokenizer: The tokenizer of the targets.
        text: One word or several.

    Returns:
        Ids of the phrase inside a text, most usual first, and different ids of the phrase at the start of a text, if any.

    Raises:
        ValueError: If the phrase is empty, or the tokenizer cannot write it.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A phrase must be a text with at least one character that is not white space, got {text!r}.")
    text = text.strip()
    if unicodedata.name(text[0], "").startswith(_UNSPACED):
        fronts = ("",)
    elif text[0].isalnum():
        fronts = (" ",)
    else:
        fronts = (" ", "")
    inside = [_encode_behind(tokenizer, front + text) for front in fronts]
    inside = [ids for index, ids in enumerate(inside) if ids not in inside[:index]]
    first = _encode(tokenizer, text)
    for ids in (*inside, first):
        if not ids or tokenizer.unk_token_id in ids:
            raise ValueError(
                f"The tokenizer must be able to write a phrase, got {text!r}, which has unknown characters."
            )
    return inside, [first] if first not in inside else []


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]


def _encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that follows another text."""
    for anchor in _ANCHORS:
        before, both = _encode(tokenizer, anchor), _encode(tokenizer, anchor + text)
        if before and both[: len(before)] == before and tokenizer.unk_token_id not in before:
            return both[len(before) :]
    return _encode(tokenizer, text)


@dataclass(frozen=True)
class TextFrame:
    """Special ids that an encoder puts around every text.

    Attributes:
        length: Number of all these ids.
        end: Ids behind the text: the end of sequence, and the language code that some tokenizers put behind it.
    """

    length: int
    end: list[int]

    @classmethod
    def of(cls, encode: Callable[[list[str]], list[list[int]]]) -> "TextFrame":
        """Find the frame of an encoder such as `TokenizerPair.encode_sources`."""
        empty, *rows = encode(["", *_PROBES])
        # If no probe is encoded, take the last id for the end of sequence.
        probe = next((ids for ids in rows if len(ids) > len(empty)), empty[-1:])
        shared = takewhile(lambda ids: ids[0] == ids[1], zip(reversed(empty), reversed(probe), strict=False))
        return cls(len(empty), [token for token, _ in shared][::-1])


def shorten(row: Sequence[Any], limit: int | None, end: Sequence[Any]) -> list[Any]:
    """Cut a row, such as token ids, to `limit` entries, of which the last are `end`. None means no limit."""
    if limit is None or len(row) <= limit:
        return list(row)
    return [*row[: max(limit - len(end), 0)], *end]
