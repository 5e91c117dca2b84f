"""Records of modules, which tell whether they still consist of the same parts."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn


class ModuleRecord:
    """Which modules and parameters some modules consist of.

    What is put in the place of a part is seen, as adapters, quantization and a caller's hand do it; not what is written into
    a parameter, for which there is `WeightRecord`.
    """

    def __init__(self, *roots: nn.Module):
        self._roots, self._modules = roots, walk(*roots)
        self._parts = self._take_parts()

    def is_current(self, *roots: nn.Module) -> bool:
        """Whether it is of these modules, and all their parts are the same objects, of the same classes."""
        return _are_same(roots, self._roots) and _are_same(self._take_parts(), self._parts)

    def _take_parts(self) -> list[Any]:
        parts: list[Any] = []
        for module in self._modules:
            # A parametrization gives the same module another class.
            parts.append(type(module))
            # As they are kept: to look each of them up by its name takes many times as long.
            parts += module._modules.values()
            parts += module._parameters.values()
        return parts


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def walk(*modules: nn.Module) -> list[nn.Module]:
    """Some modules and all that are inside them, a shared one for each of its places.

    That is `modules()` of each, without the names, which make it several times slower.
    """
    found = list(modules)
    for module in found:
        # The loop goes on with what is appended.
        if module._modules:
            found += [part for part in module._modules.values() if part is not None]
    return found
