"""Training of a plain fast tokenizer, which needs only transformers: its settings, its pipeline and its vocabulary."""

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from metaphrase.errors import MetaphraseError, did_you_mean
from metaphrase.tokenization.texts import DEFAULT_JOINER, checked_texts

logger = logging.getLogger(__name__)

TOKENIZER_KINDS = ("byte_bpe", "bpe", "unigram", "byte", "char", "word", "pretokenized")
NORMALIZATIONS = ("nfc", "nfd", "nfkc", "nfkd")
# These kinds learn pieces until the vocabulary is full.
KINDS_THAT_FILL_A_VOCABULARY = ("byte_bpe", "bpe", "unigram")
KINDS_WITH_ALL_BYTES = ("byte_bpe", "byte", "char", "word")
# Kinds with merges, of which `subword_sampling` skips some.
SAMPLED_KINDS = ("byte_bpe", "bpe")
DEFAULT_VOCAB_SIZE = 8000
# First entries of every vocabulary. Kinds with all bytes never produce the unknown token. No tokenizer adds the beginning: the
# model does, as it shifts labels right.
CONTROL_TOKENS = PAD, BOS, EOS, UNK = ("<pad>", "<s>", "</s>", "<unk>")
SPACE_MARK = "\u2581"
BYTE_LEVEL_SPACE = "\u0120"

# In characters. Learning merges is quadratic in a word's length: base64 or a long URL would take hours.
_LONGEST_WORD = 1000
_LONG_WORD = re.compile(f"[^ ]{{{_LONGEST_WORD + 1},}}")
_PIECE_END = "(?: |$)"
# The printable character of each byte in a byte-level vocabulary. Source: section 2.2 of Radford et al. 2019.
_BYTE_CHARACTERS = [bytes_to_unicode()[byte] for byte in range(256)]


@dataclass(kw_only=True)
class TokenizerSettings:
    """Settings of `train_tokenizer`. None in `vocab_size`, `min_frequency` or `joiner` becomes the kind's default.

    Attributes:
        vocab_size: Largest size of the vocabulary, with special tokens. None means 8000 for kinds that learn pieces, and
            no limit for others. Small texts give a smaller vocabulary.
        min_frequency: Least count of a merge, a character, a word or a piece. None means 2 for merges, else 1.
        joiner: For `pretokenized`: suffix of each piece that the next piece continues. None means `@@`.
        additional_special_tokens: More tokens, such as sentinels or language codes, each one entry that is never split.
    """

    kind: str = "byte_bpe"
    vocab_size: int | None = None
    min_frequency: int | None = None
    normalization: str | None = None
    lowercase: bool = False
    joiner: str | None = None
    additional_special_tokens: Sequence[str] = ()
    show_progress: bool = True

    def __post_init__(self) -> None:
        self.special_tokens = [*CONTROL_TOKENS, *self.additional_special_tokens]
        for token in self.special_tokens:
            # One character may be a letter of a text, and a byte-level decoder would read non-ASCII characters as bytes.
            if not re.fullmatch("[!-~]{2,}", token) or self.special_tokens.count(token) > 1:
                raise MetaphraseError(
                    "A special token must be two or more printable ASCII characters without a space, and differ from all "
                    f"others, got {token!r} among {self.special_tokens}."
                )
        for name, known in (("kind", TOKENIZER_KINDS), ("normalization", NORMALIZATIONS)):
            value = getattr(self, name)
            if value not in (None, *known):
                hint = did_you_mean(value, known)
                raise MetaphraseError(f"`{name}` must be one of {', '.join(known)}, got {value!r}.{hint}")
        if self.min_frequency is not None and self.kind in ("unigram", "byte"):
            raise MetaphraseError(f"`min_frequency` has no effect for kind {self.kind!r}, got {self.min_frequency}.")
        if self.joiner is not None and (self.kind != "pretokenized" or not self.joiner or " " in self.joiner):
            raise MetaphraseError(
                f"`joiner` must be characters without a space, for kind 'pretokenized', got {self.joiner!r} for {self.kind!r}."
            )
        learns_pieces = self.kind in KINDS_THAT_FILL_A_VOCABULARY
        self.joiner = self.joiner or DEFAULT_JOINER
        self.min_frequency = (2 if learns_pieces else 1) if self.min_frequency is None else self.min_frequency
        self.vocab_size = DEFAULT_VOCAB_SIZE if self.vocab_size is None and learns_pieces else self.vocab_size
        if self.kind in KINDS_WITH_ALL_BYTES:
            self.require_room_for(256, "bytes")
        else:
            self.require_room_for(1, "character or piece")

    def require_room_for(self, count: int, noun: str) -> None:
        """Check that `vocab_size` has room for the special tokens and `count` more entries."""
        specials = len(self.special_tokens)
        if self.vocab_size is not None and self.vocab_size < specials + count:
            raise MetaphraseError(
                f"`vocab_size` must be at least {specials + count} for kind {self.kind!r} "
                f"({specials} special tokens + {count} {noun}), got {self.vocab_size}."
            )


