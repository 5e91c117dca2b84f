"""Source and target tokenizer of a model: encoding and decoding, languages, and ids of phrases."""

import contextlib
import copy
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from metaphrase.errors import MetaphraseError
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.plugins import needed_plugin
from metaphrase.tokenization.texts import FEATURE_MARK, checked_texts, join_columns, join_pieces
from metaphrase.tokenization.tokenizer_trainer import find_joiner, splits_at_spaces, train_tokenizer

logger = logging.getLogger(__name__)

TARGET_SUBFOLDER = "target_tokenizer"
# Encoding in parts bounds memory: the library keeps an object per text beside the ids.
_TEXTS_PER_CALL = 10_000
# About 30 MB of words with their ids.
_MAX_WORDS = 100_000
_MODES = threading.RLock()
# Returns the ids of a text from its number and its encoding.
Segment = Callable[[int, Encoding], list[int]]


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """Source tokenizer and target tokenizer. A joint pair holds the same object twice.

    Attributes:
        target: Encodes labels and decodes generated ids.
        whole: The tokenizer with two vocabularies that both were split from, saved in their place; else None.
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    whole: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        for side, tokenizer in (("source", self.source), ("target", self.target)):
            for name in ("pad_token", "eos_token"):
                if getattr(tokenizer, name) is None:
                    raise MetaphraseError(
                        f"The {side} tokenizer must have a `{name}`, got None. Set it with "
                        f'`tokenizer.add_special_tokens({{"{name}": ...}})`, or pass `{name}=...` to `from_pretrained`.'
                    )
        pads = self.source.pad_token_id, self.target.pad_token_id
        if pads[0] != pads[1]:
            # A model has only one.
            raise MetaphraseError(f"`pad_token_id` must be the same on both sides, got {pads[0]} and {pads[1]}.")

    @property
    def unknown_id(self) -> int | None:
        """Id of source text that has no token. GPT-2's tokenizer, which knows all bytes, calls its end unknown."""
        tokenizer = self.source
        known_ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        return None if tokenizer.unk_token_id in known_ids else tokenizer.unk_token_id

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
        target_kind: str | None = None,
        vocab_size: int | None = None,
        target_vocab_size: int | None = None,
        **options: Any,
    ) -> "TokenizerPair":
        """Train one tokenizer on the texts of both sides, or one for each side.

        Args:
            target_kind: Kind of the target tokenizer, if different. Needs `joint=False`.
            vocab_size: Size of the joint vocabulary, or of each of two.
            target_vocab_size: Size of the target vocabulary, if different. Needs `joint=False`.

        Raises:
            MetaphraseError: If a kind or a size of one side is given for a joint tokenizer, or `train_tokenizer` raises it.
        """
        if joint:
            for name, value in {"target_kind": target_kind, "target_vocab_size": target_vocab_size}.items():
                if value is not None:
                    raise MetaphraseError(f"`{name}` must be left out when `joint` is true, got {value!r}.")
            texts = itertools.chain(checked_texts(source_texts), checked_texts(target_texts))
            tokenizer = train_tokenizer(texts, kind=kind, vocab_size=vocab_size, **options)
            return cls(tokenizer, tokenizer)
        source = train_tokenizer(source_texts, kind=kind, vocab_size=vocab_size, **options)
        size = vocab_size if target_vocab_size is None else target_vocab_size
        return cls(source, train_tokenizer(target_texts, kind=target_kind or kind, vocab_size=size, **options))

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
            MetaphraseError: If a separate target tokenizer is missing, or a tokenizer needs code that is not trusted.
        """
        kwargs["trust_remote_code"] = trust_remote_code
        source = _load(name_or_path, **kwargs)
        if target_name_or_path is not None and os.fspath(target_name_or_path) != os.fspath(name_or_path):
            return cls(source, _load(target_name_or_path, **kwargs))
        subfolder = os.path.join(kwargs.pop("subfolder", "") or "", TARGET_SUBFOLDER)
        is_one = TARGET_SUBFOLDER not in source.init_kwargs and not os.path.isdir(os.path.join(name_or_path, subfolder))
        if is_one or target_name_or_path is not None:
            if not hasattr(source, "separate_vocabs") and type(source).__name__ != "FSMTTokenizer":
                return cls(source, source)
            sides = needed_plugin("split_tokenizer", "name_or_path")(source)
            return cls(sides[0], sides[1], None if sides[0] is source else source)
        return cls(source, _load(name_or_path, subfolder=subfolder, **kwargs))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Save the source tokenizer, and a separate target tokenizer in `target_tokenizer/` below it.

        `AutoTokenizer.from_pretrained(folder)` loads the source, and `subfolder="target_tokenizer"` the target. Tokenizers
        split from one are saved as that one. `folder` must not hold another separate target tokenizer.
        """
        target_folder = os.path.join(folder, TARGET_SUBFOLDER)
        is_one = self.is_joint or self.whole is not None
        if is_one and os.path.isdir(target_folder):
            raise MetaphraseError(
                f"`folder` must not hold `{TARGET_SUBFOLDER}/` when one tokenizer is saved, because it would be loaded "
                f"as the target tokenizer, got {os.fspath(folder)!r}. Remove it or choose another folder."
            )
        # Only the copy gets the mark: the source saved alone must not require a target.
        source = copy.copy(self.source if self.whole is None else self.whole)
        source.init_kwargs = {key: value for key, value in source.init_kwargs.items() if key != TARGET_SUBFOLDER}
        if not is_one:
            # This mark requires a target tokenizer, since loading from the Hub cannot list a folder.
            source.init_kwargs[TARGET_SUBFOLDER] = TARGET_SUBFOLDER
            self.target.save_pretrained(target_folder)
        source.save_pretrained(folder)

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Add entries to a joint vocabulary, like `additional_special_tokens` of `train_tokenizer`."""
        if not self.is_joint:
            raise MetaphraseError(f"`additional_special_tokens` must come with a joint vocabulary, got {list(tokens)}.")
        self.source.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])

    def encode_sources(self, texts: list[str], segment: Segment | None = None) -> list[list[int]]:
        """Return the ids of each text with the end of sequence, never truncated.

        `segment` returns the ids of another segmentation (fast tokenizers).
        """
        with mode_lock(self.source):
            return _encode(self.source, texts, "text", segment)

    def encode_targets(self, texts: list[str], segment: Segment | None = None) -> list[list[int]]:
        """Return the ids of each target text, like `encode_sources`, in the tokenizer's mode for targets if it has one."""
        check_target_language(self.target)
        with mode_lock(self.target):
            return _encode(self.target, texts, "text_target", segment)

    def decode_targets(self, ids: torch.Tensor | np.ndarray | list) -> list[str]:
        """Return the text of each row of ids (B, T), without special tokens. Ignored labels (-100) count as padding."""
        rows = [row.tolist() if isinstance(row, torch.Tensor | np.ndarray) else row for row in ids]
        padded = [[self.target.pad_token_id if token == IGNORED_LABEL else token for token in row] for row in rows]
        return [self.target.decode(row, skip_special_tokens=True) for row in padded]

    def as_decoded(self, texts: Iterable[str]) -> list[str]:
        """Return target texts as decoding writes them: pieces of a `pretokenized` tokenizer are joined."""
        joiner = find_joiner(self.target)
        return list(texts) if joiner is None else [join_pieces(text, joiner) for text in texts]

    def config_fields(self) -> dict[str, int | None]:
        """Return the fields of a model configuration that follow from the tokenizers.

        The special ids are the target's. Without a beginning of sequence the decoder starts with padding.
        """
        target = self.target
        # Ids may have gaps: the embedding must reach the last id.
        sizes = [max(len(side), max(side.get_vocab().values()) + 1) for side in (self.source, target)]
        return {
            "vocab_size": sizes[0],
            "decoder_vocab_size": None if self.is_joint else sizes[1],
            "pad_token_id": target.pad_token_id,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "decoder_start_token_id": target.pad_token_id if target.bos_token_id is None else target.bos_token_id,
        }


