"""Strings and ids of the special tokens. No other module states either."""

from dataclasses import dataclass, replace


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
        unk_token: Replacement of unknown text. The byte kinds have it, but never produce it.
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
        if isinstance(self.additional_special_tokens, str):
            raise ValueError(
                "`additional_special_tokens` must be a sequence of strings, "
                f"got the single string {self.additional_special_tokens!r}."
            )
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

    @property
    def pad_token_id(self) -> int:
        return self.tokens.index(self.pad_token)

    @property
    def bos_token_id(self) -> int:
        return self.tokens.index(self.bos_token)

    @property
    def eos_token_id(self) -> int:
        return self.tokens.index(self.eos_token)

    @property
    def unk_token_id(self) -> int:
        return self.tokens.index(self.unk_token)

    def with_additional(self, tokens: tuple[str, ...] | list[str]) -> "SpecialTokens":
        """Return these special tokens with more additional tokens behind them.

        Raises:
            ValueError: If the constructor would raise it.
        """
        if isinstance(tokens, str):
            raise ValueError(
                f"`additional_special_tokens` must be a sequence of strings, got the single string {tokens!r}."
            )
        return replace(self, additional_special_tokens=(*self.additional_special_tokens, *tokens))


def sentinel_tokens(count: int) -> tuple[str, ...]:
    """Return `<extra_id_0>` to `<extra_id_{count - 1}>`, which replace removed spans.

    Source: span corruption, section 3.1.4 of Raffel et al. 2020 (arXiv 1910.10683).

    Raises:
        ValueError: If `count` is negative.
    """
    if count < 0:
        raise ValueError(f"`count` must not be negative, got {count}.")
    return tuple(f"<extra_id_{index}>" for index in range(count))
