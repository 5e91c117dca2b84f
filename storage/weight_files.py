"""Weight files: the tensors of a folder in safetensors, read one at a time, and written in files of bounded size.

Nothing here unpickles anything.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

ADAPTER_NAME = "adapter_config.json"
_MOST_NAMED = 5
_CARD = "README.md"


class Kind(NamedTuple):
    """Type and shape of a stored tensor, written as ('F32', (2, 3))."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return str(tuple(self))

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits.group()) // 8 if bits else 1)


def weight_names(folder: Path) -> list[str]:
    """Names of the files that transformers loads the weights of a folder from; none where it holds none in safetensors.

    Raises:
        ValueError: If an index is damaged.
    """
    # Where both are, transformers loads the single file.
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    return indexed_names(index) if index.is_file() else []


def indexed_names(index: Path) -> list[str]:
    """Names of the files that an index of weights speaks of, whether they are there or not.

    Raises:
        ValueError: If it is damaged, or names files of another folder.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        far = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} must be an index of weights, with a `weight_map`, and is damaged.") from error
    if far:
        raise ValueError(f"{index} must name files beside it, got {far[0]!r}.")
    return names


def listed(names: Sequence[str]) -> str:
    """Names of weights for a message, of many the first ones."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


class WeightFiles:
    """The weights of a folder, which are read one at a time.

    Args:
        folder: Holds `model.safetensors`, or an index and the files that it names.
        files: Closes the files at its end.

    Attributes:
        paths: The files.
        kinds: Type and shape of each tensor, by name in alphabetical order.

    Raises:
        ValueError: If the folder does not exist or holds no whole weights in safetensors.
    """

    def __init__(self, folder: Path, files: contextlib.ExitStack):
        self.folder = folder
        if not folder.is_dir():
            raise ValueError(f"A checkpoint must be a folder that exists, got {folder}.")
        if (folder / ADAPTER_NAME).is_file():
            raise ValueError(f"A checkpoint must hold whole weights, got an adapter in {folder}: merge it first.")
        self.paths = self._find()
        try:
            opened = [files.enter_context(safe_open(path, framework="pt")) for path in self.paths]
        except SafetensorError as error:
            raise ValueError(f"A checkpoint must hold whole weights, got {folder}: {error}.") from error
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        self.kinds = {name: self._kind(name) for name in sorted(self._file_of)}

    def _find(self) -> list[Path]:
        names, index = weight_names(self.folder), self.folder / SAFE_WEIGHTS_INDEX_NAME
        if not names:
            raise ValueError(
                f"A checkpoint must hold {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, got neither in {self.folder}. "
                f"A pickle, as {WEIGHTS_NAME} is, is never opened here: load it with transformers and call `save_pretrained`."
            )
        for name in names:
            if not (self.folder / name).is_file():
                raise ValueError(f"{index} must name files beside it, got {name!r}.")
        return [self.folder / name for name in names]

    def _kind(self, name: str) -> Kind:
        tensor = self._file_of[name].get_slice(name)
        return Kind(tensor.get_dtype(), tuple(tensor.get_shape()))

    def read(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)


class Planned(NamedTuple):
    """A tensor to write: its size, and how it is had when its turn comes."""

    nbytes: int
    make: Callable[[], torch.Tensor]


def split_into_shards(planned: Mapping[str, Planned], max_shard_bytes: int) -> list[dict[str, Planned]]:
    """Puts tensors, in their order, into as few files as hold at most so many bytes each, but for one larger by itself."""
    shards: list[dict[str, Planned]] = [{}]
    filled = 0
    for name, tensor in planned.items():
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def write_weights(folder: Path, planned: Mapping[str, Planned], max_shard_bytes: int) -> None:
    """Writes tensors as `model.safetensors`, or as several files and an index, one file's tensors in memory at a time.

    Args:
        folder: Where to write.
        planned: The tensors by name, in the order in which they are written.
        max_shard_bytes: Most bytes of one file, but for a tensor that is larger by itself.
    """
    shards = split_into_shards(planned, max_shard_bytes)
    stem, suffix = SAFE_WEIGHTS_NAME.split(".")
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" if len(shards) > 1 else SAFE_WEIGHTS_NAME
        tensors: dict[str, torch.Tensor] = {}
        places = set()
        for name, tensor in shard.items():
            made = tensor.make().contiguous()
            # One weight under two names is two weights in the file.
            tensors[name] = made.clone() if made.data_ptr() in places else made
            places.add(made.data_ptr())
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / file} could not be written: {error}") from error
        # Before the next file's tensors are there.
        del tensors, made
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in planned.values())},
            "weight_map": weight_map,
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_output(output: Path, sources: Sequence[Path], overwrite: bool, mark: str, done: str) -> None:
    """Refuses to write over what was not written here.

    Args:
        output: The folder to write.
        sources: The folders that are read.
        overwrite: Whether it may be there.
        mark: Name of the file by which it is known as written here.
        done: What is done to the sources, such as averaged.

    Raises:
        ValueError: If `output` cannot be had.
    """
    place = output.resolve()
    for source in sources:
        inside = source.resolve()
        if place.is_relative_to(inside) or inside.is_relative_to(place):
            raise ValueError(f"`output` must lie apart from what is {done}, got {output} and {source}.")
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"`output` must not exist, got {output}. Pass --overwrite to replace it.")
    if not (output / mark).is_file():
        raise ValueError(f"`output` must hold {mark} to be overwritten, got {output}, which was not {done} here.")


@contextlib.contextmanager
def folder_in_one_step(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name, and its place, when the block ends well, and is gone if it does not.

    A README.md of the folder whose place it takes, which may be of somebody's own hand, moves into it.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    replaced = output.with_name(f".{output.name}.{os.getpid()}.replaced")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if (output / _CARD).is_file() and not (partial / _CARD).exists():
            shutil.copy2(output / _CARD, partial)
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists():
            replaced.rename(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a file of a checkpoint.

    Raises:
        ValueError: If it is not there, or holds something else.
    """
    if not path.is_file():
        raise ValueError(f"A checkpoint must hold {path.name}, got none in {path.parent}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be readable as JSON, got an error: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold fields with values, got {type(content).__name__}.")
    return content
