"""The bytes of tensors that a computation holds at a time."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of live storages made by operations: `now`, and at the peak `most`."""

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self.storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return outputs

    def _count(self, storage):
        if storage._cdata in self.storages:
            return
        self.storages.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key, size):
        self.storages.discard(key)
        self.now -= size
