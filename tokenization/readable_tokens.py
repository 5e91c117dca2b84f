"""Readable tokens: what one token is, by itself, for people to look at."""

from transformers import PreTrainedTokenizerBase

from metaphrase.tokenization.tokenizer_pipeline import SPACE_MARK

# What byte-level tokenizers write for a space, and what a decoder writes for bytes that are no character.
_BYTE_LEVEL_SPACE, _REPLACEMENT = "\u0120", "\ufffd"


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Each token by itself, with a mark in place of a space.

    A byte-level tokenizer's token is decoded; one that is only a part of a character stays in the tokenizer's own alphabet, as
    do all tokens of the other kinds of tokenizers, which can be read as they are.
    """
    pieces = tokenizer.convert_ids_to_tokens(ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in repr(backend.decoder):
        return pieces
    shown = []
    for token, piece in zip(ids, pieces, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        is_whole = text and _REPLACEMENT not in text
        shown.append(text.replace(" ", SPACE_MARK) if is_whole else piece.replace(_BYTE_LEVEL_SPACE, SPACE_MARK))
    return shown
