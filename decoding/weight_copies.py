"""Records of modules, which tell whether they still consist of the same parts.

Patience: weights are copied for what is run often, or at once for who wants the same to the last bit from the first run on.

Records of weights that were copied, which tell whether they are still what was copied.
"""

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
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


_has_none: ContextVar[bool] = ContextVar("has_no_patience", default=False)


class Patience:
    """How often something may still be asked for before it is copied."""

    def __init__(self, count: int):
        self._left = count

    def is_over(self) -> bool:
        """Whether it is to be copied now; each question takes from the patience."""
        self._left -= 1
        return self._left < 0 or _has_none.get()


@contextlib.contextmanager
def prepacking_immediately() -> Iterator[None]:
    """Copies are made at once meanwhile.

    A product with a copy rounds in another way, so that what is made of a text would depend on how many came before it.
    """
    token = _has_none.set(True)
    try:
        yield
    finally:
        _has_none.reset(token)


# A read takes as long as a hundred additions, and there is one for each entry.
_SAMPLED_ENTRIES = 64


class WeightRecord:
    """Where weights lie, how often they were written to, and some of their entries.

    What writes into `weight.data`, or into an array that shares its memory, leaves no trace in the counts. For that there are the
    entries, spread over rows and columns: a write of a good part of a weight is seen, one of a single row may not be.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        """Args:
        weights: Contiguous, and not made under inference mode.
        """
        self._weights = list(weights)
        self._places = self._take_places()
        # Views, which show what is there at any time, as long as the weights lie where they do.
        self._views = [weight.detach().flatten()[:: _stride(weight)] for weight in self._weights]
        self._entries = self._take_entries()

    def is_current(self) -> bool:
        """Whether nothing has been written to the weights, as far as can be seen."""
        return self._places == self._take_places() and torch.equal(self._entries, self._take_entries())

    def _take_places(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]

    def _take_entries(self) -> torch.Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


def can_record(layer: nn.Module) -> bool:
    """Whether a layer is a linear one of torch's own, and changes of its weights can be seen."""
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous():
        return False
    # A tensor that was made under inference mode has no version.
    return not any(part.is_inference() for part in layer.parameters())


def _stride(weight: torch.Tensor) -> int:
    """A step through all entries that meets other columns in each row: it has no divisor in common with the length of a row."""
    longest = max(1, weight.numel() // _SAMPLED_ENTRIES)
    return next(stride for stride in range(longest, 0, -1) if math.gcd(stride, weight.shape[-1]) == 1)


class PreparedCopies:
    """Prepared forms of modules' weights, one per owner, made again when a module or a weight has changed.

    The owner's death frees them. They are not stored in the owner, which is copied and saved.
    """

    def __init__(self, prepare: Callable[[nn.Module], Any]):
        """Args:
        prepare: Makes the prepared form of a module, which has `is_current(module) -> bool`.
        """
        self._prepare = prepare
        self._by_owner: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def __contains__(self, owner: nn.Module) -> bool:
        return owner in self._by_owner

    def get(self, owner: nn.Module, module: nn.Module) -> Any:
        """Return the prepared form of a module as its weights are now."""
        ready = self._by_owner.get(owner)
        if ready is None or not ready.is_current(module):
            ready = self._by_owner[owner] = self._prepare(module)
        return ready

    def forget(self, owner: nn.Module) -> None:
        """Free the prepared form."""
        self._by_owner.pop(owner, None)