def _load(name_or_path: str | os.PathLike, *, trust_remote_code: bool, **kwargs: Any) -> PreTrainedTokenizerBase:
    try:
        # By default transformers asks on standard output, and would read a text from standard input as the answer.
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:
        # transformers and tokenizers raise all kinds of errors for damaged files.
        raise MetaphraseError(
            f"The files of the tokenizer in {os.fspath(name_or_path)!r}, such as `tokenizer.json`, cannot be loaded: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def mode_lock(tokenizer: PreTrainedTokenizerBase) -> contextlib.AbstractContextManager:
    """Return a lock if the tokenizer has a mode for targets. It is a state, which other threads would encode their sources in."""
    return _MODES if hasattr(tokenizer, "_switch_to_target_mode") else contextlib.nullcontext()


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], argument: str, segment: Segment | None = None
) -> list[list[int]]:
    texts = list(checked_texts(texts))
    has_columns = any("\t" in text for text in texts)
    if has_columns and any(token[0] == FEATURE_MARK for token in tokenizer.get_added_vocab()):
        # A line has the columns of the training files.
        texts = [join_columns(*text.split("\t")) for text in texts]
    # Options of all calls. Callers report long texts themselves.
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    rows: list[list[int]] = []
    for start in range(0, len(texts), _TEXTS_PER_CALL):
        batch = tokenizer(**{argument: texts[start : start + _TEXTS_PER_CALL]}, **options)
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


# Languages of multilingual tokenizers


