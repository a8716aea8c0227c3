"""Counts what torch allocates, exactly and on any device; resident memory depends on what the allocator kept."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Watches every tensor an operation returns: the largest, and the most bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.largest = 0  # elements
        self.alive: dict[int, int] = {}  # storage -> bytes
        self.peak = 0  # bytes

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        old = {x.untyped_storage()._cdata for x in tree_leaves((arguments, keywords)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                storage = tensor.untyped_storage()
                if storage._cdata not in old and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result
