"""Copies of weights, which are made again when a module or a weight has changed."""

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Reading an entry takes as long as a hundred additions, and each record reads so many entries of a weight.
_SAMPLED_ENTRIES = 64


class PreparedCopies:
    """Prepared copies of modules' weights, one per owner.

    The copies live as long as the owner. They are not stored in the owner, which may be copied or saved.
    """

    def __init__(self, prepare: Callable[[nn.Module], tuple[Any, Sequence[torch.Tensor]]]):
        """Args:
        prepare: Makes the copies for a module. Returns them, and the weights on which they depend; see `WeightRecord`.
        """
        _all_copies.append(self)
        self._prepare = prepare
        self._by_owner: weakref.WeakKeyDictionary[nn.Module, tuple[Any, WeightRecord]] = weakref.WeakKeyDictionary()

    def get(self, owner: nn.Module, module: nn.Module) -> Any:
        """Return the copies of a module's current weights."""
        copies, record = self._by_owner.get(owner, (None, None))
        if record is None or not record.is_current(module):
            # The memory of the old copies is free before new copies are made.
            copies = record = None
            self._by_owner.pop(owner, None)
            copies, weights = self._prepare(module)
            self._by_owner[owner] = copies, WeightRecord(module, weights)
        return copies


_all_copies: list[PreparedCopies] = []


def free_copies(owner: nn.Module) -> None:
    """Free all copies of an owner's weights: training needs the memory and will change the weights."""
    for copies in _all_copies:
        copies._by_owner.pop(owner, None)


class WeightRecord:
    """The submodules and parameters of a module, and the addresses, versions and a sample of the entries of some weights.

    The record shows replaced submodules and parameters, as by adapters or quantization. Writing into `weight.data`, or into an
    array that shares the memory, does not change the version of a weight. The sample shows such a write if it changes a good
    share of the weight; a write of a single row may stay unseen.
    """

    def __init__(self, module: nn.Module, weights: Sequence[torch.Tensor]):
        """Args:
        module: The module.
        weights: Weights for which what is written into them counts, of layers for which `can_record` is true.
        """
        self._module, self._modules, self._weights = module, walk(module), weights
        # Views show the current entries as long as the addresses are the same.
        self._views = [weight.detach().flatten()[:: _stride(weight)] for weight in weights]
        self._objects, self._versions, self._entries = self._list_objects(), self._read_versions(), self._read_entries()

    def is_current(self, module: nn.Module) -> bool:
        """Return True if this is the module, all objects in it are the same, and no write to the weights can be seen."""
        objects = self._list_objects()
        return (
            module is self._module
            and len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and self._versions == self._read_versions()
            and torch.equal(self._entries, self._read_entries())
        )

    def _list_objects(self) -> list[Any]:
        objects: list[Any] = []
        for module in self._modules:
            # A parametrization changes the class of a module.
            objects.append(type(module))
            # Reading the dictionaries is many times faster than looking up each name.
            objects += module._modules.values()
            objects += module._parameters.values()
        return objects

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]

    def _read_entries(self) -> torch.Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


def _stride(weight: torch.Tensor) -> int:
    """Return a stride that meets different columns in each row: it has no common divisor with the row length."""
    longest = max(1, weight.numel() // _SAMPLED_ENTRIES)
    return next(stride for stride in range(longest, 0, -1) if math.gcd(stride, weight.shape[-1]) == 1)


def walk(*modules: nn.Module) -> list[nn.Module]:
    """Return modules and all their submodules. A shared submodule comes once per place.

    `nn.Module.modules()` makes names as well, which takes several times as long.
    """
    reached = list(modules)
    for module in reached:
        # The loop also visits modules that it appends.
        if module._modules:
            reached += [child for child in module._modules.values() if child is not None]
    return reached


def can_record(layer: nn.Module) -> bool:
    """Return True if a layer is an `nn.Linear` whose changes a `WeightRecord` can show."""
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous():
        return False
    # A tensor that was made in inference mode has no version.
    return not any(parameter.is_inference() for parameter in layer.parameters())
