"""Marian's files: weights in `.npz` or `.bin` with the options of their network, vocabularies, and lexical shortlists.

Numbers in these files are sizes of what follows. numpy checks each against the file before anything is read.
The tokenizers give the ids of SentencePiece without its library: Kudo and Richardson 2018, arXiv 1808.06226.
"""

import contextlib
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME

from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.vocabulary_map import VocabularyMap

OPTIONS_NAME = "special:model.yml"
_SUFFIXES = (".npz", ".bin")
_VERSION = 1
# Marian's number of a type is a class and a width in bytes.
_FLOAT32, _INT8, _INTGEMM8 = 0x404, 0x101, 0x4101
_SHORTLIST_MAGIC = 0xF11A48D5013417F5

_PADDING = "<pad>"
# Fields of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SPACE_IS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE = 2, 3, 4, 5
_UNIGRAM = 1
# Types of pieces.
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4


def find_model_file(source: str | os.PathLike) -> Path | None:
    """Return the model file of Marian that a path names or holds, or None for a folder of transformers and for other names.

    Raises:
        ValueError: If a file holds no model of Marian, or a folder holds several.
    """
    path = Path(source)
    if path.is_file():
        if _has_options(path):
            return path
        raise ValueError(f"`source` must be a folder, or a .npz or .bin file with {OPTIONS_NAME}, got {path}.")
    if not path.is_dir() or (path / CONFIG_NAME).exists():
        return None
    files = [file for file in sorted(path.iterdir()) if _has_options(file)]
    if len(files) > 1:
        raise ValueError(f"`source` must be one of the models in {path}: {', '.join(file.name for file in files)}.")
    return files[0] if files else None


def _has_options(path: Path) -> bool:
    return path.suffix in _SUFFIXES and path.is_file() and OPTIONS_NAME.encode() in path.read_bytes()


def read_model_file(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the options of a network, and its weights in float32 by Marian's names.

    Weights of 8 bits (intgemm) are multiplied out. Factors of activations, which 8 bits need, are dropped.

    Raises:
        ValueError: If the file is damaged, or has weights of another type.
    """
    with naming_damaged_file(path):
        arrays = _read_npz(path) if path.suffix == ".npz" else _read_bin(path)
        options = dict(yaml.safe_load(arrays.pop(OPTIONS_NAME).tobytes().rstrip(b"\0").decode()))
    weights = {name: array for name, array in arrays.items() if not name.endswith("_QuantMultA")}
    for name, weight in weights.items():
        if weight.dtype != np.float32 or not np.isfinite(weight).all():
            raise ValueError(f"The weight `{name}` of {path} must hold finite numbers in float32, got {weight.dtype}.")
    return options, weights


@contextlib.contextmanager
def naming_damaged_file(path: Path) -> Iterator[None]:
    """Name the file in each of the many errors that libraries raise for damaged files."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} must be a whole file of Marian, got {type(error).__name__}: {error}") from error
    except (yaml.YAMLError, zipfile.BadZipFile, zlib.error) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path} must be a whole file of Marian with {OPTIONS_NAME} in YAML: {text}") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return dict(archive)


def make_reader(path: Path) -> Callable[[str, int], np.ndarray]:
    """Return a function that returns the next numbers of a file, by their type and count."""
    content, offset = path.read_bytes(), 0

    def read(dtype: str, count: int) -> np.ndarray:
        nonlocal offset
        numbers = np.frombuffer(content, dtype, count, offset) if count else np.empty(0, dtype)
        offset += numbers.nbytes
        return numbers

    return read


def _read_bin(path: Path) -> dict[str, np.ndarray]:
    read = make_reader(path)
    version, num_items = read("<u8", 2).tolist()
    if version != _VERSION:
        raise ValueError(f"the version of the format must be {_VERSION}, got {version}")
    headers = read("<u8", 4 * num_items).reshape(-1, 4).tolist()
    names = [read("u1", name_length).tobytes().rstrip(b"\0").decode() for name_length, *_ in headers]
    shapes = [tuple(read("<u4", rank).tolist()) for _, _, rank, _ in headers]
    [padding] = read("<u8", 1).tolist()
    read("u1", padding)
    arrays = {}
    for name, shape, (_, kind, _, nbytes) in zip(names, shapes, headers, strict=True):
        data, size = read("u1", nbytes), math.prod(shape)
        if kind == _FLOAT32:
            arrays[name] = data[: 4 * size].view("<f4").reshape(shape)
            continue
        # It is unknown whether a separate head of 8 bits is stored transposed.
        if kind not in (_INT8, _INTGEMM8) or (kind == _INTGEMM8 and name.endswith("_Wt")):
            raise ValueError(f"`{name}` must be of float32 or 8 bits (intgemm8), got type {kind:#x}")
        numbers = data[:size].view("i1")
        if kind == _INTGEMM8:
            [factor] = data[size : size + 4].copy().view("<f4")
            with np.errstate(all="ignore"):
                numbers = numbers.astype(np.float32) / factor
        # All matrices of 8 bits but embeddings are stored transposed.
        is_transposed = kind == _INTGEMM8 and not name.endswith("Wemb")
        arrays[name] = numbers.reshape(shape[::-1]).T if is_transposed else numbers.reshape(shape)
    return arrays


def write_npz(path: Path, options: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
    """Write a model file for Marian in float32."""
    text = yaml.safe_dump(dict(options), sort_keys=True).encode() + b"\0"
    np.savez(path, **weights, **{OPTIONS_NAME: np.frombuffer(text, np.int8)})


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
    is_unigram = trainer.get(_MODEL_TYPE, _UNIGRAM) == _UNIGRAM
    marks_spaces = not trainer.get(_SPACE_IS_SUFFIX) and normalizer.get(_ESCAPE, 1)
    has_different_pieces = len({*names}) == len(names) and kinds.count(_UNKNOWN) == 1
    if not is_unigram or not marks_spaces or not has_different_pieces or "</s>" not in names or _PADDING in names:
        raise ValueError(
            f"it must mark spaces in front of words, and have different pieces, with </s>, one unknown and no {_PADDING}"
        )
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
    """Return the vocabulary map of a binary lexical shortlist. With a joint vocabulary, a source token also permits itself.

    Raises:
        ValueError: If the file is damaged, or belongs to other vocabularies.
    """
    num_tokens, end = tokenizers.source.pad_token_id, tokenizers.target.eos_token_id
    with naming_damaged_file(path):
        read = make_reader(path)
        magic, _, num_first, _, num_offsets, num_ids = read("<u8", 6).tolist()
        offsets, ids = read("<u8", num_offsets), read("<u4", num_ids)
        is_ascending = num_offsets == num_tokens + 1 and (offsets[1:] >= offsets[:-1]).all() and offsets[-1] <= num_ids
        if magic != _SHORTLIST_MAGIC or not is_ascending or max(num_first, ids.max(initial=0) + 1) > num_tokens:
            raise ValueError(f"it must be the shortlist of {num_tokens} tokens")
    targets = np.split(ids, offsets[1:-1].astype(np.int64))
    if tokenizers.is_joint:
        targets = [np.append(ids, np.uint32(index)) for index, ids in enumerate(targets)]
    return VocabularyMap([*{*range(num_first), end}], dict(enumerate(targets)))
