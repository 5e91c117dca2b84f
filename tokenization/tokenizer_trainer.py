"""Training of a plain fast tokenizer, which needs only transformers."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerFast

from metaphrase.tokenization.special_tokens import SpecialTokens
from metaphrase.tokenization.tokenizer_pipeline import build_pipeline
from metaphrase.tokenization.tokenizer_settings import TokenizerSettings
from metaphrase.tokenization.vocabulary_trainer import train_vocabulary


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "byte_bpe",
    vocab_size: int | None = None,
    min_frequency: int | None = None,
    normalization: str | None = None,
    lowercase: bool = False,
    joiner: str | None = None,
    special_tokens: SpecialTokens | None = None,
    additional_special_tokens: tuple[str, ...] | list[str] = (),
    model_max_length: int | None = None,
    show_progress: bool = True,
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
    - `char`: one token per character. Exact for known characters.
    - `pretokenized`: texts are already split into pieces, as in `an@@ trie@@ b .`, and every piece is an entry. Decoding
      joins them: `antrieb .`. Runs of spaces become one space.

    Unknown text becomes the unknown token, which `skip_special_tokens=True` omits.

    Source: byte_bpe, section 2.2 of Radford et al. 2019 (Language Models are Unsupervised Multitask Learners); byte, Xue
    et al. 2022 (arXiv 2105.13626); bpe, Sennrich et al. 2016 (arXiv 1508.07909); unigram, Kudo 2018 (arXiv 1804.10959),
    both with the white space of Kudo and Richardson 2018 (arXiv 1808.06226); wordpiece, Wu et al. 2016 (arXiv 1609.08144).

    Args:
        texts: The training texts, read once.
        kind: One of the kinds above.
        vocab_size: Largest size of the vocabulary, with special tokens. None means 8000 for kinds that learn pieces, and
            no limit for others. Texts too small to fill it give a smaller vocabulary and a warning.
        min_frequency: Least count of a merge, a character or a piece. None means 2 for merges, else 1. `unigram` and
            `byte` have no such limit.
        normalization: `"nfc"`, `"nfkc"` or None.
        lowercase: True to lower-case texts.
        joiner: For `pretokenized`: suffix of each piece that the next piece continues. None means `@@`.
        special_tokens: The special tokens. None means `SpecialTokens()`.
        additional_special_tokens: Tokens to append to those of `special_tokens`.
        model_max_length: Longest input in tokens that the tokenizer declares. None means no limit.
        show_progress: True to show progress bars.

    Raises:
        ValueError: If a setting is invalid, the texts hold no visible character, or their characters do not fit into
            `vocab_size`.
    """
    special_tokens = (special_tokens or SpecialTokens()).with_additional(additional_special_tokens)
    settings = TokenizerSettings(
        kind=kind,
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        normalization=normalization,
        lowercase=lowercase,
        joiner=joiner,
        special_tokens=special_tokens,
        model_max_length=model_max_length,
        show_progress=show_progress,
    )
    limit = {} if model_max_length is None else {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=build_pipeline(train_vocabulary(texts, settings), settings),
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
