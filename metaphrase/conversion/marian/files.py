"""Marian's files: weights in `.npz` or `.bin` with the options of their network, and lexical shortlists.

Numbers in these files are sizes of what follows. Each is checked against the file before anything is read.
"""

import io
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers.utils import CONFIG_NAME

OPTIONS_NAME = "special:model.yml"
_SUFFIXES = (".npz", ".bin")
_VERSION = 1
# Marian's number of a type is a class and a width in bytes.
_FLOAT32, _INT8, _INTGEMM8 = 0x404, 0x101, 0x4101
_SHORTLIST_MAGIC = 0xF11A48D5013417F5


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
    arrays = _read_npz(path) if path.suffix == ".npz" else _read_bin(path)
    if OPTIONS_NAME not in arrays:
        raise ValueError(f"{path} must hold {OPTIONS_NAME}, got {len(arrays)} arrays without.")
    try:
        options = yaml.safe_load(arrays.pop(OPTIONS_NAME).tobytes().rstrip(b"\0").decode())
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{OPTIONS_NAME} in {path} must be YAML: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{OPTIONS_NAME} in {path} must hold options with values, got {type(options).__name__}.")
    weights = {name: array for name, array in arrays.items() if not name.endswith("_QuantMultA")}
    for name, weight in weights.items():
        if weight.dtype != np.float32 or not np.isfinite(weight).all():
            raise ValueError(f"The weight `{name}` of {path} must hold finite numbers in float32, got {weight.dtype}.")
    return options, weights


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    try:
        # From a file, the library would allocate what a damaged directory says.
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"it must be uncompressed, got {member.filename} compressed")
                content = archive.read(member)
                stream = io.BytesIO(content)
                np.lib.format.read_magic(stream)
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
                if is_fortran or dtype not in (np.float32, np.int8):
                    raise ValueError(f"{member.filename} must be of float32 or int8, got {dtype}")
                array = np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
                arrays[member.filename.removesuffix(".npy")] = array
    # zipfile has many errors for damaged files. NotImplementedError is a RuntimeError.
    except (ValueError, zipfile.BadZipFile, EOFError, OSError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path} must be a whole file of Marian: {error}.") from error
    return arrays


class _Reader:
    """Numbers of a binary file, one after the other."""

    def __init__(self, path: Path):
        self.path, self.content, self.offset = path, path.read_bytes(), 0

    def read(self, dtype: str, count: int) -> np.ndarray:
        """Return the next `count` numbers."""
        nbytes = count * np.dtype(dtype).itemsize
        if not 0 <= nbytes <= len(self.content) - self.offset:
            raise ValueError(
                f"{self.path} must be a whole file of Marian, got {len(self.content)} bytes, of which {nbytes} from byte "
                f"{self.offset} are needed."
            )
        self.offset += nbytes
        return np.frombuffer(self.content, dtype, count, self.offset - nbytes) if count else np.empty(0, dtype)


def _read_bin(path: Path) -> dict[str, np.ndarray]:
    reader = _Reader(path)
    version, num_items = reader.read("<u8", 2).tolist()
    if version != _VERSION:
        raise ValueError(f"{path} must have version {_VERSION} of Marian's binary files, got {version}.")
    headers = reader.read("<u8", 4 * num_items).reshape(-1, 4).tolist()
    names = [
        reader.read("u1", name_length).tobytes().rstrip(b"\0").decode(errors="replace") for name_length, *_ in headers
    ]
    shapes = [tuple(reader.read("<i4", rank).tolist()) for _, _, rank, _ in headers]
    [padding] = reader.read("<u8", 1).tolist()
    reader.read("u1", padding)
    arrays = {}
    for name, shape, (_, kind, _, nbytes) in zip(names, shapes, headers, strict=True):
        data, size = reader.read("u1", nbytes), math.prod(shape)
        itemsize, extra = {_FLOAT32: (4, 0), _INT8: (1, 0), _INTGEMM8: (1, 4)}.get(kind, (0, 0))
        # It is unknown whether a separate head of 8 bits is stored transposed.
        if not itemsize or (kind == _INTGEMM8 and name.endswith("_Wt")):
            raise ValueError(f"`{name}` of {path} must be of float32 or 8 bits (intgemm8), got type {kind:#x}.")
        if min(shape, default=1) < 1 or size * itemsize + extra > nbytes:
            raise ValueError(f"`{name}` of {path} must fit into {nbytes} bytes, got the shape {shape}.")
        if kind == _FLOAT32:
            arrays[name] = data[: 4 * size].view("<f4").reshape(shape)
            continue
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


def read_shortlist(path: Path, num_tokens: int) -> tuple[int, list[np.ndarray]]:
    """Return the number of first target tokens that all sources permit, and the target ids that each source token permits.

    Args:
        path: A binary lexical shortlist.
        num_tokens: Size of both vocabularies.

    Raises:
        ValueError: If the file is damaged, or belongs to other vocabularies.
    """
    reader = _Reader(path)
    magic, _, num_first, _, num_offsets, num_ids = reader.read("<u8", 6).tolist()
    if magic != _SHORTLIST_MAGIC:
        raise ValueError(f"{path} must be a binary lexical shortlist of Marian, got another file.")
    offsets = reader.read("<u8", num_offsets)
    ids = reader.read("<u4", num_ids)
    is_ascending = num_offsets == num_tokens + 1 and (offsets[1:] >= offsets[:-1]).all() and offsets[-1] <= num_ids
    if not is_ascending or num_first > num_tokens or ids.max(initial=0) >= num_tokens:
        raise ValueError(f"{path} must be the shortlist of {num_tokens} tokens, got {max(num_offsets - 1, 0)} tokens.")
    return num_first, np.split(ids, offsets[1:-1].astype(np.int64)) if num_tokens > 1 else [ids]
