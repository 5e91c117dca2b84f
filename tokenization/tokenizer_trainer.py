"""Training of a plain fast tokenizer, which needs only transformers."""

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from metaphrase.tokenization.texts import checked_texts
from metaphrase.tokenization.tokenizer_settings import (
    BYTE_COUNT,
    KINDS_THAT_FILL_A_VOCABULARY,
    KINDS_WITH_ALL_BYTES,
    SpecialTokens,
    TokenizerSettings,
)

logger = logging.getLogger(__name__)

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


# In characters. Learning merges is quadratic in a word's length: base64 or a long URL would take hours.
LONGEST_WORD = 1000
_LONG_WORD = re.compile(f"[^ ]{{{LONGEST_WORD + 1},}}")

# The library restores lost characters with scores this far apart, in an order that differs per run.
UNIGRAM_PENALTY_STEP = 1e-4
UNIGRAM_SCORE_DECIMALS = 6


def train_tokenizer(
    texts: Iterable[str],
    *,
    special_tokens: SpecialTokens | None = None,
    additional_special_tokens: Sequence[str] = (),
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer. The same texts and settings give the same vocabulary.

    Every kind ends a text with the end-of-sequence token; a pair becomes `A </s> B </s>`. Decoding with
    `skip_special_tokens=True`, without `normalization` and `lowercase`, depends on the kind:

    - `byte_bpe`: merges of bytes. Decodes every text exactly; nothing is unknown.
    - `byte`: one token per UTF-8 byte, exact. It needs no training, so `texts` is not read.
    - `bpe`, `unigram`: pieces of characters, with U+2581 for a space. Exact for known characters, except that a leading
      space is lost and U+2581 itself becomes a space.
    - `wordpiece`: `##` marks pieces that continue a word. White space becomes single spaces. A word that begins like a
      control token or holds `##` is split there, and a word with an unknown character is unknown as a whole.
    - `char`: one token per character. Another character is spelled in UTF-8 bytes. Exact; nothing is unknown.
    - `word`: one token per word between spaces, with the space before the word, for closed sets of symbols. Another word
      is spelled in UTF-8 bytes. Exact; nothing is unknown.
    - `pretokenized`: texts are already split into pieces, as in `an@@ trie@@ b .`, and every piece is an entry. Decoding
      joins them: `antrieb .`. Runs of spaces become one space.

    Unknown text becomes the unknown token, which `skip_special_tokens=True` omits.

    Source: byte_bpe, section 2.2 of Radford et al. 2019 (Language Models are Unsupervised Multitask Learners); byte, Xue
    et al. 2022 (arXiv 2105.13626); bpe, Sennrich et al. 2016 (arXiv 1508.07909); unigram, Kudo 2018 (arXiv 1804.10959),
    both with the white space of Kudo and Richardson 2018 (arXiv 1808.06226); wordpiece, Wu et al. 2016 (arXiv 1609.08144).

    Args:
        texts: The training texts, read once.
        special_tokens: The special tokens. None means `SpecialTokens()`.
        additional_special_tokens: Tokens to append to those of `special_tokens`.
        **settings: The other fields of `TokenizerSettings`.

    Raises:
        ValueError: If a setting is invalid, the texts hold no visible character, or their characters do not fit into
            `vocab_size` and the kind has no bytes.
    """
    special_tokens = special_tokens or SpecialTokens()
    additional = (*special_tokens.additional_special_tokens, *additional_special_tokens)
    special_tokens = replace(special_tokens, additional_special_tokens=additional)
    settings = TokenizerSettings(special_tokens=special_tokens, **settings)
    limit = {} if settings.model_max_length is None else {"model_max_length": settings.model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=build_pipeline(_train_vocabulary(texts, settings), settings),
        pad_token=special_tokens.pad_token,
        bos_token=special_tokens.bos_token,
        eos_token=special_tokens.eos_token,
        unk_token=special_tokens.unk_token,
        padding_side="right",
        truncation_side="right",
        # There are no segment embeddings.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        # Control tokens are not read from text (see SpecialTokens).
        split_special_tokens=True,
        **limit,
    )


def _train_vocabulary(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    """Train the vocabulary of the settings' kind. Special tokens are its first entries.

    Raises:
        ValueError: If `texts` is a single string, holds other objects than strings or no visible character, or has more
            characters than `vocab_size` allows.
    """
    if settings.kind == "byte":
        entries = [*settings.special_tokens.tokens, *byte_characters()]
        return models.BPE({entry: index for index, entry in enumerate(entries)}, [])
    train: Callable[[Iterable[str], TokenizerSettings], models.Model] = {
        "byte_bpe": _train_bpe,
        "bpe": _train_bpe,
        "unigram": _train_unigram,
        "wordpiece": _train_wordpiece,
        "char": _collect,
        "word": _collect,
        "pretokenized": _collect,
    }[settings.kind]
    model = train(_training_texts(texts, settings), settings)
    _report_size(Tokenizer(model).get_vocab_size(), settings)
    return model


def _training_texts(texts: Iterable[str], settings: TokenizerSettings) -> Iterator[str]:
    """Yield the text between additional special tokens. For kinds that learn pieces, cut words of over `LONGEST_WORD`."""
    additional = sorted(settings.special_tokens.additional_special_tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, additional))) if additional else None
    has_visible_text, num_cut = False, 0
    for text in checked_texts(texts):
        parts = [text] if pattern is None else pattern.split(text)
        has_visible_text = has_visible_text or any(part.strip() for part in parts)
        for part in parts:
            if len(part) <= LONGEST_WORD or settings.kind not in KINDS_THAT_FILL_A_VOCABULARY:
                yield part
                continue
            words = [match.span() for match in _LONG_WORD.finditer(part)]
            num_cut += len(words)
            cuts = [cut for start, end in words for cut in range(start + LONGEST_WORD, end, LONGEST_WORD)]
            yield from (part[start:end] for start, end in itertools.pairwise([0, *cuts, len(part)]))
    if num_cut:
        logger.warning("Words of more than %d characters were cut to train the vocabulary: %d.", LONGEST_WORD, num_cut)
    if not has_visible_text:
        raise ValueError("`texts` must hold at least one character that is not white space, got none.")


def _report_size(size: int, settings: TokenizerSettings) -> None:
    if settings.vocab_size is None:
        return
    if size > settings.vocab_size:
        # The library ignores `vocab_size` for single characters.
        specials = len(settings.special_tokens.tokens)
        settings.require_room_for(size - specials, "characters of the texts")
    if size < settings.vocab_size and settings.kind in KINDS_THAT_FILL_A_VOCABULARY:
        # No warning: the size may have been chosen for the user.
        logger.info(
            "The vocabulary has %d entries, not `vocab_size` %d: the texts hold no more frequent pieces.",
            size,
            settings.vocab_size,
        )


def _train_bpe(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    is_bytes = settings.kind == "byte_bpe"
    model = models.BPE() if is_bytes else models.BPE(unk_token=settings.special_tokens.unk_token, fuse_unk=True)
    alphabet = byte_characters() if is_bytes else []
    options = {"min_frequency": settings.min_frequency, "initial_alphabet": alphabet}
    return _fit(model, trainers.BpeTrainer, texts, settings, **options).model


def _fit(
    model: models.Model,
    make_trainer: Callable[..., trainers.Trainer],
    texts: Iterable[str],
    settings: TokenizerSettings,
    continuations: Sequence[str] = (),
    **options: Any,
) -> Tokenizer:
    """Train a model in its pipeline. The first entries are the special tokens, and then the continuations."""
    tokenizer = build_pipeline(model, settings)
    trainer = make_trainer(
        vocab_size=settings.vocab_size,
        special_tokens=[*settings.special_tokens.tokens, *continuations],
        show_progress=settings.show_progress,
        **options,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_wordpiece(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    texts = list(texts)
    # The trainer numbers continuation characters in an order that differs per run, and breaks ties by these numbers. As
    # first entries they have fixed numbers.
    continuations = [CONTINUATION_PREFIX + character for character in _alphabet(texts, settings)]
    options = {"min_frequency": settings.min_frequency, "continuing_subword_prefix": CONTINUATION_PREFIX}
    trained = _fit(models.WordPiece(), trainers.WordPieceTrainer, texts, settings, continuations, **options)
    return models.WordPiece(
        trained.get_vocab(),
        unk_token=settings.special_tokens.unk_token,
        # A longer word is unknown as a whole. Scripts without spaces have words as long as a sentence.
        max_input_chars_per_word=10_000,
        continuing_subword_prefix=CONTINUATION_PREFIX,
    )


def _alphabet(texts: Iterable[str], settings: TokenizerSettings) -> list[str]:
    characters = set().union(*map(_text_normalizer(settings), texts))
    # Unlike the library, Python counts some control characters as white space.
    splitter = pre_tokenizers.WhitespaceSplit()
    return sorted(character for character in characters if splitter.pre_tokenize_str(character))


def _text_normalizer(settings: TokenizerSettings) -> Callable[[str], str]:
    normalizer = build_pipeline(models.BPE(), settings).normalizer
    return str if normalizer is None else normalizer.normalize_str


def _train_unigram(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    normalize = _text_normalizer(settings)
    characters = {SPACE_MARK}

    def observed() -> Iterator[str]:
        for text in texts:
            characters.update(normalize(text))
            yield text

    special_tokens = settings.special_tokens
    try:
        options = {"unk_token": special_tokens.unk_token}
        tokenizer = _fit(models.Unigram(), trainers.UnigramTrainer, observed(), settings, **options)
    except Exception as error:
        # The library has no error class for this.
        if "not large enough" in str(error):
            settings.require_room_for(len(characters - {" "}), "characters of the texts")
        raise
    entries = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    specials = len(special_tokens.tokens)
    pieces = _within(settings.vocab_size - specials, _in_fixed_order(entries[specials:]))
    return models.Unigram(entries[:specials] + pieces, special_tokens.tokens.index(special_tokens.unk_token), False)


def _in_fixed_order(entries: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return pieces and scores in an order that is the same in every run.

    Runs differ in the last digits of scores, and in the scores of characters that no piece of the trained model covers.
    """
    lowest = min(score for _, score in entries)
    singles = sum(len(piece) == 1 for piece, _ in entries)
    ceiling = lowest + (singles + 1) * UNIGRAM_PENALTY_STEP
    restored = sorted(piece for piece, score in entries if len(piece) == 1 and score < ceiling)
    scores = sorted(score for piece, score in entries if len(piece) == 1 and score < ceiling)
    fixed = dict(entries) | dict(zip(restored, scores, strict=True))
    rounded = [(piece, round(score, UNIGRAM_SCORE_DECIMALS)) for piece, score in fixed.items()]
    return sorted(rounded, key=lambda entry: (-entry[1], entry[0]))


def _within(room: int, ordered: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return as many of the best pieces as fit, and all single characters.

    The library exceeds its limit if single characters fill it.
    """
    by_need = sorted(ordered, key=lambda entry: len(entry[0]) > 1)
    singles = sum(len(piece) == 1 for piece, _ in ordered)
    selected = {piece for piece, _ in by_need[: max(room, singles)]}
    return [entry for entry in ordered if entry[0] in selected]


def byte_characters() -> list[str]:
    """Return the printable character of each byte 0 to 255 in a byte-level vocabulary.

    Source: byte-level BPE, section 2.2 of Radford et al. 2019 (Language Models are Unsupervised Multitask Learners).
    """
    characters = bytes_to_unicode()
    return [characters[byte] for byte in range(BYTE_COUNT)]


def _collect(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    """Return a vocabulary of the characters, words or pieces of the texts, in byte-level spelling but for pieces."""
    noun = {"char": "characters", "word": "words", "pretokenized": "pieces"}[settings.kind]
    has_all_bytes = settings.kind in KINDS_WITH_ALL_BYTES
    first_entries = dict.fromkeys([*settings.special_tokens.tokens, *(byte_characters() if has_all_bytes else ())])

    def spell(entry: str) -> str:
        entry = f" {entry}" if settings.kind == "word" else entry
        return entry.encode().decode("latin-1").translate(bytes_to_unicode()) if has_all_bytes else entry

    counts = Counter()
    for text in map(_text_normalizer(settings), texts):
        counts.update(text if settings.kind == "char" else text.split(" "))
    # Runs of spaces split into empty strings.
    for entry in [entry for entry in counts if not entry or spell(entry) in first_entries]:
        del counts[entry]
    # Most frequent first, then in alphabetical order.
    ordered = sorted(counts, key=lambda entry: (-counts[entry], entry))
    entries = [entry for entry in ordered if counts[entry] >= settings.min_frequency]
    fate = "spelled in bytes" if has_all_bytes else "unknown"
    _report_left_out(
        counts, ordered[len(entries) :], noun, fate, f"rarer than `min_frequency` {settings.min_frequency}"
    )
    if settings.vocab_size is not None:
        limit = settings.vocab_size - len(first_entries)
        _report_left_out(counts, entries[limit:], noun, fate, f"`vocab_size` {settings.vocab_size} is full")
        entries = entries[:limit]
    vocabulary = {entry: index for index, entry in enumerate([*first_entries, *map(spell, entries)])}
    if has_all_bytes:
        # Without merges, an entry is found only as a whole.
        return models.BPE(vocabulary, [], ignore_merges=True)
    return models.WordLevel(vocabulary, unk_token=settings.special_tokens.unk_token)


def _report_left_out(counts: Counter, left_out: list[str], noun: str, fate: str, reason: str) -> None:
    if left_out:
        occurrences = sum(counts[entry] for entry in left_out)
        logger.warning(
            "%d of %d different %s, %d of %d occurrences, are not in the vocabulary and will be %s: %s.",
            len(left_out),
            len(counts),
            noun,
            occurrences,
            counts.total(),
            fate,
            reason,
        )
