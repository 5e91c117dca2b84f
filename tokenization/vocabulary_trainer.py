"""Training of vocabularies, one function per kind."""

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from metaphrase.tokenization.texts import checked_texts
from metaphrase.tokenization.tokenizer_pipeline import CONTINUATION_PREFIX, SPACE_MARK, build_pipeline
from metaphrase.tokenization.tokenizer_settings import BYTE_COUNT, KINDS_THAT_FILL_A_VOCABULARY, TokenizerSettings

logger = logging.getLogger(__name__)

TEXTS_PER_BATCH = 1000
# In characters. Learning merges is quadratic in a word's length: base64 or a long URL would take hours.
LONGEST_WORD = 1000
_LONG_WORD = re.compile(f"[^ ]{{{LONGEST_WORD + 1},}}")

# The library restores lost characters with scores this far apart, in an order that differs per run.
UNIGRAM_PENALTY_STEP = 1e-4
UNIGRAM_SCORE_DECIMALS = 6


def train_vocabulary(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    """Train the vocabulary of the settings' kind. Special tokens are its first entries.

    Raises:
        ValueError: If `texts` is a single string, holds other objects than strings or no visible character, or has more
            characters than `vocab_size` allows.
    """
    if settings.kind == "byte":
        return _byte_model(settings)
    train: Callable[[Iterable[str], TokenizerSettings], models.Model] = {
        "byte_bpe": _train_bpe,
        "bpe": _train_bpe,
        "unigram": _train_unigram,
        "wordpiece": _train_wordpiece,
        "char": _collect_characters,
        "pretokenized": _collect_pieces,
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


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while batch := list(itertools.islice(texts, TEXTS_PER_BATCH)):
        yield batch


def _report_size(size: int, settings: TokenizerSettings) -> None:
    if settings.vocab_size is None:
        return
    if size > settings.vocab_size:
        # The library ignores `vocab_size` for single characters.
        specials = len(settings.special_tokens.tokens)
        settings.require_room_for(size - specials, "characters of the texts")
    if size < settings.vocab_size and settings.kind in KINDS_THAT_FILL_A_VOCABULARY:
        logger.warning(
            "The vocabulary has %d entries, not `vocab_size` %d: the texts hold no more frequent pieces.",
            size,
            settings.vocab_size,
        )


def _train_bpe(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    is_bytes = settings.kind == "byte_bpe"
    model = models.BPE() if is_bytes else models.BPE(unk_token=settings.special_tokens.unk_token, fuse_unk=True)
    tokenizer = build_pipeline(model, settings)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(settings.special_tokens.tokens),
        initial_alphabet=byte_characters() if is_bytes else [],
        show_progress=settings.show_progress,
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    return tokenizer.model


def _train_wordpiece(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    texts = list(texts)
    # The trainer numbers continuation characters in an order that differs per run, and breaks ties by these numbers. As
    # first entries they have fixed numbers.
    continuations = [CONTINUATION_PREFIX + character for character in _alphabet(texts, settings)]
    entries = [*settings.special_tokens.tokens, *continuations]
    tokenizer = build_pipeline(models.WordPiece(), settings)
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=entries,
        continuing_subword_prefix=CONTINUATION_PREFIX,
        show_progress=settings.show_progress,
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    return models.WordPiece(
        tokenizer.get_vocab(),
        unk_token=settings.special_tokens.unk_token,
        # A longer word is unknown as a whole. Scripts without spaces have words as long as a sentence.
        max_input_chars_per_word=10_000,
        continuing_subword_prefix=CONTINUATION_PREFIX,
    )


def _alphabet(texts: Iterable[str], settings: TokenizerSettings) -> list[str]:
    characters = set().union(*map(_normalizer(settings), texts))
    # Unlike the library, Python counts some control characters as white space.
    splitter = pre_tokenizers.WhitespaceSplit()
    return sorted(character for character in characters if splitter.pre_tokenize_str(character))


def _normalizer(settings: TokenizerSettings) -> Callable[[str], str]:
    normalizer = build_pipeline(models.BPE(), settings).normalizer
    return str if normalizer is None else normalizer.normalize_str


def _train_unigram(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    normalize = _normalizer(settings)
    characters = {SPACE_MARK}

    def observed() -> Iterator[str]:
        for text in texts:
            characters.update(normalize(text))
            yield text

    special_tokens = settings.special_tokens
    tokenizer = build_pipeline(models.Unigram(), settings)
    trainer = trainers.UnigramTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(special_tokens.tokens),
        unk_token=special_tokens.unk_token,
        show_progress=settings.show_progress,
    )
    try:
        tokenizer.train_from_iterator(_batches(observed()), trainer)
    except Exception as error:
        # The library has no error class for this.
        if "not large enough" in str(error):
            settings.require_room_for(len(characters - {" "}), "characters of the texts")
        raise
    entries = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    specials = len(special_tokens.tokens)
    pieces = _within(settings.vocab_size - specials, _in_fixed_order(entries[specials:]))
    return models.Unigram(entries[:specials] + pieces, special_tokens.unk_token_id, False)


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


def _byte_model(settings: TokenizerSettings) -> models.Model:
    entries = [*settings.special_tokens.tokens, *byte_characters()]
    return models.BPE({entry: index for index, entry in enumerate(entries)}, [])


def byte_characters() -> list[str]:
    """Return the printable character of each byte 0 to 255 in a byte-level vocabulary.

    Bytes that Latin-1 prints stay themselves; the other bytes take the characters from U+0100 on.

    Source: byte-level BPE, section 2.2 of Radford et al. 2019 (Language Models are Unsupervised Multitask Learners).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(0x100, 0x100 + BYTE_COUNT))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(BYTE_COUNT)]


def _collect_characters(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    counts = Counter()
    for text in map(_normalizer(settings), texts):
        counts.update(text)
    entries = [*settings.special_tokens.tokens, *_select_frequent(counts, settings, "characters")]
    return models.BPE(
        {entry: index for index, entry in enumerate(entries)},
        [],
        unk_token=settings.special_tokens.unk_token,
        fuse_unk=False,
    )


def _collect_pieces(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    counts = Counter()
    for text in map(_normalizer(settings), texts):
        counts.update(text.split(" "))
    special_tokens = settings.special_tokens
    # Runs of spaces split into empty strings; special tokens already have entries.
    for entry in ("", *special_tokens.tokens):
        counts.pop(entry, None)
    pieces = _select_frequent(counts, settings, "pieces")
    if settings.vocab_size is not None:
        limit = settings.vocab_size - len(special_tokens.tokens)
        _report_left_out(counts, pieces[limit:], "pieces", f"`vocab_size` {settings.vocab_size} is full")
        pieces = pieces[:limit]
    entries = [*special_tokens.tokens, *pieces]
    return models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=special_tokens.unk_token)


def _select_frequent(counts: Counter, settings: TokenizerSettings, noun: str) -> list[str]:
    """Return the entries of at least `min_frequency`, most frequent first, then in alphabetical order."""
    ordered = sorted(counts, key=lambda entry: (-counts[entry], entry))
    frequent = [entry for entry in ordered if counts[entry] >= settings.min_frequency]
    _report_left_out(counts, ordered[len(frequent) :], noun, f"rarer than `min_frequency` {settings.min_frequency}")
    return frequent


def _report_left_out(counts: Counter, left_out: list[str], noun: str, reason: str) -> None:
    if left_out:
        occurrences = sum(counts[entry] for entry in left_out)
        logger.warning(
            "%d of %d different %s, %d of %d occurrences, are not in the vocabulary and will be unknown: %s.",
            len(left_out),
            len(counts),
            noun,
            occurrences,
            counts.total(),
            reason,
        )
