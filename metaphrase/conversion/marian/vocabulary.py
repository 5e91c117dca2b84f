"""SentencePiece's vocabularies of a model of Marian as fast tokenizers, and its lexical shortlist as a vocabulary map.

The tokenizers give the ids of SentencePiece without its library: Kudo and Richardson 2018, arXiv 1808.06226.
"""

import logging
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metaphrase.conversion.marian.files import read_shortlist
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.vocabulary_map import VocabularyMap

logger = logging.getLogger(__name__)

_PADDING = "<pad>"
# Fields of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SPACE_IS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE = 2, 3, 4, 5
_UNIGRAM = 1
# Types of pieces.
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4


def find_vocabularies(folder: Path) -> list[Path]:
    """Return the file of a joint vocabulary, or those of source and target."""
    paths = sorted(folder.glob("*.spm"))
    if len(paths) == 1:
        return paths
    sides = [[path for path in paths if re.search(side, path.name)] for side in ("src|source", "trg|target")]
    if len(paths) != 2 or [len(side) for side in sides] != [1, 1]:
        raise ValueError(
            "A model of Marian must have one vocabulary *.spm beside it, or source.spm and target.spm, "
            f"got {', '.join(path.name for path in paths) or 'none'} in {folder}."
        )
    return [*sides[0], *sides[1]]


def read_vocabularies(paths: list[Path]) -> TokenizerPair:
    """Return the tokenizers of a model, whose padding follows the pieces.

    Raises:
        ValueError: If a file is damaged or no unigram model, or the sides have special tokens or sizes of their own.
    """
    source, target = (_read_vocabulary(path) for path in (paths[0], paths[-1]))
    sides = [(len(side), side.eos_token_id, side.unk_token_id) for side in (source, target)]
    if sides[0] != sides[1]:
        raise ValueError(
            f"Both vocabularies must have one size and the same special ids, got {sides[0]} and {sides[1]}."
        )
    return TokenizerPair(source, target if len(paths) > 1 else source)


def _read_vocabulary(path: Path) -> PreTrainedTokenizerFast:
    try:
        return _make_tokenizer(path.read_bytes())
    # tokenizers has no error class of its own.
    except Exception as error:
        raise ValueError(f"{path} must be a unigram model of SentencePiece: {error}.") from error


def _make_tokenizer(content: bytes) -> PreTrainedTokenizerFast:
    fields = list(_read_message(content))
    pieces = [dict(_read_message(value)) for number, value in fields if number == _PIECES]
    trainer, normalizer = (
        dict(_read_message(b"".join(value for number, value in fields if number == wanted)))
        for wanted in (_TRAINER, _NORMALIZER)
    )
    vocabulary = [(piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]) for piece in pieces]
    kinds = [piece.get(3, _NORMAL) for piece in pieces]
    names = [name for name, _ in vocabulary]
    if len({*names}) < len(names) or kinds.count(_UNKNOWN) != 1 or "</s>" not in names or _PADDING in names:
        raise ValueError(f"it must have different pieces, with </s>, one unknown piece and no {_PADDING}")
    if (
        trainer.get(_MODEL_TYPE, _UNIGRAM) != _UNIGRAM
        or trainer.get(_SPACE_IS_SUFFIX)
        or not normalizer.get(_ESCAPE, 1)
    ):
        raise ValueError("it must mark spaces in front of words, got another kind of model")
    has_bytes, unknown = bool(trainer.get(_BYTE_FALLBACK)), kinds.index(_UNKNOWN)
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=has_bytes))
    steps = [normalizers.Precompiled(normalizer[_CHARSMAP])] if normalizer.get(_CHARSMAP) else []
    if normalizer.get(_REMOVE_SPACES, 1):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if normalizer.get(_DUMMY_PREFIX, 1) else "never"
    splits = [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)]
    if whole := sorted((names[i] for i, kind in enumerate(kinds) if kind == _USER_DEFINED), key=len, reverse=True):
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, whole))), behavior="isolated"))
    # Text such as `</s>` is cut behind its first character, so that it is no control token.
    controls = (name for name, kind in zip(names, kinds, strict=True) if kind not in (_NORMAL, _USER_DEFINED) and name)
    cuts = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in controls)
    splits.append(pre_tokenizers.Split(Regex(cuts), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if scheme == "always" else []),
        ]
    )
    end = names.index("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", end)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token=names[unknown],
        pad_token=_PADDING,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _read_message(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message in the format of Protocol Buffers."""
    offset = 0

    def read_number() -> int:
        nonlocal offset
        number = shift = 0
        while True:
            byte = content[offset]
            offset += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number
            if shift > 63:
                raise ValueError("a number is too long")

    while offset < len(content):
        key = read_number()
        # A number, 8 bytes, bytes with their length in front, or 4 bytes.
        if key & 7 == 0:
            yield key >> 3, read_number()
            continue
        length = {1: lambda: 8, 2: read_number, 5: lambda: 4}.get(key & 7, lambda: len(content) + 1)()
        if length > len(content) - offset:
            raise ValueError("it is damaged")
        yield key >> 3, content[offset : offset + length]
        offset += length


def read_vocabulary_map(path: Path, tokenizers: TokenizerPair) -> VocabularyMap:
    """Return the vocabulary map of a lexical shortlist. With a joint vocabulary, a source token also permits itself."""
    num_first, targets = read_shortlist(path, tokenizers.source.pad_token_id)
    if tokenizers.is_joint:
        targets = [np.append(ids, np.uint32(index)) for index, ids in enumerate(targets)]
    end = tokenizers.target.eos_token_id
    return VocabularyMap([*{*range(num_first), end}], dict(enumerate(targets)))
