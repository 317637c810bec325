"""Staging slots: tensors of any size pass between the device and the store through fixed memory.

Knows torch and the store; never DeepSpeed. A transfer moves in chunks of one slot: the drive works
on some while the device copies others. On a device with streams, an event after each copy tells
when the slot may be used next. One thread at a time may call, which `guard` checks; Ctrl-C may come
anywhere (slots.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from itertools import islice

import torch

from memascend.base.components import STAGING_SLOTS
from memascend.base.interfaces import Event, HostMemory, TensorIO, Ticket
from memascend.base.waiting import CopyTicket, Ended, event_here
from memascend.memory.guard import Guard, guarded
from memascend.transfer.pending import Pending
from memascend.transfer.prefetch import ChunkPrefetch
from memascend.transfer.slots import SLOT_COUNT_MIN, GivenBackOnError, Slots
from memascend.transfer.transfer import Transfer, Transfers

#: A range to read: key, offset of its first byte, number of elements, dtype.
Run = tuple[str, int, int, torch.dtype]


class StagingSlots:
    """Slots of one size, used in turn."""

    def __init__(
        self,
        *,
        store: TensorIO,
        memory: HostMemory,
        slot_bytes: int,
        slot_count: int,
        component: str = STAGING_SLOTS,
        new_event: Callable[[], Event] | None = None,
        wait_idle: Callable[[], object] | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Take `slot_count` slots of `slot_bytes` from `memory` now.

        Args:
            store: Source and destination of the bytes.
            memory: Page-locked host memory.
            slot_bytes: A multiple of the page size.
            slot_count: At least SLOT_COUNT_MIN: one fills while another empties.
            component: Name in the ledger.
            new_event: Makes an event of the device; None when the device is the CPU.
            wait_idle: Waits until the device is idle; None when it is the CPU.
            guard: Checks the callers; None: they are one thread.

        Raises:
            ValueError: `slot_count` or `slot_bytes` is too small.
            HostMemoryError: There is not enough memory.
        """
        if slot_count < SLOT_COUNT_MIN:
            raise ValueError(f"slot_count must be at least {SLOT_COUNT_MIN}, got {slot_count}")
        if slot_bytes <= 0:
            raise ValueError(f"slot_bytes must be positive, got {slot_bytes}")
        self.store, self._new_event, self.slot_bytes = store, new_event, slot_bytes
        self.guard = guard
        self._slots = Slots(memory=memory, component=component, wait_idle=wait_idle)
        self._slots.resize(slot_bytes=slot_bytes, slot_count=slot_count)
        self._writes = Transfers(lambda write: self._slots.free(write.staged))
        self._copied_out: Pending[torch.Tensor] = Pending(self._slots.free)
        self.prefetch = ChunkPrefetch(self)

    def __len__(self) -> int:
        return len(self._slots)

    @guarded
    def resize(self, *, slot_bytes: int, slot_count: int) -> None:
        """Replace all slots by new ones, once nothing is in flight.

        Raises:
            StoreError: An earlier write failed.
            ValueError: A slot is taken.
            HostMemoryError: There is not enough memory.
        """
        self.prefetch.drop()
        self.wait_writes()
        self._copied_out.wait()
        self._slots.recover()
        if taken := len(self._slots) - self._slots.free_count:
            raise ValueError(f"cannot resize the staging slots: {taken} are taken")
        self.slot_bytes = slot_bytes
        self._slots.resize(slot_bytes=slot_bytes, slot_count=slot_count)

    # -- whole transfers -------------------------------------------------------------------------

    def chunks(self, numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Cut `numel` elements into (begin, count) runs that fit a slot."""
        count_max = self.slot_bytes // itemsize
        for begin in range(0, numel, count_max):
            yield begin, min(count_max, numel - begin)

    def write(
        self,
        *,
        key: str,
        source: torch.Tensor,
        offset_bytes: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Store a flat tensor of any device into a key that has room, cast to `dtype` if given.

        On return the copies are issued on the current stream, and the source may be overwritten in
        that stream's order; a later read of the key sees it. Errors come from `wait_writes`.
        """
        stored = source.dtype if dtype is None else dtype
        for begin, count in self.chunks(source.numel(), stored.itemsize):
            staged = self.take(count, stored)
            with self.given_back_on_error(staged):
                piece = source.narrow(0, begin, count)
                # A copy from a device that casts would make a host temporary of its own.
                staged.copy_(piece if piece.is_cpu else piece.to(stored), non_blocking=True)
            self.submit(key, staged, offset_bytes + begin * stored.itemsize)

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fill a flat tensor of any device, cast from `dtype` if given; its copies are issued then.

        Raises:
            StoreError: A read failed.
        """
        stored = target.dtype if dtype is None else dtype
        begun = self.prefetch.take(key, target.numel(), stored) if offset_bytes == 0 else ()
        chunks = self.chunks(target.numel(), stored.itemsize)
        pending = deque((target.narrow(0, *next(chunks)), one) for one in begun)
        try:
            for begin, count in chunks:
                # Wait for a copy in flight first: it ends sooner than a read from the drive.
                while pending and not self.reclaim(count * stored.itemsize):
                    if self._copied_out:
                        self._copied_out.wait_oldest()
                    else:
                        self._copy_out(*pending.popleft())
                one = self.start_read(key, offset_bytes + begin * stored.itemsize, count, stored)
                pending.append((target.narrow(0, begin, count), one))
            while pending:
                self._copy_out(*pending.popleft())
        finally:
            for _, one in pending:  # only after an error
                self._abandon(one)

    @guarded
    def wait_writes(self) -> None:
        """Wait until everything written is in the store.

        Raises:
            StoreError: The first write that failed since the last call; the others have been waited
                for.
        """
        self._writes.wait_all()

    @guarded
    def take_failure(self, key: str) -> bool:
        """Return whether a write of a key failed since the last call."""
        return self._writes.take_failure(key)

    # -- single slots ----------------------------------------------------------------------------

    @guarded
    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Take `numel` elements of a slot: the last one used, or the next that becomes free.

        End with `submit`, `give_back` or `free`; keep a reference to the tensor until then.

        Raises:
            ValueError: `numel` is not positive, or the elements do not fit a slot.
        """
        if not 0 < numel * dtype.itemsize <= self.slot_bytes:
            raise ValueError(
                f"a staging slot of {self.slot_bytes} bytes was asked for {numel} elements of "
                f"{dtype}; cut the tensor with chunks()"
            )
        nbytes = numel * dtype.itemsize
        self.reclaim(nbytes)
        while not self._slots.has_room(nbytes):
            if self._slots.recover():
                continue
            if self._writes:
                self._writes.wait_oldest()
            elif self._copied_out:
                self._copied_out.wait_oldest()
            elif not self.prefetch.give_way():
                self.store.wait_all()  # for transfers whose tickets were lost by Ctrl-C
                if not self._slots.recover():
                    raise AssertionError("every staging slot is taken and none was given back")
        return self._slots.cut(numel, dtype)

    @guarded
    def reclaim(self, nbytes: int) -> bool:
        """Free slots of finished transfers, without waiting; return whether `nbytes` are free."""
        self._writes.end_done()
        self._copied_out.release_done()
        return self._slots.has_room(nbytes)

    def turn(self, nbytes: int) -> AbstractContextManager[object]:
        """Wait until `nbytes` are free, and return the guard's lock, to be held for their use.

        For a thread beside the others: it holds the lock only while it uses slots, and waits for
        them without. If the caller holds the lock already nothing is waited for here.
        """
        if self.guard is None or self.guard.is_held():
            return nullcontext()
        while (stage := self._stage_in_the_way(nbytes)) is not None:
            with suppress(Exception):  # the transfer keeps its error
                stage.wait()
            if not stage.done():
                break  # the program is about to end, and the drive is silent
        lock: AbstractContextManager[object] = self.guard.lock
        return lock

    def _stage_in_the_way(self, nbytes: int) -> Ticket | None:
        """Return the stage that the oldest write is in; None if a slot is free, or none writes."""
        assert self.guard is not None
        with self.guard.lock:
            if self.reclaim(nbytes):
                return None
            oldest = next(iter(self._writes), None)
            return None if oldest is None else oldest.stage

    def start_read(self, key: str, offset_bytes: int, numel: int, dtype: torch.dtype) -> Transfer:
        """Take a slot and start a read into it, after submitting all writes to the same bytes."""
        staged = self.take(numel, dtype)
        with self.given_back_on_error(staged):
            self._writes.submit_overlapping(key, offset_bytes, offset_bytes + staged.nbytes)
            ticket = self.store.read(key=key, target=staged, offset_bytes=offset_bytes)
            return Transfer(key=key, staged=staged, offset_bytes=offset_bytes, ticket=ticket)

    def event_here(self) -> Event | None:
        """Return an event after all work queued on the current stream; None on the CPU."""
        return event_here(self._new_event)

    @guarded
    def submit(
        self, key: str, staged: torch.Tensor, offset_bytes: int, filled: Event | None = None
    ) -> None:
        """Store a taken slot once `filled` has passed; None: after all work queued so far."""
        self._slots.expect_cut(staged)
        filled = filled or self.event_here()
        self._writes.add(
            Transfer(
                key=key,
                staged=staged,
                offset_bytes=offset_bytes,
                ticket=Ended() if filled is None else CopyTicket(filled),
                then=partial(self.store.write, key=key, source=staged, offset_bytes=offset_bytes),
            )
        )

    @guarded
    def submit_all(self, *keys: str) -> None:
        """Start the write of every submitted slot, or of those of `keys`; later reads see them.

        Waits for the device only if the copy into such a slot is not over.
        """
        self._writes.submit(*keys)

    @guarded
    def give_back(self, staged: torch.Tensor) -> None:
        """Free a taken slot, once all copies out of it that are queued so far are over."""
        event = self.event_here()
        if event is None:
            self.free(staged)
        else:
            self._slots.expect_cut(staged)
            self._copied_out.add(CopyTicket(event), staged)

    @guarded
    def free(self, staged: torch.Tensor) -> None:
        """Free a taken slot that no copy reads."""
        self._slots.free(staged)

    def given_back_on_error(self, staged: torch.Tensor) -> GivenBackOnError:
        """Return a context manager that gives a taken slot back if an exception leaves it."""
        return GivenBackOnError(self.give_back, staged)

    def read_each(
        self, runs: Iterable[Run], *, ahead: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        """Yield a slot with each run, in order; the caller gives it back.

        Args:
            runs: Ranges, none larger than a slot.
            ahead: Number of runs to read ahead; each takes a slot. None: two less than there are
                slots, which leaves one free for the caller.

        Raises:
            StoreError: A read failed.
        """
        ahead = max(0, len(self._slots) - 2) if ahead is None else ahead
        coming: deque[Transfer] = deque()
        rest = iter(runs)
        try:
            while True:
                for run in islice(rest, ahead + 1 - len(coming)):
                    coming.append(self.start_read(*run))
                if not coming:
                    return
                coming[0].wait()
                yield coming.popleft().staged
        finally:
            for one in coming:  # after an error, or when the generator is closed
                self._abandon(one)

    def stream(self, *, key: str, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of a key in order, slot by slot; each is valid until the next.

        Raises:
            StoreError: A read failed.
        """
        runs = ((key, begin, count, torch.uint8) for begin, count in self.chunks(nbytes, 1))
        with closing(self.read_each(runs)) as each:  # the caller may need a slot afterwards
            for staged in each:
                try:
                    yield staged
                finally:
                    self.give_back(staged)

    def fill(self, *, key: str, nbytes: int, source: Callable[[int, torch.Tensor], None]) -> None:
        """Write a reserved key, slot by slot; on return it is in the store.

        Args:
            key: The key in the store.
            nbytes: Bytes to write, from offset 0.
            source: Called with (offset, uint8 tensor); fills the tensor with the bytes from there.

        Raises:
            StoreError: A write failed.
        """
        for begin, count in self.chunks(nbytes, 1):
            staged = self.take(count, torch.uint8)
            with self.given_back_on_error(staged):
                source(begin, staged)
            self.submit(key, staged, begin)
        self.wait_writes()

    # -- inner -----------------------------------------------------------------------------------

    def _copy_out(self, target: torch.Tensor, read: Transfer) -> None:
        try:
            read.wait()
            target.copy_(read.staged, non_blocking=True)
        finally:
            self._abandon(read)

    def _abandon(self, read: Transfer) -> None:
        """Give the slot of a read back once it is over; the caller may have copied out of it."""
        if read.abandon():
            self.give_back(read.staged)
