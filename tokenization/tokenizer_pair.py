"""Pair of source and target tokenizer of a sequence-to-sequence model, and the languages of multilingual tokenizers."""

import copy
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization.texts import checked_texts, join_pieces
from metaphrase.tokenization.tokenizer_trainer import find_joiner, train_tokenizer

logger = logging.getLogger(__name__)


def split_sides(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
    """Return the tokenizers of source and target, or None if there is one vocabulary. Neither can be saved for both.

    Raises:
        ValueError: If a special token of FSMT's has two ids.
    """
    name = type(tokenizer).__name__
    if name == "FSMTTokenizer":
        vocabularies = tokenizer.encoder, {token: index for index, token in tokenizer.decoder.items()}
        for token in tokenizer.all_special_tokens:
            ids = [vocabulary.get(token) for vocabulary in vocabularies]
            if ids[0] != ids[1]:
                raise ValueError(
                    f"{token!r} must have one id in both vocabularies of a {name}, got {ids[0]} and {ids[1]}."
                )
        languages = tokenizer.src_lang, tokenizer.tgt_lang
        source, target = (_fsmt_side(tokenizer, *side) for side in zip(vocabularies, languages, strict=True))
        return source, target
    if name == "MarianTokenizer" and tokenizer.separate_vocabs:
        vocabularies = tokenizer.encoder, tokenizer.target_encoder
        if any(vocabularies[0].get(token) != vocabularies[1].get(token) for token in tokenizer.all_special_tokens):
            # A model has one padding id, and the tokenizer itself also encodes targets.
            return None
        source, target = (_marian_side(tokenizer, vocabulary, side) for side, vocabulary in enumerate(vocabularies))
        return source, target
    return None


def _fsmt_side(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], language: str
) -> PreTrainedTokenizerBase:
    side = _with_vocabulary(tokenizer, vocabulary, langs=[language, language])
    # The language decides how words are split and joined.
    side.src_lang = side.tgt_lang = language
    return side


def _marian_side(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], index: int
) -> PreTrainedTokenizerBase:
    side = _with_vocabulary(tokenizer, vocabulary, separate_vocabs=False)
    side.separate_vocabs = False
    side.current_encoder = side.encoder
    side.spm_source = side.spm_target = side.current_spm = (tokenizer.spm_source, tokenizer.spm_target)[index]
    side.spm_files = [tokenizer.spm_files[index]] * 2
    return side


def _with_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], **options: Any
) -> PreTrainedTokenizerBase:
    side = copy.copy(tokenizer)
    side.init_kwargs = tokenizer.init_kwargs | options
    side.encoder, side.decoder = dict(vocabulary), {index: token for token, index in vocabulary.items()}
    # The copy still has the cached vocabulary.
    side._update_total_vocab_size()
    return side


TARGET_SUBFOLDER = "target_tokenizer"

# Optional libraries of some tokenizers, each an extra of the same name.
_LIBRARIES = ("sentencepiece", "sacremoses")

# Encoding in parts bounds memory: the library keeps an object per text beside the ids.
TEXTS_PER_CALL = 10_000

