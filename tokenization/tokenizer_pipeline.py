"""Pipeline around a vocabulary: normalization and splitting before it, joining behind it."""

import json
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase

from metaphrase.tokenization.tokenizer_settings import SpecialTokens, TokenizerSettings

CONTINUATION_PREFIX = "##"
SPACE_MARK = "\u2581"
BYTE_LEVEL_SPACE = "\u0120"
_PIECE_END = "(?: |$)"


def build_pipeline(model: models.Model, settings: TokenizerSettings) -> Tokenizer:
    """Return a tokenizer with the pipeline of the settings' kind.

    Special tokens are registered only if the model holds them: an empty model gives the pipeline to train it in.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(settings)
    tokenizer.pre_tokenizer = _pre_tokenizer(settings)
    tokenizer.decoder = _decoder(settings)
    if tokenizer.get_vocab_size():
        _register_special_tokens(tokenizer, settings.special_tokens)
    return tokenizer


def _register_special_tokens(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens.control_tokens]
    )
    # With the library's "special" flag they would not be read from text (see SpecialTokens).
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in special_tokens.additional_special_tokens]
    )
    eos = special_tokens.eos_token
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}",
        pair=f"$A {eos} $B:1 {eos}:1",
        special_tokens=[(eos, special_tokens.tokens.index(eos))],
    )


def _normalizer(settings: TokenizerSettings) -> normalizers.Normalizer | None:
    steps = []
    if settings.normalization is not None:
        steps.append(getattr(normalizers, settings.normalization.upper())())
    if settings.lowercase:
        steps.append(normalizers.Lowercase())
    if settings.kind == "pretokenized":
        # A piece spelled like a control token would become that token.
        special = settings.special_tokens
        names = "|".join(re.escape(token) for token in special.control_tokens if token != special.unk_token)
        steps.append(normalizers.Replace(Regex(f"(?<![^ ])(?:{names})(?![^ ])"), special.unk_token))
    return normalizers.Sequence(steps) if steps else None


def _pre_tokenizer(settings: TokenizerSettings) -> pre_tokenizers.PreTokenizer | None:
    splitter = _control_token_splitter(settings.special_tokens)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match settings.kind:
        case "byte_bpe":
            return pre_tokenizers.Sequence([splitter, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "byte":
            return byte_level
        case "char":
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"), byte_level])
        case "word":
            # The first word gets a space like the others. The text's own spaces are spelled in bytes by then, so that a
            # leading space is kept beside it.
            prefix = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
            space = pre_tokenizers.Metaspace(BYTE_LEVEL_SPACE, prepend_scheme="never", split=False)
            # Text without a space, behind an additional token, is cut into bytes: whole, it could be a control token.
            words = Regex(f"{BYTE_LEVEL_SPACE}[^{BYTE_LEVEL_SPACE}]*|[^{BYTE_LEVEL_SPACE}]")
            return pre_tokenizers.Sequence(
                [byte_level, prefix, space, pre_tokenizers.Split(words, behavior="isolated")]
            )
        case "bpe" | "unigram":
            return pre_tokenizers.Sequence([pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first"), splitter])
        case "wordpiece":
            # A word that begins with `##` would become a continuation, so each `#` is split off.
            hashes = pre_tokenizers.Split(Regex("#(?=#)|(?<=#)#"), behavior="isolated")
            return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), splitter, hashes])
        case "pretokenized":
            return pre_tokenizers.Split(" ", behavior="removed")
    return None


def _control_token_splitter(special_tokens: SpecialTokens) -> pre_tokenizers.PreTokenizer:
    """Return a splitter that cuts text such as `</s>` behind its first character, so that it is no control token."""
    names = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in special_tokens.control_tokens)
    return pre_tokenizers.Split(Regex(names), behavior="isolated")


def _decoder(settings: TokenizerSettings) -> decoders.Decoder:
    match settings.kind:
        case "byte_bpe" | "byte" | "char":
            return decoders.ByteLevel()
        case "word":
            return decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        case "bpe" | "unigram":
            return decoders.Metaspace(SPACE_MARK, prepend_scheme="first")
        case "wordpiece":
            return decoders.WordPiece(prefix=CONTINUATION_PREFIX, cleanup=False)
        case "pretokenized":
            # No piece begins with a space, so this decoder puts a space before every piece.
            spaced = decoders.WordPiece(prefix=" ", cleanup=False)
            joined = decoders.Replace(Regex(re.escape(settings.joiner) + _PIECE_END), "")
            return decoders.Sequence([spaced, decoders.Fuse(), joined])
    return decoders.Fuse()


def find_joiner(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the joiner that a tokenizer's decoder removes, or None if its texts are not split into pieces."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    settings = json.loads(decoder.__getstate__())
    for decoder in settings.get("decoders", [settings]):
        pattern = decoder.get("pattern", {}).get("Regex", "")
        if decoder["type"] == "Replace" and pattern.endswith(_PIECE_END) and decoder["content"] == "":
            return re.sub(r"\\(.)", r"\1", pattern.removesuffix(_PIECE_END))
    return None
