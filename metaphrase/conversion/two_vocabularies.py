"""Tokenizers of source and target, split from one with two vocabularies."""

import copy

from transformers import PreTrainedTokenizerBase

from metaphrase.errors import MetaphraseError


def split_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizers of source and target, or the same one twice. Neither can be saved for both."""
    name = type(tokenizer).__name__
    if name == "FSMTTokenizer":
        # Its end of sequence is called a separator.
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
        vocabularies = tokenizer.encoder, {token: index for index, token in tokenizer.decoder.items()}
    elif tokenizer.separate_vocabs:
        vocabularies = tokenizer.encoder, tokenizer.target_encoder
    else:
        return [tokenizer, tokenizer]
    special = tokenizer.all_special_tokens
    if [vocabularies[0].get(token) for token in special] != [vocabularies[1].get(token) for token in special]:
        # A model has one id of each special token. Marian's tokenizer itself also encodes targets.
        if name == "MarianTokenizer":
            return [tokenizer, tokenizer]
        raise MetaphraseError(f"Special tokens must have the same ids in both vocabularies of a {name}, got {special}.")
    sides = []
    for index, vocabulary in enumerate(vocabularies):
        side = copy.copy(tokenizer)
        side.encoder, side.decoder = dict(vocabulary), {index: token for token, index in vocabulary.items()}
        if name == "FSMTTokenizer":
            # The language decides how words are split and joined.
            side.src_lang = side.tgt_lang = (tokenizer.src_lang, tokenizer.tgt_lang)[index]
            side.init_kwargs = tokenizer.init_kwargs | {"langs": [side.src_lang] * 2}
        else:
            side.init_kwargs = tokenizer.init_kwargs | {"separate_vocabs": False}
            side.separate_vocabs, side.current_encoder = False, side.encoder
            side.spm_source = side.spm_target = side.current_spm = (tokenizer.spm_source, tokenizer.spm_target)[index]
            side.spm_files = [tokenizer.spm_files[index]] * 2
        # The copy still has the cached vocabulary.
        side._update_total_vocab_size()
        sides.append(side)
    return sides
