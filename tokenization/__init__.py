"""Text to ids and back: special tokens, training a tokenizer, and the pair of tokenizers of a model."""

from metaphrase.tokenization.languages import set_languages
from metaphrase.tokenization.phrases import encode_phrase
from metaphrase.tokenization.special_tokens import SpecialTokens, sentinel_tokens
from metaphrase.tokenization.texts import iterate_lines, join_pieces
from metaphrase.tokenization.tokenizer_pair import TokenizerPair
from metaphrase.tokenization.tokenizer_settings import TOKENIZER_KINDS
from metaphrase.tokenization.tokenizer_trainer import train_tokenizer

__all__ = [
    "TOKENIZER_KINDS",
    "SpecialTokens",
    "TokenizerPair",
    "encode_phrase",
    "iterate_lines",
    "join_pieces",
    "sentinel_tokens",
    "set_languages",
    "train_tokenizer",
]