# Returns the ids of a text from its number and its encoding.
Segment = Callable[[int, Encoding], list[int]]


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """Source tokenizer and target tokenizer. A joint pair holds the same object twice.

    Attributes:
        source: Encodes texts for the encoder.
        target: Encodes labels and decodes generated ids.
        whole: The tokenizer with two vocabularies that both were split from, saved in their place; else None.

    Raises:
        ValueError: If a tokenizer lacks padding or an end of sequence, or their padding ids differ.
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    whole: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        for side, tokenizer in (("source", self.source), ("target", self.target)):
            for name in ("pad_token", "eos_token"):
                if getattr(tokenizer, name) is None:
                    raise ValueError(
                        f"The {side} tokenizer must have a `{name}`, got None. Set it with "
                        f'`tokenizer.add_special_tokens({{"{name}": ...}})`, or pass `{name}=...` to `from_pretrained`.'
                    )
        if self.source.pad_token_id != self.target.pad_token_id:
            raise ValueError(
                "`pad_token_id` must be the same for source and target, because a model has only one, "
                f"got {self.source.pad_token_id} and {self.target.pad_token_id}."
            )

    @property
    def is_joint(self) -> bool:
        """True if one tokenizer serves both sides."""
        return self.source is self.target

    @classmethod
    def train(
        cls,
        source_texts: Iterable[str],
        target_texts: Iterable[str],
        *,
        joint: bool = True,
        kind: str = "byte_bpe",
        source_kind: str | None = None,
        target_kind: str | None = None,
        vocab_size: int | None = None,
        target_vocab_size: int | None = None,
        **options: Any,
    ) -> "TokenizerPair":
        """Train one tokenizer on the texts of both sides, or one for each side.

        Args:
            source_texts: Texts of the source side.
            target_texts: Texts of the target side.
            joint: True for one tokenizer of both sides.
            kind: Kind of both tokenizers, as for `train_tokenizer`.
            source_kind: Kind of the source tokenizer, if different. Needs `joint=False`.
            target_kind: Kind of the target tokenizer, if different. Needs `joint=False`.
            vocab_size: Size of the joint vocabulary, or of each of two.
            target_vocab_size: Size of the target vocabulary, if different. Needs `joint=False`.
            options: Further arguments of `train_tokenizer`, for both tokenizers.

        Raises:
            ValueError: If a kind or a size of one side is given for a joint tokenizer, or `train_tokenizer` raises it.
        """
        if not joint:
            target_size = vocab_size if target_vocab_size is None else target_vocab_size
            return cls(
                train_tokenizer(source_texts, kind=source_kind or kind, vocab_size=vocab_size, **options),
                train_tokenizer(target_texts, kind=target_kind or kind, vocab_size=target_size, **options),
            )
        sides = {"source_kind": source_kind, "target_kind": target_kind, "target_vocab_size": target_vocab_size}
        for name, value in sides.items():
            if value is not None:
                raise ValueError(f"`{name}` must be left out when `joint` is true, got {value!r}.")
        texts = chain(checked_texts(source_texts), checked_texts(target_texts))
        tokenizer = train_tokenizer(texts, kind=kind, vocab_size=vocab_size, **options)
        return cls(tokenizer, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        target_name_or_path: str | os.PathLike | None = None,
        *,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> "TokenizerPair":
        """Load a saved pair, or any tokenizers that `AutoTokenizer` can load.

        Args:
            name_or_path: Folder or Hub id of a saved pair or of the source tokenizer.
            target_name_or_path: Folder or Hub id of the target tokenizer. None means the target tokenizer saved with the
                source, or else the source tokenizer, which is split if it has two vocabularies, as FSMT's.
            trust_remote_code: True if code of the tokenizers may run. There is no prompt.
            kwargs: Passed to `AutoTokenizer.from_pretrained` for both, such as `revision` or `pad_token`.

        Raises:
            ValueError: If the constructor raises it, a separate target tokenizer is missing, or a tokenizer needs code
                that is not trusted.
            OSError: If a tokenizer cannot be found.
            ImportError: If a tokenizer needs a library that is not installed.
        """
        kwargs["trust_remote_code"] = trust_remote_code
        source = _load(name_or_path, **kwargs)
        if target_name_or_path is not None:
            if os.fspath(target_name_or_path) == os.fspath(name_or_path):
                return cls._from_one(source)
            return cls(source, _load(target_name_or_path, **kwargs))
        subfolder = os.path.join(kwargs.pop("subfolder", "") or "", TARGET_SUBFOLDER)
        was_saved_apart = TARGET_SUBFOLDER in source.init_kwargs
        if not was_saved_apart and not os.path.isdir(os.path.join(name_or_path, subfolder)):
            return cls._from_one(source)
        try:
            target = _load(name_or_path, subfolder=subfolder, **kwargs)
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):
                raise
            raise ValueError(
                f"`name_or_path` must hold the target tokenizer in `{subfolder}/`, because its source tokenizer belongs to a "
                f"separate pair, got {os.fspath(name_or_path)!r}. Pass `target_name_or_path` if it lies elsewhere."
            ) from error
        return cls(source, target)

    @classmethod
    def _from_one(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenizerPair":
        sides = split_sides(tokenizer)
        return cls(tokenizer, tokenizer) if sides is None else cls(*sides, whole=tokenizer)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Save the source tokenizer, and a separate target tokenizer in `target_tokenizer/` below it.

        `AutoTokenizer.from_pretrained(folder)` loads the source, and `subfolder="target_tokenizer"` the target. Tokenizers
        split from one are saved as that one.

        Raises:
            ValueError: If one tokenizer is saved into a folder that holds a separate target tokenizer.
        """
        target_folder = os.path.join(folder, TARGET_SUBFOLDER)
        is_one = self.is_joint or self.whole is not None
        if is_one and os.path.isdir(target_folder):
            raise ValueError(
                f"`folder` must not hold `{TARGET_SUBFOLDER}/` when one tokenizer is saved, because it would be loaded "
                f"as the target tokenizer, got {os.fspath(folder)!r}. Remove it or choose another folder."
            )
        # Only the copy gets the mark below: the source saved alone must not require a target.
        source = copy.copy(self.source if self.whole is None else self.whole)
        source.init_kwargs = {key: value for key, value in source.init_kwargs.items() if key != TARGET_SUBFOLDER}
        if not is_one:
            # This mark requires a target tokenizer, since loading from the Hub cannot list a folder.
            source.init_kwargs[TARGET_SUBFOLDER] = TARGET_SUBFOLDER
            self.target.save_pretrained(target_folder)
        source.save_pretrained(folder)

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Add entries to a joint vocabulary, like the additional tokens of `SpecialTokens`.

        Raises:
            ValueError: If source and target have separate vocabularies.
        """
        if not self.is_joint:
            raise ValueError(
                f"`additional_special_tokens` must be empty for two vocabularies, got {list(tokens)}. Train a joint one."
            )
        self.source.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])

    def declare_max_length(self, max_length: int) -> None:
        """Set `model_max_length` of each tokenizer that declares none, which transformers shows as 1e30."""
        for tokenizer in (self.source, self.target):
            if tokenizer.model_max_length >= VERY_LARGE_INTEGER:
                tokenizer.model_max_length = max_length

    def encode_sources(self, texts: list[str], segment: Segment | None = None) -> list[list[int]]:
        """Return the ids of each text with the end of sequence, never truncated.

        Args:
            texts: The texts.
            segment: Returns the ids of another segmentation from the number of a text and its encoding (fast tokenizers).

        Raises:
            ValueError: If `texts` is not a list of strings.
        """
        return _encode(self.source, texts, "text", segment)

    def encode_targets(self, texts: list[str], segment: Segment | None = None) -> list[list[int]]:
        """Return the ids of each target text, like `encode_sources`, in the tokenizer's mode for targets if it has one.

        Raises:
            ValueError: If `texts` is not a list of strings, or the tokenizer needs a target language and has none.
        """
        check_target_language(self.target)
        return _encode(self.target, texts, "text_target", segment)

    def decode_targets(self, ids: torch.Tensor | np.ndarray | list) -> list[str]:
        """Return the text of each row of ids, without special tokens. Ignored labels (-100) count as padding.

        Args:
            ids: Ids, shape (B, T), or a list of rows of any length.

        Raises:
            ValueError: If `ids` is not a batch of rows.
        """
        texts = []
        for row in ids:
            row = row.tolist() if isinstance(row, torch.Tensor | np.ndarray) else row
            if not isinstance(row, list | tuple):
                raise ValueError(f"`ids` must be a batch of rows, got {type(row).__name__} where a row should be.")
            row = [self.target.pad_token_id if index == IGNORED_LABEL else index for index in row]
            texts.append(self.target.decode(row, skip_special_tokens=True))
        return texts

    @property
    def target_joiner(self) -> str | None:
        """Suffix of each piece of the target that the next piece continues; None if targets are not split into pieces."""
        return find_joiner(self.target)

    def as_decoded(self, texts: Iterable[str]) -> list[str]:
        """Return target texts as decoding writes them: pieces of a `pretokenized` tokenizer are joined."""
        joiner = self.target_joiner
        return list(texts) if joiner is None else [join_pieces(text, joiner) for text in texts]

    def config_fields(self) -> dict[str, int | None]:
        """Return the fields of a model configuration that follow from the tokenizers.

        The special ids are the target's. Without a beginning of sequence the decoder starts with padding.
        """
        target = self.target
        return {
            "vocab_size": _entry_count(self.source),
            "decoder_vocab_size": None if self.is_joint else _entry_count(target),
            "pad_token_id": target.pad_token_id,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "decoder_start_token_id": target.pad_token_id if target.bos_token_id is None else target.bos_token_id,
        }


def _load(name_or_path: str | os.PathLike, *, trust_remote_code: bool, **kwargs: Any) -> PreTrainedTokenizerBase:
    try:
        # By default transformers asks on standard output, and would read a text from standard input as the answer.
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)
        if tokenizer.is_fast:
            # A damaged template of special tokens shows in use only.
            tokenizer(["a"])
    except ImportError as error:
        library = next((name for name in _LIBRARIES if name in str(error).lower()), None)
        if library is None:
            raise
        raise ImportError(
            f"The tokenizer of {os.fspath(name_or_path)!r} needs {library}, which is not installed: "
            f"pip install metaphrase[{library}]"
        ) from error
    except BaseException as error:
        # transformers and tokenizers raise all kinds of errors for damaged files. A panic of Rust is no Exception.
        is_of_files = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, OSError | ValueError) or not is_of_files:
            raise
        raise ValueError(
            f"`tokenizer.json` and the other files of the tokenizer in {os.fspath(name_or_path)!r} must be those of a tokenizer "
            f"that can be loaded, got an error: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if type(tokenizer).__name__ == "FSMTTokenizer" and tokenizer.eos_token is None:
        # Its end of sequence is called a separator.
        tokenizer.eos_token = tokenizer.sep_token
    return tokenizer


def _entry_count(tokenizer: PreTrainedTokenizerBase) -> int:
    # Ids may have gaps: the embedding must reach the last id.
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], argument: str, segment: Segment | None = None
) -> list[list[int]]:
    texts = list(checked_texts(texts))
    # Options of all calls. Callers report long texts themselves.
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    rows: list[list[int]] = []
    for start in range(0, len(texts), TEXTS_PER_CALL):
        batch = tokenizer(**{argument: texts[start : start + TEXTS_PER_CALL]}, **options)
        rows += batch["input_ids"] if segment is None else itertools.starmap(segment, enumerate(batch.encodings, start))
    end = tokenizer.eos_token
    if all(row and row[-1] == tokenizer.eos_token_id for row in rows) and not any(end in text for text in texts):
        return rows
    [bare] = tokenizer(**{argument: ["a"]}, **options, add_special_tokens=False)["input_ids"]
    [full] = tokenizer(**{argument: ["a"]}, **options)["input_ids"]
    # Some tokenizers put a language code behind the end of sequence.
    starts = [start for start in range(len(full)) if full[start : start + len(bare)] == bare]
    behind = full[starts[0] + len(bare) :] if starts else full[-1:]
    return rows if tokenizer.eos_token_id in behind else [[*row, tokenizer.eos_token_id] for row in rows]


def set_languages(
    tokenizers: TokenizerPair, source_lang: str | None = None, target_lang: str | None = None
) -> dict[str, int]:
    """Set the languages of sources and targets, and return the generation options for the target language.

    Args:
        tokenizers: Tokenizers of a multilingual model, changed in place.
        source_lang: A code of the tokenizer, such as eng_Latn for NLLB, en_XX for mBART, en for M2M100. None keeps the
            current language.
        target_lang: The same for targets.

    Returns:
        `forced_bos_token_id` if targets begin with the code; `decoder_start_token_id` if targets end with it, since the
        decoder then starts with it; nothing without `target_lang`.

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
    """Check that a tokenizer knows the language of targets. Warn if mBART's or NLLB's uses that of the sources.

    Raises:
        ValueError: If M2M100's tokenizer has no target language.
    """
    if hasattr(tokenizer, "lang_code_to_token"):
        language_id(tokenizer, "target_lang", tokenizer.tgt_lang)
    elif getattr(tokenizer, "tgt_lang", "") is None and getattr(tokenizer, "src_lang", None) is not None:
        logger.warning(
            "`target_lang` is not set: targets get the language code of the sources, %s.", tokenizer.src_lang
        )


