"""Saved activations: written from the device to the drive in forward, read back in backward.

Knows torch, the store and the slots; neither DeepSpeed nor autograd's hooks. The unit is a storage,
because a saved tensor keeps its whole storage in memory.

Saved storages wait on the device. A thread writes the oldest one as soon as the waiting storages
exceed `device_bytes` plus the largest one. Backward takes storages in reverse order. One that still
waits is used where it is, and not written meanwhile; the next ones on the drive are prefetched.

Peak device memory: `device_bytes`, the storages in use, and twice the largest one (one waiting, one
being written or prefetched). Host memory is a fixed number of slots.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from memascend.base.interfaces import Event, OnStream
from memascend.base.sizes import ACTIVATIONS_BYTES, IN_FLIGHT_COUNT
from memascend.base.units import format_nbytes
from memascend.base.waiting import event_here
from memascend.errors import HostMemoryError
from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activations.prefetch import ReadAhead
from memascend.streaming.activations.records import Activation, Record, State
from memascend.streaming.activations.saved_sizes import SavedSizes
from memascend.transfer.staging import StagingSlots


class ActivationStream:
    """Saved storages, written to the drive and read back. Any thread may call."""

    def __init__(
        self,
        *,
        slots: StagingSlots,
        device_bytes: int,
        new_event: Callable[[], Event] | None = None,
        on_copy_stream: OnStream = nullcontext,
        use_device: Callable[[], object] = int,
    ) -> None:
        """Create an empty stream.

        Args:
            slots: Staging slots for all transfers; used by this stream alone.
            device_bytes: Bytes of saved storages that stay on the device and are not written.
            new_event: Makes an event of the device; None when the device is the CPU.
            on_copy_stream: Makes a stream of the device current that is used for these copies only.
            use_device: Makes the device current on the thread that copies.
        """
        self.slots = slots
        self.traffic = ActivationTraffic()
        self._device_bytes = device_bytes
        self._new_event = new_event
        self._on_copy_stream = on_copy_stream
        self._use_device = use_device
        self._changed = threading.Condition()
        self._records: dict[int, Record] = {}  # in the order of saving
        self._waiting: dict[int, Record] = {}  # may be written, oldest first
        self._reads: deque[Record] = deque()  # to be read, most urgent first
        self._garbage: list[str] = []  # keys to discard
        self._dropped: deque[Record] = deque()
        self._job: Record | None = None  # the thread's current job
        self._count = 0
        self._sizes = SavedSizes(self.traffic)
        self._ahead = ReadAhead()
        self._errors: dict[str, Exception] = {}  # by key: failed writes
        self._thread: ThreadPoolExecutor | None = None

    # -- forward ---------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor) -> Activation:
        """Take the storage of a tensor that autograd saves; wait until the device has room for it.

        Work already queued on the current stream may still fill it.

        Raises:
            StoreError: A write of this or an earlier storage failed.
        """
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        data.set_(tensor.untyped_storage())
        filled = event_here(self._new_event)
        with self._changed:
            self._wait_for_room(data.nbytes)
            number, self._count = self._count, self._count + 1
            record = Record(
                number=number,
                nbytes=data.nbytes,
                saved=tensor.detach(),
                data=data,
                filled=filled,
                device=tensor.device,
                version=tensor._version,
            )
            # First: after Ctrl-C every noted record has an Activation that gives it up.
            activation = Activation(record, self._dropped)
            self._records[record.number] = record
            self._sizes.add(record)
            self._hold(record)
            self._ahead.note_room()  # the room that backward will have is unknown
            self.traffic.count += 1
            self.traffic.saved_bytes += record.nbytes
            if self._sizes.held_bytes > self._kept_bytes():
                self._wake()
        return activation

    # -- backward --------------------------------------------------------------------------------

    def take(self, activation: Activation) -> torch.Tensor:
        """Return all bytes of a storage, for use on the current stream; prefetch the next ones.

        The bytes stay on the device until `release`.

        Raises:
            StoreError: The drive failed.
            RuntimeError: The storage was modified in place after it had been saved.
            torch.OutOfMemoryError: The device has no room for it.
        """
        record = activation.record
        with self._changed:
            self._give_up_dropped()
            if record.data is None and record.error is None:
                self._start_read(record, is_ahead=False)
            elif record.state is State.READING and record is not self._job:
                self._reads = deque([record, *(one for one in self._reads if one is not record)])
            record.is_taken = record.was_taken = True
            self._uncount(record)
            self._read_ahead(record.number)
            while record.state is State.READING:
                if self._job is None:  # Ctrl-C may have come before _wake()
                    self._wake()
                self._changed.wait()
                # Another thread has raised the error of the read: try again.
                if record.data is None and record.error is None:
                    self._start_read(record, is_ahead=False)
            if record.error is not None:
                self._errors[record.key], record.error = record.error, None
            self._raise_error()
            record.check_version()
            data, filled = record.data, record.filled
        if data is None:
            raise AssertionError(f"{record.key} is {record.state.name}, and not on the device")
        if filled is not None:
            filled.wait()
        here = self._stream_here(data.device)
        if record.stream is not None and here is not None and record.stream != here:
            data.record_stream(here)  # freed to the stream of the read, after this one's use
        return data

    def release(self, activation: Activation) -> None:
        """Release the bytes on the device. They can be taken again."""
        record = activation.record
        with self._changed:
            record.is_taken = False
            if record.state is State.STORED:
                self._let_go(record)
            elif record.state is State.WAITING:
                self._hold(record)

    # -- all of it -------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of saved storages, on the device or on the drive."""
        with self._changed:
            self._give_up_dropped()
            return len(self._records)

    def settle(self) -> None:
        """Wait until no transfer is in flight and all slots are free.

        Raises:
            StoreError: The drive failed.
        """
        with self._changed:
            self._give_up_dropped()
            work = self._wake()
        work.result()
        with self._changed:
            self._raise_error()

    def close(self) -> None:
        """Wait for all transfers in flight, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    # -- with the lock ---------------------------------------------------------------------------

    def _kept_bytes(self) -> int:
        """Return how many bytes stay unwritten: backward begins with them."""
        return self._device_bytes + self._sizes.largest()

    def _wait_for_room(self, nbytes: int) -> None:
        self._give_up_dropped()
        # If no write is queued or running, waiting cannot free memory.
        while self._lacks_room(nbytes) and (self._waiting or self._job) and not self._errors:
            # The largest storage may have been dropped since the last put(): then the thread, idle
            # until now, has storages to write.
            if self._job is None:
                self._wake()
            self._changed.wait()
            self._give_up_dropped()
        self._raise_error()

    def _lacks_room(self, nbytes: int) -> bool:
        room_bytes = self._device_bytes + IN_FLIGHT_COUNT * max(nbytes, self._sizes.largest())
        return self._sizes.held_bytes + nbytes > room_bytes

    def _raise_error(self) -> None:
        """Raise the first error of a storage that was not dropped, once."""
        error = next(iter(self._errors.values()), None)
        self._errors.clear()
        try:
            if error is not None:
                raise error
        finally:
            del error  # else its traceback keeps device memory until a garbage collection

    def _hold(self, record: Record) -> None:
        """Count a storage as held, and queue it to be written."""
        self._waiting[record.number] = record
        self._sizes.count(record, is_held=True, is_ahead=record.is_ahead)

    def _let_go(self, record: Record) -> None:
        """Drop this stream's reference to the device bytes of a stored storage."""
        record.let_go()
        self._sizes.note_device(record)

    def _uncount(self, record: Record) -> None:
        """Stop counting a storage as held or prefetched, and remove it from both queues."""
        self._waiting.pop(record.number, None)
        self._ahead.remove(record.number)
        self._sizes.count(record, is_held=False, is_ahead=False)
        self._changed.notify_all()

    def _start_read(self, record: Record, *, is_ahead: bool) -> None:
        """Queue a read of a storage, into memory that is allocated on the current stream."""
        data = torch.empty(record.nbytes, dtype=torch.uint8, device=record.device)
        filled = event_here(self._new_event)  # passes when earlier users of this memory are done
        record.stream = self._stream_here(record.device)
        self._sizes.count(record, is_held=False, is_ahead=is_ahead)
        record.data, record.filled, record.state = data, filled, State.READING
        self._sizes.note_device(record)
        if is_ahead:
            self._reads.append(record)
        else:
            self._reads.appendleft(record)
        self._wake()

    def _stream_here(self, device: torch.device) -> torch.Stream | None:
        """Return the current stream; None on the CPU."""
        if self._new_event is None:
            return None
        here: torch.Stream = torch.get_device_module(device).current_stream()
        return here

    def _read_ahead(self, number: int) -> None:
        """Start reading storages that were saved before this one, the latest first."""
        room_bytes = IN_FLIGHT_COUNT * self._sizes.largest(number)
        # Storages that a slow drive has not accepted yet are still on the device, and are used
        # first.
        over_bytes = max(0, self._sizes.held_bytes - self._device_bytes)
        while (coming := self._ahead.last_before(number)) is not None:
            other = self._records[coming]
            if other.data is None:  # else Ctrl-C came before it was removed from the list
                ahead_bytes = self._sizes.ahead_bytes + other.nbytes
                if over_bytes + ahead_bytes > room_bytes or self._ahead.is_left_out():
                    return
                try:
                    self._start_read(other, is_ahead=True)
                except torch.OutOfMemoryError:  # it is read when it is needed
                    self._ahead.note_full()
                    return
                self._ahead.note_room()
            self._ahead.remove(coming)

    def _give_up_dropped(self) -> None:
        """Free the resources of records whose Activation was dropped."""
        for _ in range(len(self._dropped)):
            record = self._dropped[0]
            if record is self._job:
                self._dropped.rotate(-1)
                continue
            if record in self._reads:
                self._reads.remove(record)
            elif record.data is not None and record.filled is not None:
                record.filled.synchronize()  # perhaps no stream waits for the copies
            self._uncount(record)
            self._sizes.remove(record)
            self._records.pop(record.number, None)
            self._errors.pop(record.key, None)
            if record.state is not State.WAITING:
                self._garbage.append(record.key)
            self._dropped.popleft()  # last, so that a call after Ctrl-C repeats the rest

    def _wake(self) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "memascend-activations")
        return self._thread.submit(self._work)

    # -- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        """Read and write until no job is left; called without the lock."""
        try:
            self._use_device()
            with self._on_copy_stream():
                self._run_jobs()
        except Exception as error:  # the device failed, in no job's own part
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        """End every read with an error, and report it to callers that wait for room."""
        error.with_traceback(None).__context__ = None  # frees the bytes on the device
        with self._changed:
            reads, self._reads = self._reads, deque()
            for record in reads:
                record.error, record.state, record.data = error, State.STORED, None
                self._sizes.note_device(record)
            self._errors[""] = error
            self._changed.notify_all()

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            record, data = job
            try:
                if record.state is State.READING:
                    self._read(record, data)
                else:
                    self._write(record, data)
            except Exception as error:
                self._note_failure(record, error)
            finally:
                del data, job
                with self._changed:
                    self._job = None
                    self._changed.notify_all()
        try:
            self.slots.wait_writes()
        except Exception as error:
            self._note_lost(getattr(error, "key", None) or "", error)

    def _next_job(self) -> tuple[Record, torch.Tensor] | None:
        """Return the next storage to read, else to write, and its bytes on the device."""
        self._forget_garbage()
        with self._changed:
            self._give_up_dropped()
            if self._reads:
                self._job = self._reads.popleft()
                assert self._job.data is not None
                return self._job, self._job.data
            while self._waiting and self._sizes.held_bytes > self._kept_bytes():
                self._job = self._waiting.pop(next(iter(self._waiting)))
                data = self._job.data
                if data is not None:  # else its graph was dropped just now
                    self._job.state = State.WRITING
                    return self._job, data
            self._job = None
            self._changed.notify_all()  # a put() may wait for a job that was dropped
            return None

    def _forget_garbage(self) -> None:
        with self._changed:
            keys, self._garbage = self._garbage, []
        for key in keys:
            self.slots.store.discard(key=key)
            self.slots.forget_failure(key)

    def _write(self, record: Record, data: torch.Tensor) -> None:
        if record.filled is not None:
            record.filled.wait()
        try:
            self.slots.store.reserve(key=record.key, nbytes=record.nbytes)
        except HostMemoryError as error:
            stored = [one for one in [*self._records.values()] if one.state is State.STORED]
            raise _too_many_activations(sum(one.nbytes for one in stored), str(error)) from None
        self.slots.write(key=record.key, source=data)
        self.slots.submit_all(record.key)  # the copies are over then, and it may be discarded
        with self._changed:
            self.traffic.written_bytes += record.nbytes
            record.state = State.STORED
            # A modified storage stays and counts as held: take() raises for it.
            if not (record.is_taken or record.is_modified()):
                self._uncount(record)
                self._let_go(record)
                if not record.was_taken:
                    self._ahead.add(record.number)

    def _read(self, record: Record, data: torch.Tensor) -> None:
        if record.filled is not None:
            record.filled.wait()
        try:
            self.slots.read(key=record.key, target=data)
        except BaseException:
            copied = event_here(self._new_event)
            if copied is not None:
                copied.synchronize()  # before the memory goes back
            raise
        filled = event_here(self._new_event)
        with self._changed:
            self.traffic.read_bytes += record.nbytes
            record.filled, record.state = filled, State.STORED

    def _note_lost(self, key: str, error: Exception) -> None:
        with self._changed:
            self._give_up_dropped()
            if not key or any(one.key == key for one in self._records.values()):
                self._errors[key] = error

    def _note_failure(self, record: Record, error: Exception) -> None:
        error.with_traceback(None).__context__ = None  # they refer to the bytes on the device
        with self._changed:
            if record.state is State.READING:
                record.error, record.state, record.data = error, State.STORED, None
                self._sizes.note_device(record)
            else:  # a failed write: the storage stays on the device, and counts as held
                record.state = State.WAITING
                self._errors[record.key] = error
                self._garbage.append(record.key)


def _too_many_activations(nbytes: int, refusal: str) -> HostMemoryError:
    """Return the error for activations that exceed the memory for checksums.

    Args:
        nbytes: Bytes of activations on the drive.
        refusal: The reason why there is no more memory.
    """
    return HostMemoryError(
        f"cannot keep checksums of more activations: {format_nbytes(nbytes)} of them are on the "
        f"drive, memascend.verify is on and its plan is made for {format_nbytes(ACTIVATIONS_BYTES)}"
        f". cause: {refusal}. fix: a larger memascend.host_memory_limit (4 bytes for each 64 KiB "
        "of activations), memascend.verify=off, a larger memascend.activations.device_bytes, or "
        "fewer tokens a step"
    )
