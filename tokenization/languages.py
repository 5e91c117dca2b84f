"""Language codes of multilingual tokenizers, such as mBART's, M2M100's and NLLB's."""

import logging
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from metaphrase.tokenization.tokenizer_pair import TokenizerPair

logger = logging.getLogger(__name__)


def set_languages(
    tokenizers: "TokenizerPair", source_lang: str | None = None, target_lang: str | None = None
) -> dict[str, int]:
    """Set the languages of sources and targets, and return the generation options for the target language.

    Args:
        tokenizers: Tokenizers of a multilingual model, changed in place.
        source_lang: A code of the tokenizer, such as eng_Latn for NLLB, en_XX for mBART, en for M2M100. None keeps the
            current language.
        target_lang: The same for targets.

    Returns:
        `forced_bos_token_id` if targets begin with the code; `decoder_start_token_id` if targets end with it, since the
        decoder then starts with it; nothing without `target_lang`.

    Raises:
        ValueError: If the tokenizer has no languages, or does not know the code.
    """
    if source_lang is not None:
        _known_language(tokenizers.source, "source_lang", "src_lang", source_lang)
        tokenizers.source.src_lang = source_lang
    if target_lang is None:
        return {}
    code = _known_language(tokenizers.target, "target_lang", "tgt_lang", target_lang)
    tokenizers.target.tgt_lang = target_lang
    [ids] = tokenizers.encode_targets(["a"])
    if code not in (ids[0], ids[-1]):
        raise ValueError(f"`target_lang` must stand first or last in a target, got {ids} for {target_lang!r}, {code}.")
    return {"forced_bos_token_id" if ids[0] == code else "decoder_start_token_id": code}


def check_target_language(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer knows the language of targets. Warn if mBART's or NLLB's uses that of the sources.

    Raises:
        ValueError: If M2M100's tokenizer has no target language.
    """
    if hasattr(tokenizer, "lang_code_to_token"):
        _language_id(tokenizer, "target_lang", tokenizer.tgt_lang)
    elif getattr(tokenizer, "tgt_lang", "") is None and getattr(tokenizer, "src_lang", None) is not None:
        logger.warning(
            "`target_lang` is not set: targets get the language code of the sources, %s.", tokenizer.src_lang
        )


def _known_language(tokenizer: PreTrainedTokenizerBase, field: str, attribute: str, code: str) -> int:
    if not hasattr(tokenizer, attribute):
        name = type(tokenizer).__name__
        raise ValueError(f"`{field}` must be left out for a {name}, which has no languages, got {code!r}.")
    return _language_id(tokenizer, field, code)


def _language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    # This import loads the whole network, which most tokenizers do not need.
    from metaphrase.modeling.pipeline_support import language_id

    return language_id(tokenizer, field, code)
