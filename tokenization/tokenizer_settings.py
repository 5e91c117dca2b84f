"""Settings of a tokenizer's training, checked before any text is read."""

from dataclasses import dataclass, field

from metaphrase.tokenization.hints import did_you_mean
from metaphrase.tokenization.special_tokens import SpecialTokens

TOKENIZER_KINDS = ("byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "pretokenized")
NORMALIZATIONS = ("nfc", "nfkc")
BYTE_COUNT = 256

# These kinds learn pieces until the vocabulary is full.
KINDS_THAT_FILL_A_VOCABULARY = ("byte_bpe", "bpe", "unigram", "wordpiece")
KINDS_WITHOUT_FREQUENCIES = ("unigram", "byte")
DEFAULT_VOCAB_SIZE = 8000
DEFAULT_MERGE_FREQUENCY = 2
DEFAULT_JOINER = "@@"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Settings of `train_tokenizer`, which explains them.

    None in `vocab_size`, `min_frequency` or `joiner` becomes the kind's default, if it has one.

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
        _require_known("kind", self.kind, TOKENIZER_KINDS)
        if self.normalization is not None:
            _require_known("normalization", self.normalization, NORMALIZATIONS)
        for name in ("vocab_size", "min_frequency", "model_max_length"):
            _require_positive(name, getattr(self, name))
        self._resolve_min_frequency()
        self._resolve_joiner()
        self._resolve_vocab_size()

    def _resolve_min_frequency(self) -> None:
        if self.kind in KINDS_WITHOUT_FREQUENCIES:
            if self.min_frequency is not None:
                raise ValueError(
                    f"`min_frequency` must be left out for kind {self.kind!r}, which drops no entries by frequency, "
                    f"got {self.min_frequency}."
                )
        elif self.min_frequency is None:
            default = DEFAULT_MERGE_FREQUENCY if self.kind in KINDS_THAT_FILL_A_VOCABULARY else 1
            object.__setattr__(self, "min_frequency", default)

    def _resolve_joiner(self) -> None:
        if self.kind != "pretokenized":
            if self.joiner is not None:
                raise ValueError(
                    f"`joiner` must be left out unless `kind` is 'pretokenized', got {self.joiner!r} for {self.kind!r}."
                )
            return
        if self.joiner is None:
            object.__setattr__(self, "joiner", DEFAULT_JOINER)
        elif not self.joiner or " " in self.joiner:
            raise ValueError(f"`joiner` must be one or more characters without a space, got {self.joiner!r}.")

    def _resolve_vocab_size(self) -> None:
        if self.vocab_size is None:
            if self.kind in KINDS_THAT_FILL_A_VOCABULARY:
                object.__setattr__(self, "vocab_size", DEFAULT_VOCAB_SIZE)
            else:
                return
        has_all_bytes = self.kind in ("byte_bpe", "byte")
        self.require_room_for(BYTE_COUNT if has_all_bytes else 1, "bytes" if has_all_bytes else "character or piece")

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


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}.{did_you_mean(value, known)}")


def _require_positive(name: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a positive whole number, got {value!r}.")