def _known_language(tokenizer: PreTrainedTokenizerBase, field: str, attribute: str, code: str) -> int:
    if not hasattr(tokenizer, attribute):
        name = type(tokenizer).__name__
        raise ValueError(f"`{field}` must be left out for a {name}, which has no languages, got {code!r}.")
    return language_id(tokenizer, field, code)


def has_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer marks sources with their language."""
    return hasattr(tokenizer, "_build_translation_inputs")


def language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    """Return the id of the token of a language.

    Args:
        tokenizer: A multilingual tokenizer.
        field: Name of the code in error messages.
        code: Code of the language in the tokenizer's class.

    Raises:
        ValueError: If the code is None or unknown.
    """
    name = type(tokenizer).__name__
    if code is None:
        raise ValueError(f"`{field}` must be given for a {name}, which has many languages, got None.")
    m2m_tokens = getattr(tokenizer, "lang_code_to_token", None)
    if m2m_tokens is not None:
        token = m2m_tokens.get(code)
    else:
        # Only special tokens count: a part of a word may look like a code.
        tokens = {
            *tokenizer.all_special_tokens,
            *tokenizer.get_added_vocab(),
            *getattr(tokenizer, "lang_code_to_id", {}),
        }
        token = next((spelling for spelling in (code, f"__{code}__") if spelling in tokens), None)
    index = None if token is None else tokenizer.convert_tokens_to_ids(token)
    if index is None or index == tokenizer.unk_token_id:
        raise ValueError(f"`{field}` must be a language that the {name} knows, got {code!r}.")
    return index
