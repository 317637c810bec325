"""Puts the host buffers that DeepSpeed creates itself into our arenas, at their exact size.

DeepSpeed calls `pin_memory(torch.zeros(n, device="cpu"))`: a pageable tensor and a pinned copy
rounded up to a power of two, both alive at once. Inside HostBuffers the factory call itself returns
arena memory, which is already page-locked, so the pin_memory call after it does nothing.

On the CPU accelerator "device" tensors are CPU tensors too. DeepSpeed names host memory by its own
OffloadDeviceEnum (or by no device at all) and device memory by the accelerator's name, so the type
of the argument distinguishes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch.overrides import TorchFunctionMode

from memascend.base.interfaces import HostMemory

# Tensors up to this size share a chunk; a page for each would waste memory.
SHARED_BYTES_MAX = 64 << 10
CHUNK_BYTES = 1 << 20
_CACHE_LINE_BYTES = 64


class HostBuffers(TorchFunctionMode):
    """While entered, torch.zeros and torch.empty for the host allocate from a HostMemory.

    Calling it enters the mode and charges allocations to a component of the ledger:
    `with host_buffers("gradients"): ...`. Calls nest; with None allocations are torch's own.
    """

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory
        self._component: str | None = None
        self._chunk: torch.Tensor | None = None
        self._chunk_used_bytes = 0

    @contextmanager
    def __call__(self, component: str | None) -> Iterator[None]:
        """Enter the mode; allocations inside are charged to `component`."""
        outer, self._component = self._component, component
        try:
            with self:
                yield
        finally:
            self._component = outer

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        component = self._component
        is_factory = function in (torch.zeros, torch.empty)
        if component is not None and is_factory and self._is_host(keywords):
            numel = _numel(arguments)
            dtype = keywords.get("dtype") or torch.get_default_dtype()
            if numel > 0:
                return self._allocate(numel, dtype, component, zero=function is torch.zeros)
        return function(*arguments, **keywords)

    @staticmethod
    def _is_host(keywords: dict[str, Any]) -> bool:
        device = keywords.get("device")
        known = {"dtype", "device", "requires_grad"}
        on_host = device is None or device is OffloadDeviceEnum.cpu
        return on_host and known.issuperset(keywords) and not keywords.get("requires_grad", False)

    def _allocate(
        self, numel: int, dtype: torch.dtype, component: str, *, zero: bool
    ) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes > SHARED_BYTES_MAX:
            return self._memory.tensor(numel, dtype, component=component, zero=zero)
        offset = math.ceil(self._chunk_used_bytes / _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if self._chunk is None or offset + nbytes > CHUNK_BYTES:
            self._chunk = self._memory.tensor(
                CHUNK_BYTES, torch.uint8, component=component, zero=True
            )
            offset = 0
        self._chunk_used_bytes = offset + nbytes
        # A separate storage: torch.save writes whole storages, and refuses one of several dtypes.
        piece = torch.frombuffer(self._chunk[offset : offset + nbytes].numpy(), dtype=dtype)
        return piece.zero_() if zero else piece


class AbsentBuffers(TorchFunctionMode):
    """While entered, a factory function returns host tensors of given sizes without memory.

    For buffers that DeepSpeed allocates and that are never used: one element is expanded to the
    size, and pin_memory returns it unchanged. The size alone identifies a buffer, so enter the mode
    only where DeepSpeed allocates no other buffer of that size. Our own buffers are not affected,
    since only DeepSpeed names host memory by its OffloadDeviceEnum.
    """

    def __init__(self, factory: Any, numels: set[int]) -> None:
        super().__init__()
        self._factory = factory
        self._numels = numels

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        if function is torch.Tensor.pin_memory and arguments[0].stride() == (0,):
            return arguments[0]
        numel = _numel(arguments)
        is_deepspeeds = keywords.get("device") is OffloadDeviceEnum.cpu
        if function is self._factory and is_deepspeeds and numel in self._numels and numel > 0:
            return function(1, **keywords).expand(numel)
        return function(*arguments, **keywords)


def _numel(arguments: tuple[Any, ...]) -> int:
    """Return the size if it is one positional integer, as DeepSpeed passes it; else 0."""
    if len(arguments) == 1 and isinstance(arguments[0], int):
        return arguments[0]
    return 0
