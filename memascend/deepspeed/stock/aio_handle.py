"""DeepSpeed's `aio_handle` interface over our store, for DeepSpeed's own swappers.

A path is a key: no file is opened. The store compares every transfer with its request, so wait()
either returns the count that DeepSpeed expects or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch

from memascend.base.interfaces import HostMemory, TensorIO
from memascend.transfer.pending import Pending


class AioHandle:
    """One per swapper direction, as in DeepSpeed; many handles share one store."""

    def __init__(self, *, store: TensorIO, memory: HostMemory, component: str) -> None:
        self._store = store
        self._memory = memory
        self._component = component
        self._transfers: Pending[torch.Tensor] = Pending()  # the buffers

    # -- transfers -------------------------------------------------------------------------------

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start reading a key into `buffer` from byte `file_offset` of the key; return 0."""
        ticket = self._store.read(key=filename, target=buffer, offset_bytes=file_offset)
        self._transfers.add(ticket, buffer)
        return 0

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start writing `buffer`: as a whole key, or into the key at `file_offset`; return 0."""
        offset = file_offset if file_offset > 0 else None
        ticket = self._store.write(key=filename, source=buffer, offset_bytes=offset)
        self._transfers.add(ticket, buffer)
        return 0

    def wait(self) -> int:
        """Wait for every transfer of this handle; return how many there were.

        Raises:
            StoreError: The first transfer that failed; all others have been waited for too.
        """
        count = len(self._transfers)
        self._transfers.wait()
        return count

    # -- memory ----------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a 1-D host tensor of the exact size; its memory is freed with its last view."""
        return self._memory.tensor(num_elem, example_tensor.dtype, component=self._component)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free nothing: memory is freed with its last view. Return whether it is ours."""
        return self._memory.contains(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether DeepSpeed may pass the tensor to a transfer without copying it first."""
        return self._memory.contains(tensor)


_serving: ContextVar[Callable[..., AioHandle] | None] = ContextVar("memascend_aio", default=None)


@contextmanager
def serving(*, store: TensorIO, memory: HostMemory, component: str) -> Iterator[None]:
    """Within the context, AsyncIOBuilder() of DeepSpeed's swapper modules gives our handles."""

    def make_handle(**_settings: Any) -> AioHandle:  # the store has its own settings
        return AioHandle(store=store, memory=memory, component=component)

    token = _serving.set(make_handle)
    try:
        yield
    finally:
        _serving.reset(token)


def wrap_builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the name AsyncIOBuilder in DeepSpeed's swapper modules."""

    def build(*arguments: Any, **keywords: Any) -> Any:
        make_handle = _serving.get()
        if make_handle is None:
            return original(*arguments, **keywords)
        extension = SimpleNamespace(aio_handle=make_handle)
        return SimpleNamespace(load=lambda verbose=True: extension)

    return build
