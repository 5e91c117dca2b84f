"""Tokenizers that hold the vocabularies of both sides, as FSMT's and some of Marian's do: two are made of such a one.

By itself it knows the words of one side at a time. FSMT's encodes by the source's vocabulary alone and decodes by the target's
alone; Marian's has a mode for encoding targets, and none for decoding sources.
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase


def split_sides(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
    """The tokenizers of source and target within one; `None` where it has one vocabulary.

    Each encodes and decodes its side alone, so that neither stands for the whole where a model's tokenizer is saved.

    Raises:
        ValueError: If FSMT's has special tokens with other ids in one vocabulary than in the other.
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
            # A model has one id for padding. Its own mode encodes targets as well.
            return None
        source, target = (_marian_side(tokenizer, *side) for side in zip(vocabularies, (0, 1), strict=True))
        return source, target
    return None


def end_with_separator(tokenizer: PreTrainedTokenizerBase) -> None:
    """Lets FSMT's tokenizer know that the token it puts behind a text is the end of sequence, which it calls a separator."""
    if type(tokenizer).__name__ == "FSMTTokenizer" and tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token


def _fsmt_side(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], language: str
) -> PreTrainedTokenizerBase:
    side = _with_vocabulary(tokenizer, vocabulary, langs=[language, language])
    # By the language it divides into words and joins them.
    side.src_lang = side.tgt_lang = language
    return side


def _marian_side(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], place: int
) -> PreTrainedTokenizerBase:
    side = _with_vocabulary(tokenizer, vocabulary, separate_vocabs=False)
    side.separate_vocabs = False
    side.current_encoder = side.encoder
    side.spm_source = side.spm_target = side.current_spm = (tokenizer.spm_source, tokenizer.spm_target)[place]
    side.spm_files = [tokenizer.spm_files[place]] * 2
    return side


def _with_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], **options: Any
) -> PreTrainedTokenizerBase:
    side = copy.copy(tokenizer)
    side.init_kwargs = tokenizer.init_kwargs | options
    side.encoder, side.decoder = dict(vocabulary), {index: token for token, index in vocabulary.items()}
    # It is remembered.
    side._update_total_vocab_size()
    return side
