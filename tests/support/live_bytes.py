"""Peak bytes of the tensors that are alive, counted operation by operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside it make, while they live.

    Attributes
    ----------
    now_bytes, peak_bytes : int
        Of storages made inside; those that existed before are not counted.
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        # Held alive, so that their addresses are not given to new storages.
        self._existing = [tensor.untyped_storage() for tensor in existing]
        self._known = {storage.data_ptr() for storage in self._existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known:
            return
        self._known.add(address)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now_bytes -= size
