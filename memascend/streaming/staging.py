"""Staging slots: tensors of any size pass between the device and the store through fixed memory.

Knows torch and the store; never DeepSpeed. A transfer moves in chunks of one slot: the drive works
on some while the device copies others. On a device with its own streams an event behind each copy
says when a slot may go on. One thread at a time may call; Ctrl-C may come anywhere (lent_slots.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice

import torch

from memascend.base.components import STAGING_SLOTS
from memascend.base.interfaces import Event, HostMemory, TensorIO, Ticket
from memascend.base.waiting import Ended, event_here
from memascend.streaming.chunks_ahead import ChunksAhead
from memascend.streaming.lent_slots import SLOT_COUNT_MIN, GivenBackOnError, LentSlots, Slot

#: What to read: a key, the offset of the first byte in it, elements, and their dtype.
Run = tuple[str, int, int, torch.dtype]


@dataclass(slots=True)
class _Write:
    """A slot filled by a copy that may not have happened yet, on its way to the store."""

    slot: Slot
    filled: Event | None
    key: str
    source: torch.Tensor
    offset_bytes: int
    ticket: Ticket | None = None

    def overlaps(self, begin: int, end: int) -> bool:
        """Return whether any of its bytes lie in a range of its key."""
        return self.offset_bytes < end and begin < self.offset_bytes + self.source.nbytes


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
    ) -> None:
        """Take `slot_count` slots of `slot_bytes` from `memory` now.

        Args:
            store: Where the bytes come from and go to.
            memory: Page-locked host memory.
            slot_bytes: A multiple of the page size.
            slot_count: At least SLOT_COUNT_MIN: one fills while another empties.
            component: Name in the ledger.
            new_event: Makes an event of the device; None when the device is the CPU.
            wait_idle: Waits until the device has nothing to do; None when it is the CPU.

        Raises:
            ValueError: Too few slots, or none with room for anything.
            HostMemoryError: There is not enough memory.
        """
        if slot_count < SLOT_COUNT_MIN:
            raise ValueError(f"slot_count must be at least {SLOT_COUNT_MIN}, got {slot_count}")
        if slot_bytes <= 0:
            raise ValueError(f"slot_bytes must be positive, got {slot_bytes}")
        self.store, self._new_event, self.slot_bytes = store, new_event, slot_bytes
        self._slots = LentSlots(memory=memory, component=component, wait_idle=wait_idle)
        self._slots.exchange(slot_bytes=slot_bytes, slot_count=slot_count)
        self._writes: deque[_Write] = deque()  # oldest first
        self._reads: deque[tuple[Event, Slot]] = deque()  # copied out, oldest first
        self._write_error: Exception | None = None  # the first since wait_writes
        self._failed: set[str] = set()  # keys of which a write failed
        self.ahead = ChunksAhead(self)

    def __len__(self) -> int:
        return len(self._slots)

    def resize(self, *, slot_bytes: int, slot_count: int) -> None:
        """Exchange the slots for others, once nothing is in flight.

        Raises:
            StoreError: An earlier write failed.
            ValueError: A slot is taken.
            HostMemoryError: There is not enough memory.
        """
        self.ahead.forget()
        self.wait_writes()
        while self._reads:
            self._wait_copied_out()
        self._find_lost()
        if taken := len(self._slots) - self._slots.free_count:
            raise ValueError(f"cannot resize the staging slots: {taken} are taken")
        self.slot_bytes = slot_bytes
        self._slots.exchange(slot_bytes=slot_bytes, slot_count=slot_count)

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
        begun = self.ahead.take(key, target.numel(), stored) if offset_bytes == 0 else ()
        chunks = self.chunks(target.numel(), stored.itemsize)
        pending = deque((target.narrow(0, *next(chunks)), *one) for one in begun)
        try:
            for begin, count in chunks:
                # A copy that is being made is over sooner than a read that is being waited for.
                while pending and not self.reclaim(count * stored.itemsize):
                    if self._reads:
                        self._wait_copied_out()
                    else:
                        self._copy_out(*pending.popleft())
                one = self.start_read(key, offset_bytes + begin * stored.itemsize, count, stored)
                pending.append((target.narrow(0, begin, count), *one))
            while pending:
                self._copy_out(*pending.popleft())
        finally:
            for _, staged, ticket in pending:  # an error is on its way up
                self._give_back_settled(staged, ticket)

    def wait_writes(self) -> None:
        """Wait until everything written is in the store.

        Raises:
            StoreError: A write since the last call failed, the first that did; the others have been
                waited for.
        """
        while self._writes:
            self._finish_write()
        error, self._write_error = self._write_error, None
        if error is not None:
            raise error

    def forget_failure(self, key: str) -> bool:
        """Forget that a write of a key failed; return False when none did."""
        has_failed = key in self._failed
        self._failed.discard(key)
        return has_failed

    # -- single slots ----------------------------------------------------------------------------

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Take `numel` elements of a slot: the last one, or the next that write-backs let go.

        What is taken ends with `submit` or `give_back`; until then the caller keeps this tensor.

        Raises:
            ValueError: So many elements do not fit a slot, or there are none.
        """
        if not 0 < numel * dtype.itemsize <= self.slot_bytes:
            raise ValueError(
                f"a staging slot of {self.slot_bytes} bytes was asked for {numel} elements of "
                f"{dtype}; cut the tensor with chunks()"
            )
        nbytes = numel * dtype.itemsize
        self.reclaim(nbytes)
        while not (self._slots.has_room(nbytes) or self._find_lost()):
            if self._writes:
                self._finish_write()
            elif self._reads:
                self._wait_copied_out()
            elif not self.ahead.give_way():
                self.store.wait_all()  # for what Ctrl-C has left in flight and nobody waits for
                if not self._find_lost():
                    raise AssertionError("every staging slot is taken and none was given back")
        return self._slots.lend(numel, dtype)

    def reclaim(self, nbytes: int) -> bool:
        """Free what has passed, without waiting; return whether so many bytes can be taken now."""
        self._submit_filled()
        while self._writes and (ticket := self._writes[0].ticket) is not None and ticket.done():
            self._finish_write()
        while self._reads and self._reads[0][0].query():
            self._slots.free(self._reads.popleft()[1])
        return self._slots.has_room(nbytes)

    def start_read(
        self, key: str, offset_bytes: int, numel: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Ticket]:
        """Take a slot and start a read into it, once the store has every write of these bytes."""
        staged = self.take(numel, dtype)
        with self.given_back_on_error(staged):
            end = offset_bytes + staged.nbytes
            pending = deque(one for one in self._writes if one.ticket is None and one.key == key)
            # In order, also those before that overlap: they may overlap one another.
            while any(one.overlaps(offset_bytes, end) for one in pending):
                self._start_late(pending.popleft())
            return staged, self.store.read(key=key, target=staged, offset_bytes=offset_bytes)

    def event_here(self) -> Event | None:
        """Return an event behind what was issued on the current stream; None on the CPU."""
        return event_here(self._new_event)

    def submit(
        self, key: str, staged: torch.Tensor, offset_bytes: int, filled: Event | None = None
    ) -> None:
        """Store a taken slot once the copy into it has happened: `filled`, or all issued so far."""
        filled = filled or self.event_here()
        self._writes.append(_Write(self._slots.slot_of(staged), filled, key, staged, offset_bytes))
        self._submit_filled()

    def submit_all(self, *keys: str) -> None:
        """Hand every submitted slot, or all of some keys, to the store, whose later reads see them.

        The device is waited for only where such a slot's copy has not happened.
        """
        while any(one.ticket is None and (not keys or one.key in keys) for one in self._writes):
            self._start_late(next(write for write in self._writes if write.ticket is None))

    def give_back(self, staged: torch.Tensor) -> None:
        """Free a taken slot, once the copies out of it that were issued so far have happened."""
        event = self.event_here()
        if event is None:
            self.free(staged)
        else:
            self._reads.append((event, self._slots.slot_of(staged)))

    def free(self, staged: torch.Tensor) -> None:
        """Free a taken slot that no copy reads."""
        self._slots.free(self._slots.slot_of(staged))

    def given_back_on_error(self, staged: torch.Tensor) -> GivenBackOnError:
        """Give a taken slot back when an error leaves the block, whoever raised it."""
        return GivenBackOnError(self.give_back, staged)

    def read_each(
        self, runs: Iterable[Run], *, ahead: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        """Yield a slot with each run, in order; it is the caller's to end.

        Args:
            runs: None larger than a slot.
            ahead: Further ones that are being read meanwhile; each takes a slot. None: as many as
                leave one free for a caller who has another.

        Raises:
            StoreError: A read failed.
        """
        ahead = max(0, len(self._slots) - 2) if ahead is None else ahead
        coming: deque[tuple[torch.Tensor, Ticket]] = deque()
        rest = iter(runs)
        try:
            while True:
                for run in islice(rest, ahead + 1 - len(coming)):
                    coming.append(self.start_read(*run))
                if not coming:
                    return
                coming[0][1].wait()
                yield coming.popleft()[0]
        finally:
            for staged, ticket in coming:  # an error is on its way up
                self._give_back_settled(staged, ticket)

    def stream(self, *, key: str, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of a key in order, one slot after the other; each is lent until the next.

        Raises:
            StoreError: A read failed.
        """
        runs = ((key, begin, count, torch.uint8) for begin, count in self.chunks(nbytes, 1))
        with closing(self.read_each(runs)) as each:  # whoever consumes this may need a slot
            for staged in each:
                try:
                    yield staged
                finally:
                    self.give_back(staged)

    def fill(self, *, key: str, nbytes: int, source: Callable[[int, torch.Tensor], None]) -> None:
        """Store a key that has room, a slot at a time.

        Args:
            key: In the store.
            nbytes: From its beginning on.
            source: Fills a uint8 tensor with the bytes from an offset on.

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

    def _copy_out(self, target: torch.Tensor, staged: torch.Tensor, ticket: Ticket) -> None:
        try:
            ticket.wait()
            target.copy_(staged, non_blocking=True)
        finally:
            self._give_back_settled(staged, ticket)

    def _give_back_settled(self, staged: torch.Tensor, ticket: Ticket) -> None:
        """Give a slot back; not while a drive that is silent as the program ends may fill it."""
        with suppress(Exception):
            ticket.wait()
        if ticket.done():
            self.give_back(staged)

    def _wait_copied_out(self) -> None:
        event, slot = self._reads[0]
        event.synchronize()
        self._reads.popleft()
        self._slots.free(slot)

    def _submit_filled(self) -> None:
        """Hand the store every slot whose copy has happened, in order."""
        for write in self._writes:
            if write.ticket is None:
                if write.filled is not None and not write.filled.query():
                    return
                self._start(write)

    def _start_late(self, write: _Write) -> None:
        """Wait for the copy into a slot, and hand it over."""
        if write.filled is not None:
            write.filled.synchronize()
        self._start(write)

    def _start(self, write: _Write) -> None:
        try:
            write.ticket = self.store.write(
                key=write.key, source=write.source, offset_bytes=write.offset_bytes
            )
        except Exception as error:
            # Whoever happens to need a slot now did not ask for this write.
            write.ticket = Ended(error)

    def _finish_write(self) -> None:
        """Wait for the oldest write and free its slot; an error is kept for `wait_writes`."""
        write = self._writes[0]
        if write.ticket is None:
            self._start_late(write)
        try:
            if write.ticket is not None:
                write.ticket.wait()
        except Exception as error:
            if write.ticket is not None and not write.ticket.done():
                raise  # at the end of the program: a drive is silent, and may read the slot still
            self._write_error = self._write_error or error
            self._failed.add(write.key)
        # Not behind Ctrl-C: then the drive still reads the slot.
        self._writes.popleft()
        self._slots.free(write.slot)

    def _find_lost(self) -> bool:
        """Free what Ctrl-C has left in no list; return whether there was anything."""
        listed = [write.slot for write in self._writes] + [slot for _, slot in self._reads]
        return self._slots.find_lost(listed)
