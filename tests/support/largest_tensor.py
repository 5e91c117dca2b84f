"""The size of the largest tensor that a computation allocates."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """A context that records the largest number of elements of a new tensor."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.elements = max(self.elements, result.numel())
        return result
