"""Special tokens, and settings of a tokenizer's training, checked before any text is read."""

from dataclasses import dataclass, field

from metaphrase.storage.hints import did_you_mean

TOKENIZER_KINDS = ("byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "word", "pretokenized")
NORMALIZATIONS = ("nfc", "nfd", "nfkc", "nfkd")
BYTE_COUNT = 256

# These kinds learn pieces until the vocabulary is full.
KINDS_THAT_FILL_A_VOCABULARY = ("byte_bpe", "bpe", "unigram", "wordpiece")
KINDS_WITH_ALL_BYTES = ("byte_bpe", "byte", "char", "word")
KINDS_WITHOUT_FREQUENCIES = ("unigram", "byte")
DEFAULT_VOCAB_SIZE = 8000
DEFAULT_MERGE_FREQUENCY = 2
DEFAULT_JOINER = "@@"


@dataclass(frozen=True)
class SpecialTokens:
    """Strings of the special tokens. A token's id is its index in `tokens`, in every tokenizer trained here.

    The four control tokens come first, in the order of the fields, then `additional_special_tokens`:

    - Control tokens are never read from text: `</s>` in a text stays four characters, so no text can end a sentence
      early. Decoding with `skip_special_tokens=True` omits control tokens.
    - Additional tokens (sentinels, language codes) are read from text: `<2de> Hello` starts with the token `<2de>`.
      Decoding shows them.

    Attributes:
        pad_token: Padding of batches.
        bos_token: First input of the decoder. The model adds it as it shifts labels right; no tokenizer does.
        eos_token: End of every text.
        unk_token: Replacement of unknown text. Kinds with all bytes have it, but never produce it.
        additional_special_tokens: More tokens, each one vocabulary entry that is never split.

    Raises:
        ValueError: If a token is shorter than two characters, is not printable ASCII without spaces, or occurs twice.
    """

    pad_token: str = "<pad>"
    bos_token: str = "<s>"
    eos_token: str = "</s>"
    unk_token: str = "<unk>"
    additional_special_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "additional_special_tokens", tuple(self.additional_special_tokens))
        for token in self.tokens:
            # One character may be a letter of a text, and a byte-level decoder would read non-ASCII characters as bytes.
            is_plain = isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token
            if not is_plain or len(token) < 2:
                raise ValueError(
                    "A special token must be two or more printable ASCII characters without a space, "
                    f"got {token!r} among {self.tokens}."
                )
        if repeated := sorted({token for token in self.tokens if self.tokens.count(token) > 1}):
            raise ValueError(f"Special tokens must differ from one another, got {', '.join(repeated)} more than once.")

    @property
    def control_tokens(self) -> tuple[str, str, str, str]:
        return (self.pad_token, self.bos_token, self.eos_token, self.unk_token)

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.control_tokens + self.additional_special_tokens


def sentinel_tokens(count: int) -> tuple[str, ...]:
    """Return `<extra_id_0>` to `<extra_id_{count - 1}>`, which replace removed spans.

    Source: span corruption, section 3.1.4 of Raffel et al. 2020 (arXiv 1910.10683).
    """
    return tuple(f"<extra_id_{index}>" for index in range(count))


@dataclass(kw_only=True)
class TokenizerSettings:
    """Settings of `train_tokenizer`. None in `vocab_size`, `min_frequency` or `joiner` becomes the kind's default.

    Attributes:
        kind: One of the kinds of `train_tokenizer`.
        vocab_size: Largest size of the vocabulary, with special tokens. None means 8000 for kinds that learn pieces, and
            no limit for others. Texts too small to fill it give a smaller vocabulary and a warning.
        min_frequency: Least count of a merge, a character, a word or a piece. None means 2 for merges, else 1. `unigram`
            and `byte` have no such limit.
        normalization: `"nfc"`, `"nfd"`, `"nfkc"`, `"nfkd"` or None.
        lowercase: True to lower-case texts.
        joiner: For `pretokenized`: suffix of each piece that the next piece continues. None means `@@`.
        special_tokens: The special tokens.
        model_max_length: Longest input in tokens that the tokenizer declares. None means no limit.
        show_progress: True to show progress bars.

    Raises:
        ValueError: If a field is invalid.
    """

    kind: str = "byte_bpe"
    vocab_size: int | None = None
    min_frequency: int | None = None
    normalization: str | None = None
    lowercase: bool = False
    joiner: str | None = None
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    model_max_length: int | None = None
    show_progress: bool = True

    def __post_init__(self) -> None:
        for name, known in (("kind", TOKENIZER_KINDS), ("normalization", NORMALIZATIONS)):
            value = getattr(self, name)
            if value not in (None, *known):
                hint = did_you_mean(value, known)
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}.{hint}")
        for name in ("vocab_size", "min_frequency", "model_max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be a positive whole number, got {value!r}.")
        self._resolve_min_frequency()
        self._resolve_joiner()
        if self.vocab_size is None and self.kind in KINDS_THAT_FILL_A_VOCABULARY:
            self.vocab_size = DEFAULT_VOCAB_SIZE
        has_all_bytes = self.kind in KINDS_WITH_ALL_BYTES
        self.require_room_for(BYTE_COUNT if has_all_bytes else 1, "bytes" if has_all_bytes else "character or piece")

    def _resolve_min_frequency(self) -> None:
        if self.kind not in KINDS_WITHOUT_FREQUENCIES:
            default = DEFAULT_MERGE_FREQUENCY if self.kind in KINDS_THAT_FILL_A_VOCABULARY else 1
            self.min_frequency = default if self.min_frequency is None else self.min_frequency
        elif self.min_frequency is not None:
            raise ValueError(
                f"`min_frequency` must be left out for kind {self.kind!r}, which drops no entries by frequency, "
                f"got {self.min_frequency}."
            )

    def _resolve_joiner(self) -> None:
        if self.kind == "pretokenized":
            self.joiner = DEFAULT_JOINER if self.joiner is None else self.joiner
            if not self.joiner or " " in self.joiner:
                raise ValueError(f"`joiner` must be one or more characters without a space, got {self.joiner!r}.")
        elif self.joiner is not None:
            raise ValueError(
                f"`joiner` must be left out unless `kind` is 'pretokenized', got {self.joiner!r} for {self.kind!r}."
            )

    def require_room_for(self, count: int, noun: str) -> None:
        """Check that `vocab_size` has room for the special tokens and `count` more entries.

        Raises:
            ValueError: If there is too little room.
        """
        specials = len(self.special_tokens.tokens)
        if self.vocab_size is not None and self.vocab_size < specials + count:
            raise ValueError(
                f"`vocab_size` must be at least {specials + count} for kind {self.kind!r} "
                f"({specials} special tokens + {count} {noun}), got {self.vocab_size}."
            )
