"""A store, a pool and events whose moments a test chooses, for what stages parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch

from memascend.errors import StoreError

PAGE_BYTES = 4096


class FakeTicket:
    """A transfer that ends when it is waited for, or earlier with finish()."""

    def __init__(self, store: FakeStore, kind: str, key: str, tensor: torch.Tensor) -> None:
        self._store = store
        self.kind, self.key, self.tensor = kind, key, tensor
        self.finished = False
        self.hold: object | None = None

    def wait(self) -> None:
        self.finish()
        if (self.kind, self.key) in self._store.failing:
            raise StoreError(5, f"{self.kind} of {self.key} failed")

    def done(self) -> bool:
        return self.finished

    def finish(self) -> None:
        """Moves the bytes as they are now: a slot reused too early is seen by its contents."""
        if self.finished:
            return
        self.finished = True
        self.hold = None
        failed = (self.kind, self.key) in self._store.failing
        if self.kind == "read":
            content = self._store.content[self.key]
            self.tensor.copy_(torch.full_like(self.tensor, -1) if failed else content)
        elif not failed:
            self._store.content[self.key] = self.tensor.clone()


class FakeStore:
    """Tensors in a dict. Transfers on one key keep their order, as in the real store."""

    def __init__(self) -> None:
        self.content: dict[str, torch.Tensor] = {}
        self.failing: set[tuple[str, str]] = set()
        self.tickets: list[FakeTicket] = []

    def read(self, *, key: str, target: torch.Tensor, hold: object | None = None) -> FakeTicket:
        return self._submit("read", key, target, hold)

    def write(self, *, key: str, source: torch.Tensor, hold: object | None = None) -> FakeTicket:
        return self._submit("write", key, source, hold)

    def log(self) -> list[tuple[str, str]]:
        return [(ticket.kind, ticket.key) for ticket in self.tickets]

    def _submit(self, kind: str, key: str, tensor: torch.Tensor, hold: object | None) -> FakeTicket:
        for earlier in self.tickets:
            if earlier.key == key:
                earlier.finish()
        ticket = FakeTicket(self, kind, key, tensor)
        ticket.hold = hold
        self.tickets.append(ticket)
        return ticket


class _Token:
    """Held by a lease and its transfers."""


class FakeLease:
    def __init__(self, slot: torch.Tensor, token: _Token) -> None:
        self.slot = slot
        self._token: _Token | None = token
        self.release_count = 0

    @property
    def slot_bytes(self) -> int:
        return self.slot.nbytes

    def hold(self) -> object:
        assert self._token is not None, "held after its release"
        return self._token

    def release(self) -> None:
        self.release_count += 1
        self._token = None


class FakePool:
    """Slots of whole pages; one is free again when its lease and every hold on it are gone."""

    def __init__(self, *, slot_count_max: int = 1000) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.slot_count = 0
        self.slot_count_max = slot_count_max
        self.leases: list[FakeLease] = []

    @property
    def free_count(self) -> int:
        return sum(len(slots) for slots in self._free.values())

    def acquire(self, nbytes: int) -> FakeLease | None:
        free = self._free[_rounded(nbytes)]
        if not free:
            return None
        slot, token = free.pop(), _Token()
        weakref.finalize(token, free.append, slot)
        self.leases.append(FakeLease(slot, token))
        return self.leases[-1]

    def grow(self, nbytes: int) -> None:
        assert self.slot_count < self.slot_count_max, "the pool grew beyond what the test allows"
        self.slot_count += 1
        self._free[_rounded(nbytes)].append(torch.empty(_rounded(nbytes), dtype=torch.uint8))

    def view(self, lease: FakeLease, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return lease.slot.view(dtype)[:numel]


class FakeEvent:
    """Passes when the test says so, or when it is waited for."""

    def __init__(self) -> None:
        self.passed = False
        self.recorded = False
        self.wait_count = 0

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.wait_count += 1
        self.passed = True


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
