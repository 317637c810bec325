"""Counts what autograd saves, and the most that is alive at once, in bytes of storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


def saved_bytes(forward: Callable[[], Any], *, without: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages that autograd saves in a call, each once.

    Args:
        forward: What is called.
        without: Tensors whose storages do not count.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    kept = []  # while it is alive no other storage gets its address
    nbytes = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal nbytes
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(tensor.detach())
            nbytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return nbytes


class LiveBytes(TorchDispatchMode):
    """Storages that operators make while this is active, and the most of them at once.

    Gradients of weights are told by their size, and do not count.
    """

    def __init__(self, *, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._ignored = {tensor.nbytes for tensor in weights}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._alive and nbytes not in self._ignored:
            self._alive[key] = nbytes
            self.now += nbytes
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)
