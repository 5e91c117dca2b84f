"""Ids of a phrase in a target."""

import unicodedata

from transformers import PreTrainedTokenizerBase

from metaphrase.errors import MetaphraseError

# Unicode name prefixes of scripts without spaces between words.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE")


def encode_phrase(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids that write a phrase in a target.

    Inside a text, a space precedes a word. A phrase that begins with punctuation may also follow without a space, and a
    phrase in a script without spaces, such as Chinese or Thai, always does. White space around the phrase is ignored.

    Returns:
        Ids of the phrase inside a text, most usual first, and different ids of the phrase at the start of a text, if any.

    Raises:
        MetaphraseError: If the phrase is empty, or the tokenizer cannot write it.
    """
    text = text.strip()
    is_unspaced = unicodedata.name(text[:1] or " ", "").startswith(_UNSPACED)
    fronts = ([] if is_unspaced else [" "]) + ([""] if is_unspaced or not text[:1].isalnum() else [])
    inside = [_encode_behind(tokenizer, front + text) for front in fronts]
    inside = [ids for index, ids in enumerate(inside) if ids not in inside[:index]]
    first = _encode_bare(tokenizer, text)
    if not text or not all(ids and tokenizer.unk_token_id not in ids for ids in (*inside, first)):
        raise MetaphraseError(f"A phrase must be a text that the tokenizer can write, got {text!r}.")
    return inside, [first] if first not in inside else []


def _encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]


def _encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that follows another text: the first of several that keeps its own tokens."""
    for anchor in ("a", ",", "1", "the"):
        before, both = _encode_bare(tokenizer, anchor), _encode_bare(tokenizer, anchor + text)
        if before and both[: len(before)] == before and tokenizer.unk_token_id not in before:
            return both[len(before) :]
    return _encode_bare(tokenizer, text)
