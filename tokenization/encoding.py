"""Phrases: the ids of a piece of text as it stands inside a text, and at its beginning.

Truncation: token ids that are cut to a length, and end as a whole text does.
"""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

# Stand in front of a phrase while it is tokenized; the first one behind which it keeps tokens of its own will do.
_ANCHORS = ("a", ",", "1", "the")
# Scripts that put no space between words, by the names of their letters.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE")


def encode_phrase(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[list[int]], list[list[int]]]:
    """The ids that write a phrase in a target.

    Inside a text a word has the tokenizer's mark of a space before it. What no letter or digit begins may also follow without
    one; and a letter of a script without spaces, such as Chinese or Thai, does. White space around the phrase does not count.

    Args:
        tokenizer: Of the targets.
        text: One word or several.

    Returns:
        Ids of the phrase anywhere in a text, the usual ones first, and ids of it at the beginning of a text, where these differ.

    Raises:
        ValueError: If the phrase is empty, or the tokenizer cannot write it.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A phrase must be a text with at least one character that is not white space, got {text!r}.")
    text = text.strip()
    fronts = {"word": (" ",), "unspaced": ("",), "other": (" ", "")}[_kind(text[0])]
    inside = [_encode_behind(tokenizer, front + text) for front in fronts]
    inside = [ids for index, ids in enumerate(inside) if ids not in inside[:index]]
    first = _encode(tokenizer, text)
    for ids in (*inside, first):
        if not ids or tokenizer.unk_token_id in ids:
            raise ValueError(
                f"The tokenizer must be able to write a phrase, got {text!r}, which has unknown characters."
            )
    return inside, [first] if first not in inside else []


def _kind(character: str) -> str:
    if unicodedata.name(character, "").startswith(_UNSPACED):
        return "unspaced"
    return "word" if character.isalnum() else "other"


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]


def _encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text behind another one."""
    for anchor in _ANCHORS:
        before, both = _encode(tokenizer, anchor), _encode(tokenizer, anchor + text)
        if before and both[: len(before)] == before and tokenizer.unk_token_id not in before:
            return both[len(before) :]
    return _encode(tokenizer, text)


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
