"""Languages: tokenizers that mark each text with the code of its language, as those of mBART, M2M100 and NLLB."""

import logging
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from metaphrase.tokenization.tokenizer_pair import TokenizerPair

logger = logging.getLogger(__name__)


def set_languages(
    tokenizers: "TokenizerPair", source_lang: str | None = None, target_lang: str | None = None
) -> dict[str, int]:
    """Makes tokenizers mark sources and targets with the codes of their languages, and says how decoding starts then.

    Args:
        tokenizers: Of a model of many languages; they are changed.
        source_lang: A code that the tokenizer knows, such as eng_Latn for NLLB, en_XX for mBART, en for M2M100. `None` keeps the
            tokenizer's own.
        target_lang: Likewise, of the targets.

    Returns:
        What `generate` needs for the target language: `forced_bos_token_id` where targets begin with its code,
        `decoder_start_token_id` where they end with it, since the decoder starts with it then. Nothing without `target_lang`.

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
    """Makes sure that a tokenizer can encode targets: that of M2M100 cannot unless it was told their language.

    Those of mBART and NLLB take the language of sources for that of targets then, of which a warning tells, once.

    Raises:
        ValueError: If it was not.
    """
    if hasattr(tokenizer, "lang_code_to_token"):
        _language_id(tokenizer, "target_lang", tokenizer.tgt_lang)
    elif getattr(tokenizer, "tgt_lang", "") is None and getattr(tokenizer, "src_lang", None) is not None:
        logger.warning(
            "`target_lang` is not given: targets are marked with the language of sources, %s.", tokenizer.src_lang
        )


def _known_language(tokenizer: PreTrainedTokenizerBase, field: str, attribute: str, code: str) -> int:
    if not hasattr(tokenizer, attribute):
        name = type(tokenizer).__name__
        raise ValueError(f"`{field}` must be left out for a {name}, which has no languages, got {code!r}.")
    return _language_id(tokenizer, field, code)


def _language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    # It lies with the code that goes to the Hub, and brings the whole network, for which most tokenizers have no use.
    from metaphrase.modeling.pipeline_support import language_id

    return language_id(tokenizer, field, code)
