"""Text to ids and back: training a tokenizer, and the pair of tokenizers of a model."""

from typing import Any

from metaphrase.plugins import PUBLIC_NAMES, import_name
from metaphrase.tokenization.texts import checked_texts, iterate_lines, join_pieces
from metaphrase.tokenization.tokenizer_pair import (
    TextFrame,
    TokenizerPair,
    check_target_language,
    encode_phrase,
    readable_tokens,
    set_languages,
    shorten,
)
from metaphrase.tokenization.tokenizer_trainer import CONTROL_TOKENS, TOKENIZER_KINDS, sentinel_tokens, train_tokenizer

_NAMES_OF_RINGS = PUBLIC_NAMES["metaphrase.tokenization"]

__all__ = ["CONTROL_TOKENS", "TOKENIZER_KINDS", "TextFrame", "TokenizerPair", "check_target_language", "checked_texts"]
__all__ += ["encode_phrase", "iterate_lines", "join_pieces", "readable_tokens", "sentinel_tokens", "set_languages"]
__all__ += ["shorten", "train_tokenizer", *_NAMES_OF_RINGS]


def __getattr__(name: str) -> Any:
    if name not in _NAMES_OF_RINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(f"{_NAMES_OF_RINGS[name]}:{name}")
