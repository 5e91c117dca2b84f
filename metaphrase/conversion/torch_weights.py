"""Weights that torch has saved, `pytorch_model.bin`, for conversion to safetensors."""

import contextlib
import pickle
import zipfile
from pathlib import Path

import torch
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from metaphrase.storage.weight_files import Kind, WeightFiles, weight_names

_STORED_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TorchWeights(WeightFiles):
    """The weights of a folder in torch's files, all of them in memory."""

    def __init__(self, folder: Path, names: list[str]):
        self.folder, self.paths = folder, [folder / name for name in names]
        tensors = {name: tensor for path in self.paths for name, tensor in _load_tensors(path).items()}
        self.load = tensors.__getitem__
        self.kinds = {
            name: Kind(_STORED_TYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in sorted(tensors.items())
        }


def open_weights(folder: Path, files: contextlib.ExitStack) -> WeightFiles:
    """Return the weights of a folder: those in safetensors, or those in torch's files if there are no others."""
    names = weight_names(folder, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    return TorchWeights(folder, names) if names and not weight_names(folder) else WeightFiles(folder, files)


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
