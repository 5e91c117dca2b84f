"""Text to ids and back: training a tokenizer, and the pair of tokenizers of a model."""

from metaphrase.plugins import names_of_rings
from metaphrase.tokenization.texts import checked_texts, iterate_lines, join_pieces
from metaphrase.tokenization.tokenizer_pair import (
    TextFrame,
    TokenizerPair,
    check_target_language,
    set_languages,
    shorten,
)
from metaphrase.tokenization.tokenizer_trainer import CONTROL_TOKENS, TOKENIZER_KINDS, train_tokenizer

_NAMES_OF_RINGS, __getattr__ = names_of_rings(__name__)

__all__ = ["CONTROL_TOKENS", "TOKENIZER_KINDS", "TextFrame", "TokenizerPair", "check_target_language", "checked_texts"]
__all__ += ["iterate_lines", "join_pieces", "set_languages", "shorten", "train_tokenizer", *_NAMES_OF_RINGS]
