"""What the drive has to do with the device: which host memory it uses, and who waits for it.

A transfer of the drive is no work of a stream. So the device is told of each as it begins: copies
of the same bytes have to have passed by then, as far as the host knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.device.emulator import torch_device

#: Why, where, how often, and how long in milliseconds.
Wait = tuple[str, str, float, float]


def tell_of_transfers(patch: pytest.MonkeyPatch) -> None:
    """Have the device compare every read and write of memascend's store with its pending copies."""
    from memascend import _core
    from memascend.nvme.resident import ResidentStore

    for owner in (_core.Store, ResidentStore):
        for name in ("read", "write"):
            _tell(patch, owner, name)


def _tell(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    original = getattr(owner, name)

    def transfer(self: Any, **keywords: Any) -> Any:
        tensor = keywords.get("target", keywords.get("source"))
        address, nbytes = (
            (keywords["address"], keywords["nbytes"])
            if tensor is None
            else (tensor.data_ptr(), tensor.nbytes)
        )
        nbytes = max(nbytes, keywords.get("capacity", keywords.get("capacity_bytes", 0)))
        what = f"a {name} of the drive at {torch_device.core.site()}"
        torch_device.core.use_on_host(address, nbytes, name == "read", what)
        if tensor is not None:
            _tell_of_resident(self, name, tensor.nbytes, keywords, what)
        return original(self, **keywords)

    patch.setattr(owner, name, transfer)


def _tell_of_resident(
    store: Any, name: str, nbytes: int, keywords: dict[str, Any], what: str
) -> None:
    """Tell of the store's own memory, which copies to the device may be out of."""
    entry = store._entries.get(keywords["key"])
    if entry is not None:
        begin = keywords.get("offset_bytes") or 0
        count = entry.count_in_head(keywords["key"], begin, nbytes)
        address = entry.head.data_ptr() + begin
        torch_device.core.use_on_host(address, count, name == "write", what)


def time_waits(patch: pytest.MonkeyPatch) -> Callable[[], list[Wait]]:
    """Time what waits for a ticket; return what tells it."""
    from memascend import _core

    found: dict[str, tuple[int, float]] = {}
    original = _core.Ticket.wait

    def wait(self: _core.Ticket) -> None:
        start = time.monotonic()
        try:
            original(self)
        finally:
            place = torch_device.core.site()
            count, milliseconds = found.get(place, (0, 0.0))
            found[place] = count + 1, milliseconds + (time.monotonic() - start) * 1e3

    patch.setattr(_core.Ticket, "wait", wait)
    return lambda: [("drive", place, *counted) for place, counted in found.items()]
