"""Text to ids and back: training a tokenizer, and the pair of tokenizers of a model."""

from metaphrase.tokenization.texts import checked_texts, iterate_lines, join_pieces
from metaphrase.tokenization.tokenizer_pair import (
    TextFrame,
    TokenizerPair,
    check_target_language,
    encode_phrase,
    set_languages,
    shorten,
)
from metaphrase.tokenization.tokenizer_trainer import CONTROL_TOKENS, TOKENIZER_KINDS, sentinel_tokens, train_tokenizer
from metaphrase.tokenization.words import (
    readable_tokens,
    word_ids_by_offsets,
    words_of_decoded,
    words_of_source,
    words_of_target,
)

__all__ = [
    "CONTROL_TOKENS",
    "TOKENIZER_KINDS",
    "TextFrame",
    "TokenizerPair",
    "check_target_language",
    "checked_texts",
    "encode_phrase",
    "iterate_lines",
    "join_pieces",
    "readable_tokens",
    "sentinel_tokens",
    "set_languages",
    "shorten",
    "train_tokenizer",
    "word_ids_by_offsets",
    "words_of_decoded",
    "words_of_source",
    "words_of_target",
]