def set_languages(
    tokenizers: TokenizerPair, source_lang: str | None = None, target_lang: str | None = None
) -> dict[str, int]:
    """Set the languages of sources and targets, and return the generation options for the target language.

    Args:
        tokenizers: Tokenizers of a multilingual model, changed in place.
        source_lang: A code of the tokenizer, such as eng_Latn for NLLB, en_XX for mBART, en for M2M100. None keeps the
            current language.

    Returns:
        `forced_bos_token_id` if targets begin with the code; `decoder_start_token_id` if targets end with it, since the
        decoder then starts with it; nothing without `target_lang`.

    Raises:
        MetaphraseError: If the tokenizer has no languages, or does not know the code.
    """
    sides = (tokenizers.source, "source_lang", "src_lang"), (tokenizers.target, "target_lang", "tgt_lang")
    for (tokenizer, field, attribute), language in zip(sides, (source_lang, target_lang), strict=True):
        if language is not None:
            if not hasattr(tokenizer, attribute):
                name = type(tokenizer).__name__
                raise MetaphraseError(f"`{field}` must be left out for a {name} without languages, got {language!r}.")
            code = language_id(tokenizer, field, language)
            setattr(tokenizer, attribute, language)
    if target_lang is None:
        return {}
    [ids] = tokenizers.encode_targets(["a"])
    return {"forced_bos_token_id" if ids[0] == code else "decoder_start_token_id": code}


def check_target_language(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that M2M100's tokenizer has a target language. Warn if mBART's or NLLB's uses that of the sources."""
    if hasattr(tokenizer, "lang_code_to_token"):
        language_id(tokenizer, "target_lang", tokenizer.tgt_lang)
    elif getattr(tokenizer, "tgt_lang", "") is None and getattr(tokenizer, "src_lang", None) is not None:
        logger.warning("`target_lang` is unset: targets get the language code of the sources, %s.", tokenizer.src_lang)


def has_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer marks sources with their language."""
    return hasattr(tokenizer, "_build_translation_inputs")


def language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    """Return the id of the token of a language. `field` names the code in error messages."""
    name = type(tokenizer).__name__
    if code is None:
        raise MetaphraseError(f"`{field}` must be given for a {name}, which has many languages, got None.")
    m2m_tokens = getattr(tokenizer, "lang_code_to_token", None)
    if m2m_tokens is not None:
        token = m2m_tokens.get(code)
    else:
        # Only special tokens count: a part of a word may look like a code.
        special = tokenizer.all_special_tokens, tokenizer.get_added_vocab(), getattr(tokenizer, "lang_code_to_id", ())
        token = code if any(code in tokens for tokens in special) else None
    index = None if token is None else tokenizer.convert_tokens_to_ids(token)
    if index is None or index == tokenizer.unk_token_id:
        raise MetaphraseError(f"`{field}` must be a language that the {name} knows, got {code!r}.")
    return index


# Special ids around a text, and truncation that keeps the end of sequence


@dataclass(frozen=True)
class TextFrame:
    """Special ids that an encoder puts around every text: their number, and those behind the text.

    The end has the end of sequence, and the language code that some tokenizers put behind it.
    """

    length: int
    end: list[int]

    @classmethod
    def of(cls, encode: Callable[[list[str]], list[list[int]]]) -> "TextFrame":
        """Find the frame of an encoder such as `TokenizerPair.encode_sources`."""
        # A vocabulary may encode some of these as nothing.
        empty, *rows = encode(["", "a", "1", ".", "的"])
        # If no probe is encoded, take the last id for the end of sequence.
        probe = next((ids for ids in rows if len(ids) > len(empty)), empty[-1:])
        shared = itertools.takewhile(lambda ids: ids[0] == ids[1], zip(reversed(empty), reversed(probe), strict=False))
        return cls(len(empty), [token for token, _ in shared][::-1])


class WordEncoder:
    """Encoder of many texts, equal to `encode` of a tokenizer, which is asked once for each word.

    Kinds that learn pieces join no letters across a space, so the ids of a text are those of its words, each with the space
    before it. A text with other white space is one word. Other tokenizers encode whole texts.
    """

    def __init__(self, tokenizer: Any, encode: Callable[[list[str]], list[list[int]]]):
        self.encode, self.frame = encode, TextFrame.of(encode)
        backend, self._ids = getattr(tokenizer, "backend_tokenizer", None), dict[str, list[int]]()
        self._backend = backend if backend is not None and splits_at_spaces(backend) else None

    def __call__(self, texts: list[str]) -> list[list[int]]:
        # A call sets the state of the library that the last one left behind.
        if self._backend is None or self.encode([""]) != [self.frame.end]:
            return self.encode(texts)
        if len(self._ids) > _MAX_WORDS:
            self._ids.clear()
        rows = [t.replace(" ", "\n ").split("\n") if " ".join(t.split()) == t else [t] for t in checked_texts(texts)]
        new = list(set(itertools.chain.from_iterable(rows)).difference(self._ids))
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        return [[*itertools.chain.from_iterable(map(self._ids.__getitem__, row)), *self.frame.end] for row in rows]


def shorten(row: Sequence[Any], limit: int | None, end: Sequence[Any]) -> list[Any]:
    """Cut a row, such as token ids, to `limit` entries, of which the last are `end`. None means no limit."""
    if limit is None or len(row) <= limit:
        return list(row)
    return [*row[: max(limit - len(end), 0)], *end]
