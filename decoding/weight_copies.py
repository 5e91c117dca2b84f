"""Copies of weights, and records of modules and weights that show when the copies are out of date."""

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Reading an entry takes as long as a hundred additions, and each record reads so many entries of a weight.
_SAMPLED_ENTRIES = 64


class ModuleRecord:
    """The submodules and parameters of some modules.

    The record shows replaced submodules and parameters, as by adapters or quantization. It does not show what is written into
    a parameter; see `WeightRecord`.
    """

    def __init__(self, *roots: nn.Module):
        self._roots, self._modules = roots, walk(*roots)
        self._objects = self._list_objects()

    def is_current(self, *roots: nn.Module) -> bool:
        """Return True if the roots, and all modules and parameters in them, are the same objects of the same classes."""
        return _are_same(roots, self._roots) and _are_same(self._list_objects(), self._objects)

    def _list_objects(self) -> list[Any]:
        objects: list[Any] = []
        for module in self._modules:
            # A parametrization changes the class of a module.
            objects.append(type(module))
            # Reading the dictionaries is many times faster than looking up each name.
            objects += module._modules.values()
            objects += module._parameters.values()
        return objects


def _are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


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


class WeightRecord:
    """The addresses and versions of weights, and a sample of their entries.

    Writing into `weight.data`, or into an array that shares the memory, does not change the version. The sample shows such a
    write if it changes a good share of a weight; a write of a single row may stay unseen.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        """Args:
        weights: Contiguous tensors that were not made in inference mode.
        """
        self._weights = list(weights)
        self._versions = self._read_versions()
        # Views show the current entries as long as the addresses are the same.
        self._views = [weight.detach().flatten()[:: _stride(weight)] for weight in self._weights]
        self._entries = self._read_entries()

    def is_current(self) -> bool:
        """Return True if no write to the weights can be seen."""
        return self._versions == self._read_versions() and torch.equal(self._entries, self._read_entries())

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]

    def _read_entries(self) -> torch.Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


def can_record(layer: nn.Module) -> bool:
    """Return True if a layer is an `nn.Linear` whose changes a `WeightRecord` can show."""
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous():
        return False
    # A tensor that was made in inference mode has no version.
    return not any(parameter.is_inference() for parameter in layer.parameters())


def _stride(weight: torch.Tensor) -> int:
    """Return a stride that meets different columns in each row: it has no common divisor with the row length."""
    longest = max(1, weight.numel() // _SAMPLED_ENTRIES)
    return next(stride for stride in range(longest, 0, -1) if math.gcd(stride, weight.shape[-1]) == 1)


class PreparedCopies:
    """Prepared copies of modules' weights, one per owner, made again when a module or a weight has changed.

    The copies live as long as the owner. They are not stored in the owner, which may be copied or saved.
    """

    def __init__(self, prepare: Callable[[nn.Module], Any]):
        """Args:
        prepare: Makes the copies for a module; they have a method `is_current(module) -> bool`.
        """
        self._prepare = prepare
        self._by_owner: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def __contains__(self, owner: nn.Module) -> bool:
        return owner in self._by_owner

    def get(self, owner: nn.Module, module: nn.Module) -> Any:
        """Return the copies of a module's current weights."""
        prepared = self._by_owner.get(owner)
        if prepared is not None and not prepared.is_current(module):
            # The memory of the old copies is free before new copies are made.
            prepared = None
            self.forget(owner)
        if prepared is None:
            prepared = self._by_owner[owner] = self._prepare(module)
        return prepared

    def forget(self, owner: nn.Module) -> None:
        """Free the copies of an owner."""
        self._by_owner.pop(owner, None)
