"""Weights in safetensors, read one tensor at a time and written in files of bounded size. Conversion also reads torch's files."""

import contextlib
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from metaphrase.storage.folders import read_fields, write_json

ADAPTER_NAME = "adapter_config.json"
_MAX_NAMES_IN_MESSAGE = 5
# Files of torch are pickles.
_HINT = f"`metaphrase convert` reads {WEIGHTS_NAME}, too, and writes safetensors."
_STORED_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


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


def weight_names(folder: Path, single: str = SAFE_WEIGHTS_NAME, index: str = SAFE_WEIGHTS_INDEX_NAME) -> list[str]:
    """Return the names of the weight files that transformers loads: the single file, or those that an index lists."""
    if (folder / single).is_file():
        return [single]
    path = folder / index
    if not path.is_file():
        return []
    weight_map = (read_fields(path) or {}).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    # transformers would open a pickle, or a file of another folder.
    suffix = Path(single).suffix
    if not names or any(Path(name).name != name or Path(name).suffix != suffix for name in names):
        raise ValueError(f"{path} must name {suffix} files beside it, got {listed(names) or 'none'}.")
    return names


def listed(names: Sequence[str]) -> str:
    """Join names of weights for a message; many names are cut to the first few."""
    more = len(names) - _MAX_NAMES_IN_MESSAGE
    return ", ".join(names[:_MAX_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")


def is_finite(weight: torch.Tensor) -> bool:
    """Return True if a tensor holds neither NaN nor infinity, as far as it lies here and in a type of 16 bits or more."""
    weight = weight.detach()
    # With sharded weights, each process has its share. Types of 8 bits, which are quantized, have no extremes.
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    if weight.is_meta or not weight.numel() or not weight.is_floating_point() or weight.itemsize < 2:
        return True
    # 15 ms for 242 MB in float32 on one core, where `isfinite().all()` takes over 300. Measured on a Zen 4 with torch 2.13.
    return all(map(math.isfinite, torch.aminmax(weight)))


def check_finite(weight: torch.Tensor, name: str, folder: str | os.PathLike) -> None:
    """Raise a `ValueError` for a weight that is not finite."""
    if not is_finite(weight):
        raise ValueError(
            f"The weight `{name}` of {os.fspath(folder)} must hold finite numbers, got NaN or infinity. "
            "Take an earlier checkpoint."
        )


class WeightFiles:
    """The weights of a folder, read one tensor at a time.

    Args:
        folder: Holds `model.safetensors`, or an index and the files in it.
        files: Closes the files on exit.
        reads_torch: True to read `pytorch_model.bin`, or an index and the files in it, if there are no safetensors.

    Attributes:
        paths: The files.
        kinds: Type and shape of each tensor, in alphabetical order of the names.
    """

    def __init__(self, folder: Path, files: contextlib.ExitStack, *, reads_torch: bool = False):
        self.folder = folder
        if not folder.is_dir():
            raise ValueError(f"A checkpoint must be a folder that exists, got {folder}.")
        if (folder / ADAPTER_NAME).is_file():
            raise ValueError(f"A checkpoint must hold whole weights, got an adapter in {folder}: merge it first.")
        names = weight_names(folder)
        torch_names = [] if names or not reads_torch else weight_names(folder, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
        self.paths = [folder / name for name in names or torch_names]
        if not self.paths:
            raise ValueError(
                f"A checkpoint must hold {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, got neither in {folder}. {_HINT}"
            )
        if torch_names:
            tensors = {name: tensor for path in self.paths for name, tensor in _load_tensors(path).items()}
            self._read = tensors.__getitem__
            self.kinds = {
                name: Kind(_STORED_TYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
                for name, tensor in sorted(tensors.items())
            }
            return
        try:
            opened = [files.enter_context(safe_open(path, framework="pt")) for path in self.paths]
        except SafetensorError as error:
            raise ValueError(f"A checkpoint must hold whole weights, got {folder}: {error}.") from error
        file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        self._read = lambda name: file_of[name].get_tensor(name)
        slices = {name: file_of[name].get_slice(name) for name in sorted(file_of)}
        self.kinds = {name: Kind(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        weight = self._read(name)
        check_finite(weight, name, self.folder)
        return weight


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a file that torch has saved. A file with anything else is refused, and runs no code."""
    try:
        # Only files of torch 1.6 and later can be mapped.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} must be a whole file of tensors alone, since other content could run code."
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError(f"{path} must hold tensors by their names, got {type(tensors).__name__}.")
    return tensors


class PlannedTensor(NamedTuple):
    """A tensor to write: its size, and the function that makes it."""

    nbytes: int
    make: Callable[[], torch.Tensor]


def write_weights(folder: Path, planned: Mapping[str, PlannedTensor], max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or several files and an index. Only one file's tensors are in memory at a time.

    Only a single tensor may exceed the limit of one file.
    """
    split = split_state_dict_into_shards_factory(
        dict(planned),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".", "{suffix}."),
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors: dict[str, torch.Tensor] = {}
        addresses = set()
        for name in names:
            tensor = planned[name].make().contiguous()
            # safetensors refuses two names for one storage.
            tensors[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
            addresses.add(tensor.data_ptr())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors, tensor
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
