"""Languages: tokenizers that mark each text with the code of its language, as those of mBART, M2M100 and NLLB."""

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from metaphrase.tokenization.tokenizer_pair import TokenizerPair


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
        code_id(tokenizers.source, "source_lang", "src_lang", source_lang)
        tokenizers.source.src_lang = source_lang
    if target_lang is None:
        return {}
    code = code_id(tokenizers.target, "target_lang", "tgt_lang", target_lang)
    tokenizers.target.tgt_lang = target_lang
    [ids] = tokenizers.encode_targets(["a"])
    if code not in (ids[0], ids[-1]):
        raise ValueError(f"`target_lang` must stand first or last in a target, got {ids} for {target_lang!r}, {code}.")
    return {"forced_bos_token_id" if ids[0] == code else "decoder_start_token_id": code}


def code_id(tokenizer: PreTrainedTokenizerBase, field: str, attribute: str, code: str) -> int:
    """The id of a code of a language.

    Raises:
        ValueError: As `set_languages`.
    """
    name = type(tokenizer).__name__
    if not hasattr(tokenizer, attribute):
        raise ValueError(f"`{field}` must be left out for a {name}, which has no languages, got {code!r}.")
    # M2M100's writes its codes with underscores around them.
    token = getattr(tokenizer, "lang_code_to_token", {}).get(code, code)
    index = tokenizer.convert_tokens_to_ids(token)
    if index is None or index == tokenizer.unk_token_id:
        raise ValueError(f"`{field}` must be a language that the {name} knows, got {code!r}.")
    return index
