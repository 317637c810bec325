"""A store, a pool and events whose moments a test chooses, for what stages parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from memascend.base.interfaces import HostMemory, TensorIO, TensorRequest
from memascend.errors import StoreError
from memascend.memory.pool import Pool


class FakeTicket:
    """A transfer that ends when it is waited for, or earlier with finish().

    Its bytes move then, as late as can be: a slot reused too early is seen by its contents. One
    that fails leaves rubbish behind.
    """

    def __init__(self, store: FakeStore, kind: str, request: TensorRequest) -> None:
        self._store = store
        self._held: tuple[torch.Tensor, TensorRequest] | None = (request.data, request)
        self._begin, self._end = request.begin, request.begin + request.nbytes
        self.kind, self.key = kind, request.key
        self.capacity_bytes = request.capacity_bytes

    @property
    def finished(self) -> bool:
        return self._held is None

    def wait(self) -> None:
        if self._store.interrupts:
            raise KeyboardInterrupt
        self.finish()
        if self._fails:
            raise StoreError(5, f"{self.kind} of {self.key} failed")

    def done(self) -> bool:
        return self.finished

    def finish(self) -> None:
        if self._held is None:
            return
        part, (memory, _) = self._store.content[self.key][self._begin : self._end], self._held
        self._held = None  # as the real one lets its holds go
        source, target = (part, memory) if self.kind == "read" else (memory, part)
        if self._fails:
            target.fill_(0xEE)
        else:
            target.copy_(source)

    @property
    def _fails(self) -> bool:
        return (self.kind, self.key) in self._store.failing


class FakeStore(TensorIO):
    """Bytes by key, transfers that fail, and all there have been.

    Transfers on one key keep their order, as in the real store.
    """

    def __init__(self) -> None:
        self.content: dict[str, torch.Tensor] = {}
        self.failing: set[tuple[str, str]] = set()
        self.tickets: list[FakeTicket] = []
        self.interrupts = False  # Ctrl-C comes in each wait for a transfer
        self.in_flight_peak = 0

    def value(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        return self.content[key].view(dtype)

    def log(self) -> list[tuple[str, str]]:
        return [(ticket.kind, ticket.key) for ticket in self.tickets]

    def reserve(self, *, key: str, nbytes: int) -> None:
        if key not in self.content or self.content[key].nbytes != nbytes:
            self.content[key] = torch.zeros(nbytes, dtype=torch.uint8)

    def discard(self, *, key: str) -> bool:
        return self.content.pop(key, None) is not None

    def wait_all(self) -> None:
        for ticket in self.tickets:
            ticket.finish()

    def start_read(self, request: TensorRequest) -> FakeTicket:
        return self._submit("read", request)

    def start_write(self, request: TensorRequest) -> FakeTicket:
        if request.offset_bytes is None:
            self.reserve(key=request.key, nbytes=request.nbytes)
        return self._submit("write", request)

    def _submit(self, kind: str, request: TensorRequest) -> FakeTicket:
        key, end = request.key, request.begin + request.nbytes
        if key not in self.content:
            raise StoreError(2, f"no key {key!r} in the store")
        if end > self.content[key].nbytes:
            raise ValueError(f"bytes {request.begin} to {end} are not all in {key}")
        for earlier in self.tickets:
            if earlier.key == key and "write" in (kind, earlier.kind):
                earlier.finish()
        ticket = FakeTicket(self, kind, request)
        self.tickets.append(ticket)
        in_flight = sum(not one.finished for one in self.tickets)
        self.in_flight_peak = max(self.in_flight_peak, in_flight)
        return ticket


class CountedPool(Pool):
    """A pool that grows, and how it was used."""

    def __init__(self, *, slot_count_max: int = 1000) -> None:
        super().__init__(memory=FakeMemory(), component="slots")
        self.slot_count = 0
        self.slot_count_max = slot_count_max

    @property
    def free_count(self) -> int:
        return sum(segment.idle for segment in self._segments)

    def grow(self, nbytes: int) -> bool:
        assert self.slot_count < self.slot_count_max, "the pool grew beyond what the test allows"
        self.slot_count += 1
        return super().grow(nbytes)


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


class FakeMemory(HostMemory):
    """Host tensors, and what was asked for."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        self.taken.append((component, nbytes))
        return torch.zeros(nbytes, dtype=torch.uint8)

    def contains(self, tensor: torch.Tensor) -> bool:
        return False


class LateTensor(torch.Tensor):
    """A tensor of the late device: its copies are only noted, unless they block."""

    device_of: LateDevice

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        late = next(one for one in args if isinstance(one, LateTensor))
        plain = [one.plain() if isinstance(one, LateTensor) else one for one in args]
        if function is torch.Tensor.copy_:
            # A device keeps no tensor of the host, just its address.
            target, source = (one.data for one in plain[:2])
            late.device_of.issue(lambda: target.copy_(source))
            if not (kwargs or {}).get("non_blocking", False):
                late.device_of.synchronize()
            return args[0]
        result = function(*plain, **(kwargs or {}))
        if function is torch.Tensor.narrow:
            result = late.device_of.tensor(result, type(late))
        return result


class RemoteTensor(LateTensor):
    """One that does not say that it lies in host memory."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


class LateDevice:
    """One stream that does nothing before it is waited for. Copies happen while it is entered."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._issued = 0
        self._done = 0

    def __enter__(self) -> LateDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.synchronize()

    def tensor(self, plain: torch.Tensor, kind: type[LateTensor] = LateTensor) -> LateTensor:
        late = plain.as_subclass(kind)
        late.device_of = self
        return late

    def issue(self, copy: Callable[[], object]) -> None:
        self._issued += 1
        self._waiting.append(copy)

    def advance(self, count: int) -> None:
        """Does the oldest `count` copies."""
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()()
            self._done += 1

    def synchronize(self) -> None:
        self.advance(len(self._waiting))

    def new_event(self) -> LateEvent:
        return LateEvent(self)


class LateEvent:
    """Passes with the copies issued before it was recorded."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._after = 0

    def record(self) -> None:
        self._after = self._device._issued

    def query(self) -> bool:
        return self._device._done >= self._after

    def synchronize(self) -> None:
        self._device.advance(max(0, self._after - self._device._done))