def train_tokenizer(texts: Iterable[str], **options: Any) -> PreTrainedTokenizerFast:
    """Train a tokenizer. The options are those of `TokenizerSettings`. The same texts and options give the same vocabulary.

    Ids begin with `<pad>`, `<s>`, `</s>`, `<unk>` and the additional tokens. Every kind ends a text with `</s>`; a pair becomes
    `A </s> B </s>`. The four control tokens are never read from text: `</s>` in a text stays four characters, so no text can end
    a sentence early. Decoding with `skip_special_tokens=True` omits them. Additional tokens are read from text: `<2de> Hello`
    starts with the token `<2de>`, and decoding shows it.

    Decoding without `normalization` and `lowercase` depends on the kind:

    - `byte_bpe`: merges of bytes. Decodes every text exactly; nothing is unknown.
    - `byte`: one token per UTF-8 byte, exact. It needs no training, so `texts` is not read.
    - `bpe`, `unigram`: pieces of characters, with U+2581 for a space. Exact for known characters, except that a leading
      space is lost and U+2581 itself becomes a space.
    - `char`: one token per character. Another character is spelled in UTF-8 bytes. Exact; nothing is unknown.
    - `word`: one token per word between spaces, with the space before the word, for closed sets of symbols. Another word
      is spelled in UTF-8 bytes. Exact; nothing is unknown.
    - `pretokenized`: texts are already split into pieces, as in `an@@ trie@@ b .`, and every piece is an entry. Decoding
      joins them: `antrieb .`. Runs of spaces become one space.

    Unknown text becomes the unknown token, which `skip_special_tokens=True` omits.

    Source: byte_bpe, section 2.2 of Radford et al. 2019 (Language Models are Unsupervised Multitask Learners); byte, Xue
    et al. 2022 (arXiv 2105.13626); bpe, Sennrich et al. 2016 (arXiv 1508.07909); unigram, Kudo 2018 (arXiv 1804.10959),
    both with the white space of Kudo and Richardson 2018 (arXiv 1808.06226).

    Raises:
        MetaphraseError: If a setting is invalid, or the texts hold no visible character or more than fit into `vocab_size`.
    """
    settings = TokenizerSettings(**options)
    tokenizer = _make_pipeline(_train_model(texts, settings), settings)
    # With the library's "special" flag, additional tokens would not be read from text, either.
    for token in settings.special_tokens:
        tokenizer.add_tokens([AddedToken(token, special=token in CONTROL_TOKENS, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B:1 {EOS}:1", special_tokens=[(EOS, CONTROL_TOKENS.index(EOS))]
    )
    tokens = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    return fast_tokenizer(tokenizer, **tokens, split_special_tokens=True)


def fast_tokenizer(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """Return transformers' form of a tokenizer, which pads on the right and makes no segments."""
    options |= {"model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", truncation_side="right", **options)


def find_joiner(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the joiner that a tokenizer's decoder removes, or None if its texts are not split into pieces."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    settings = {} if decoder is None else json.loads(decoder.__getstate__())
    for step in settings.get("decoders", [settings]):
        pattern = step.get("pattern", {}).get("Regex", "")
        if step.get("type") == "Replace" and pattern.endswith(_PIECE_END) and step["content"] == "":
            return re.sub(r"\\(.)", r"\1", pattern.removesuffix(_PIECE_END))
    return None


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer changes no text, and splits it as a kind that learns pieces: before the space of each word."""
    settings = (TokenizerSettings(kind=kind) for kind in KINDS_THAT_FILL_A_VOCABULARY)
    splitters = [_make_pipeline(models.BPE(), options).pre_tokenizer.__getstate__() for options in settings]
    has_spaces = any(token.rstrip or " " in token.content for token in tokenizer.get_added_tokens_decoder().values())
    return not has_spaces and tokenizer.normalizer is None and tokenizer.pre_tokenizer.__getstate__() in splitters


def _make_pipeline(model: models.Model, settings: TokenizerSettings) -> Tokenizer:
    """Return a tokenizer with the normalizer, splitter and decoder of the settings' kind."""
    tokenizer = Tokenizer(model)
    normalizing = [] if settings.normalization is None else [getattr(normalizers, settings.normalization.upper())()]
    if settings.lowercase:
        normalizing.append(normalizers.Lowercase())
    if settings.kind == "pretokenized":
        # A piece spelled like a control token would become that token.
        names = "|".join(map(re.escape, (PAD, BOS, EOS)))
        normalizing.append(normalizers.Replace(Regex(f"(?<![^ ])(?:{names})(?![^ ])"), UNK))
    if normalizing:
        tokenizer.normalizer = normalizers.Sequence(normalizing)
    # Text such as `</s>` is cut behind its first character, so that it is no control token.
    names = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in CONTROL_TOKENS)
    splitter = pre_tokenizers.Split(Regex(names), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    match settings.kind:
        case "byte_bpe":
            steps = [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        case "byte":
            steps = [byte_level]
        case "char":
            steps = [pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"), byte_level]
        case "word":
            # The first word gets a space like the others. The text's own spaces are spelled in bytes by then, so that a
            # leading space is kept beside it.
            prefix = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
            space = pre_tokenizers.Metaspace(BYTE_LEVEL_SPACE, prepend_scheme="never", split=False)
            # Text without a space, behind an additional token, is cut into bytes: whole, it could be a control token.
            words = Regex(f"{BYTE_LEVEL_SPACE}[^{BYTE_LEVEL_SPACE}]*|[^{BYTE_LEVEL_SPACE}]")
            steps = [byte_level, prefix, space, pre_tokenizers.Split(words, behavior="isolated")]
            tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        case "bpe" | "unigram":
            steps = [pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first"), splitter]
            tokenizer.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme="first")
        case "pretokenized":
            steps = [pre_tokenizers.Split(" ", behavior="removed")]
            # No piece begins with a space, so this decoder puts a space before every piece.
            spaced = decoders.WordPiece(prefix=" ", cleanup=False)
            joined = decoders.Replace(Regex(re.escape(settings.joiner) + _PIECE_END), "")
            tokenizer.decoder = decoders.Sequence([spaced, decoders.Fuse(), joined])
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    return tokenizer


def _train_model(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    specials = settings.special_tokens
    if settings.kind == "byte":
        return models.BPE({entry: index for index, entry in enumerate([*specials, *_BYTE_CHARACTERS])}, [])
    texts = _split_texts(texts, settings)
    if settings.kind not in KINDS_THAT_FILL_A_VOCABULARY:
        return _collect(texts, settings)
    options: dict[str, Any] = {
        "special_tokens": specials,
        "show_progress": settings.show_progress,
        "vocab_size": settings.vocab_size,
    }
    model: models.Model
    trainer: trainers.Trainer
    if settings.kind == "unigram":
        model, trainer = models.Unigram(), trainers.UnigramTrainer(unk_token=UNK, **options)
    else:
        is_bytes = settings.kind == "byte_bpe"
        model = models.BPE() if is_bytes else models.BPE(unk_token=UNK, fuse_unk=True)
        options["initial_alphabet"] = _BYTE_CHARACTERS if is_bytes else []
        trainer = trainers.BpeTrainer(min_frequency=settings.min_frequency, **options)
    tokenizer = _make_pipeline(model, settings)
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:
        # The library has no error class for this.
        if "not large enough" not in str(error):
            raise
        raise MetaphraseError(f"`vocab_size` must hold all characters, got {settings.vocab_size}.") from error
    if settings.kind == "unigram":
        entries = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
        pieces = _order_pieces(entries[len(specials) :], settings.vocab_size - len(specials))
        tokenizer.model = models.Unigram(entries[: len(specials)] + pieces, specials.index(UNK), False)
    size = tokenizer.get_vocab_size()
    # The library ignores `vocab_size` for single characters.
    settings.require_room_for(size - len(specials), "characters of the texts")
    if size < settings.vocab_size:
        # No warning: the size may have been chosen for the user.
        text = "The vocabulary has %d entries, not `vocab_size` %d: the texts hold no more frequent pieces."
        logger.info(text, size, settings.vocab_size)
    return tokenizer.model


def _split_texts(texts: Iterable[str], settings: TokenizerSettings) -> Iterator[str]:
    """Yield the text between additional special tokens. For kinds that learn pieces, cut long words."""
    additional = sorted(settings.additional_special_tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, additional))) if additional else None
    has_visible_text, num_cut = False, 0
    for text in checked_texts(texts):
        for part in [text] if pattern is None else pattern.split(text):
            has_visible_text = has_visible_text or bool(part.strip())
            cuts = [0]
            if settings.kind in KINDS_THAT_FILL_A_VOCABULARY and len(part) > _LONGEST_WORD:
                for match in _LONG_WORD.finditer(part):
                    num_cut += 1
                    cuts += range(match.start() + _LONGEST_WORD, match.end(), _LONGEST_WORD)
            yield from (part[start:end] for start, end in itertools.pairwise([*cuts, len(part)]))
    if num_cut:
        logger.warning("Words of more than %d characters were cut to train the vocabulary: %d.", _LONGEST_WORD, num_cut)
    if not has_visible_text:
        raise MetaphraseError("`texts` must not all be blank, as all sources or all targets of these pairs are.")


def _order_pieces(entries: list[tuple[str, float]], room: int) -> list[tuple[str, float]]:
    """Return all single characters and the best pieces that fit, in an order that is the same in every run.

    Runs differ in the last digits of scores. They also differ in the scores of characters that no piece of the trained model
    covers: the library restores these characters with the lowest scores, 1e-4 apart. It exceeds its limit by an entry if
    single characters fill it.
    """
    singles = [piece for piece, _ in entries if len(piece) == 1]
    ceiling = min(score for _, score in entries) + (len(singles) + 1) * 1e-4
    restored = {piece: score for piece, score in entries if len(piece) == 1 and score < ceiling}
    fixed = dict(entries) | dict(zip(sorted(restored), sorted(restored.values()), strict=True))
    ordered = sorted(((piece, round(score, 6)) for piece, score in fixed.items()), key=lambda row: (-row[1], row[0]))
    by_need = sorted(ordered, key=lambda entry: len(entry[0]) > 1)
    selected = {piece for piece, _ in by_need[: max(room, len(singles))]}
    return [entry for entry in ordered if entry[0] in selected]


def _collect(texts: Iterable[str], settings: TokenizerSettings) -> models.Model:
    """Return a vocabulary of the characters, words or pieces of the texts, in byte-level spelling but for pieces."""
    has_all_bytes = settings.kind in KINDS_WITH_ALL_BYTES
    first_entries = dict.fromkeys([*settings.special_tokens, *(_BYTE_CHARACTERS if has_all_bytes else ())])

    def spell(entry: str) -> str:
        entry = f" {entry}" if settings.kind == "word" else entry
        return entry.encode().decode("latin-1").translate(bytes_to_unicode()) if has_all_bytes else entry

    normalizer, counts = _make_pipeline(models.BPE(), settings).normalizer, Counter()
    for text in texts:
        text = text if normalizer is None else normalizer.normalize_str(text)
        counts.update(text if settings.kind == "char" else text.split(" "))
    # Runs of spaces split into empty strings.
    counts = Counter({entry: count for entry, count in counts.items() if entry and spell(entry) not in first_entries})
    # Most frequent first, then in alphabetical order.
    ordered = sorted(counts, key=lambda entry: (-counts[entry], entry))
    entries = [entry for entry in ordered if counts[entry] >= settings.min_frequency]
    if settings.vocab_size is not None:
        entries = entries[: settings.vocab_size - len(first_entries)]
    if rest := ordered[len(entries) :]:
        noun = {"char": "characters", "word": "words", "pretokenized": "pieces"}[settings.kind]
        logger.warning(
            "%d of %d different %s, %d of %d occurrences, are not in the vocabulary and will be %s: "
            "`vocab_size` is %s, `min_frequency` is %d.",
            *(len(rest), len(counts), noun, sum(counts[entry] for entry in rest), counts.total()),
            *("spelled in bytes" if has_all_bytes else "unknown", settings.vocab_size, settings.min_frequency),
        )
    vocabulary = {entry: index for index, entry in enumerate([*first_entries, *map(spell, entries)])}
    if has_all_bytes:
        # Without merges, an entry is found only as a whole.
        return models.BPE(vocabulary, [], ignore_merges=True)
    return models.WordLevel(vocabulary, unk_token=UNK)
