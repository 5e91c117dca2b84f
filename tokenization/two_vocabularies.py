"""Tokenizers with a source and a target vocabulary, as FSMT's and some of Marian's, split into one for each side.

FSMT's tokenizer encodes only sources and decodes only targets. Marian's also encodes targets, but decodes no sources.
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase


def split_sides(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
    """Return the tokenizers of source and target, or None if there is one vocabulary. Neither can be saved for both.

    Raises:
        ValueError: If a special token of FSMT's has two ids.
    """
    name = type(tokenizer).__name__
    if name == "FSMTTokenizer":
        vocabularies = tokenizer.encoder, {token: index for index, token in tokenizer.decoder.items()}
        for token in tokenizer.all_special_tokens:
            ids = [vocabulary.get(token) for vocabulary in vocabularies]
            if ids[0] != ids[1]:
                raise ValueError(
                    f"{token!r} must have one id in both vocabularies of a {name}, got {ids[0]} and {ids[1]}."
                )
        languages = tokenizer.src_lang, tokenizer.tgt_lang
        source, target = (_fsmt_side(tokenizer, *side) for side in zip(vocabularies, languages, strict=True))
        return source, target
    if name == "MarianTokenizer" and tokenizer.separate_vocabs:
        vocabularies = tokenizer.encoder, tokenizer.target_encoder
        if any(vocabularies[0].get(token) != vocabularies[1].get(token) for token in tokenizer.all_special_tokens):
            # A model has one padding id, and the tokenizer itself also encodes targets.
            return None
        source, target = (_marian_side(tokenizer, vocabulary, side) for side, vocabulary in enumerate(vocabularies))
        return source, target
    return None


def _fsmt_side(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], language: str
) -> PreTrainedTokenizerBase:
    side = _with_vocabulary(tokenizer, vocabulary, langs=[language, language])
    # The language decides how words are split and joined.
    side.src_lang = side.tgt_lang = language
    return side


def _marian_side(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], index: int
) -> PreTrainedTokenizerBase:
    side = _with_vocabulary(tokenizer, vocabulary, separate_vocabs=False)
    side.separate_vocabs = False
    side.current_encoder = side.encoder
    side.spm_source = side.spm_target = side.current_spm = (tokenizer.spm_source, tokenizer.spm_target)[index]
    side.spm_files = [tokenizer.spm_files[index]] * 2
    return side


def _with_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], **options: Any
) -> PreTrainedTokenizerBase:
    side = copy.copy(tokenizer)
    side.init_kwargs = tokenizer.init_kwargs | options
    side.encoder, side.decoder = dict(vocabulary), {index: token for token, index in vocabulary.items()}
    # The copy still has the cached vocabulary.
    side._update_total_vocab_size()
    return side
