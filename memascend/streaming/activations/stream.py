"""Saved activations: written from the device to the drive in forward, read back in backward.

Knows torch and the copies; neither DeepSpeed nor autograd's hooks. The unit is a storage,
because a saved tensor keeps its whole storage in memory.

Saved storages wait on the device. A thread writes the oldest one as soon as the waiting storages
exceed `device_bytes` plus the largest one. Backward takes storages in reverse order. One that still
waits is used where it is, and not written meanwhile; the next ones on the drive are prefetched.

Peak device memory: `device_bytes`, the storages in use, and twice the largest one (one waiting, one
being written or prefetched). Host memory is a fixed number of slots.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from memascend.base.interfaces import Device
from memascend.base.sizes import ACTIVATIONS_BYTES, IN_FLIGHT_COUNT
from memascend.base.units import format_nbytes
from memascend.errors import HostMemoryError
from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activations.back_off import BackOff
from memascend.streaming.activations.copies import Copies
from memascend.streaming.activations.records import (
    DEVICE_ONLY,
    ON_DRIVE,
    Act,
    Activation,
    Record,
    State,
)
from memascend.streaming.activations.saved import Saved
from memascend.transfer.staging import StagingSlots


class ActivationStream:
    """Saved storages, written to the drive and read back. Any thread may call."""

    def __init__(
        self, *, slots: StagingSlots, device_bytes: int, device: Device | None = None
    ) -> None:
        """Create an empty stream.

        Args:
            slots: Staging slots for all transfers; used by this stream alone.
            device_bytes: Bytes of saved storages that stay on the device and are not written.
            device: The device of the storages; None for the CPU.
        """
        self.traffic = ActivationTraffic()
        self._device_bytes = device_bytes
        self._copies = Copies(slots, device or Device())
        self._changed = threading.Condition()
        self._saved = Saved(self.traffic)
        self._back_off = BackOff()
        self._job: Record | None = None  # the thread's current job
        self._garbage: list[str] = []  # keys to discard
        self._errors: dict[str, Exception] = {}  # by key: failed writes
        self._thread: ThreadPoolExecutor | None = None

    @property
    def slots(self) -> StagingSlots:
        """The staging slots of all transfers."""
        return self._copies.slots

    # -- forward ---------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor) -> Activation:
        """Take the storage of a tensor that autograd saves; wait until the device has room for it.

        Work already queued on the current stream may still fill it.

        Raises:
            StoreError: A write of this or an earlier storage failed.
        """
        filled = self._copies.event_here()
        with self._changed:
            self._wait_for_room(tensor.untyped_storage().nbytes())
            activation = self._saved.add(tensor, filled)
            self._back_off.reset()  # the room that backward will have is unknown
            if self._has_to_write():
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
            self._begin_use(record)
            self._prefetch(record.number)
            while record.state is State.READING:
                if self._job is None:  # Ctrl-C may have come before _wake()
                    self._wake()
                self._changed.wait()
                self._read_if_stored(record)  # another thread has raised the error of the read
            if record.state is State.FAILED:
                self._saved.change(record, Act.RAISE)
                error, record.error = record.error, None
                if error is not None:
                    self._errors[record.key] = error
                del error  # as in _raise_error()
            self._raise_error()
            record.check_version()
            data, filled = record.data, record.filled
        if data is None:
            raise AssertionError(f"{record.key} is {record.state.name}, and not on the device")
        if filled is not None:
            filled.wait()
        here = self._copies.stream_here(data.device)
        if record.stream is not None and here is not None and record.stream != here:
            data.record_stream(here)  # freed to the stream of the read, after this one's use
        return data

    def release(self, activation: Activation) -> None:
        """Release the bytes on the device. They can be taken again."""
        with self._changed:
            self._saved.change(activation.record, Act.RELEASE)

    # -- all of it -------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of saved storages, on the device or on the drive."""
        with self._changed:
            self._give_up_dropped()
            return len(self._saved.records)

    def drain(self) -> None:
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

    def _has_to_write(self) -> bool:
        """Return whether more is held than stays unwritten: backward begins with the last ones."""
        kept_bytes = self._device_bytes + self._saved.stack.largest()
        return self._saved.held_bytes > kept_bytes

    def _wait_for_room(self, nbytes: int) -> None:
        self._give_up_dropped()
        # If no write is queued or running, waiting cannot free memory.
        while self._lacks_room(nbytes) and (self._saved.waiting or self._job) and not self._errors:
            # The largest storage may have been dropped since the last put(): then the thread, idle
            # until now, has storages to write.
            if self._job is None:
                self._wake()
            self._changed.wait()
            self._give_up_dropped()
        self._raise_error()

    def _lacks_room(self, nbytes: int) -> bool:
        largest_bytes = max(nbytes, self._saved.stack.largest())
        room_bytes = self._device_bytes + IN_FLIGHT_COUNT * largest_bytes
        return self._saved.held_bytes + nbytes > room_bytes

    def _raise_error(self) -> None:
        """Raise the first error of a storage that was not dropped, once."""
        error = next(iter(self._errors.values()), None)
        self._errors.clear()
        try:
            if error is not None:
                raise error
        finally:
            del error  # else its traceback keeps device memory until a garbage collection

    def _begin_use(self, record: Record) -> None:
        self._read_if_stored(record)
        record.was_taken = True
        self._saved.change(record, Act.TAKE)
        if record.state is State.READING and record is not self._job:
            self._saved.read_first(record)
        self._changed.notify_all()

    def _read_if_stored(self, record: Record) -> None:
        if record.state is State.STORED:
            self._start_read(record, Act.START_READ)

    def _start_read(self, record: Record, act: Act) -> None:
        """Queue a read of a storage, into memory that is allocated on the current stream."""
        self._copies.allocate(record)
        self._saved.change(record, act)
        if act is Act.START_PREFETCH:
            self._saved.reads.append(record)
        else:
            self._saved.reads.appendleft(record)
        self._wake()

    def _prefetch(self, number: int) -> None:
        """Start reading storages that were saved before this one, the latest first."""
        saved = self._saved
        room_bytes = IN_FLIGHT_COUNT * saved.stack.largest(number)
        # Storages that a slow drive has not accepted yet are still on the device, and are used
        # first.
        over_bytes = max(0, saved.held_bytes - self._device_bytes)
        while (coming := saved.stack.next_before(number)) is not None:
            record = saved.records[coming]
            ahead_bytes = saved.ahead_bytes + record.nbytes
            if over_bytes + ahead_bytes > room_bytes or self._back_off.skips():
                return
            try:
                self._start_read(record, Act.START_PREFETCH)
            except torch.OutOfMemoryError:  # it is read when it is needed
                self._back_off.double()
                return
            self._back_off.reset()

    def _give_up_dropped(self) -> None:
        """Free the resources of records whose Activation was dropped."""
        dropped = self._saved.dropped
        for _ in range(len(dropped)):
            record = dropped[0]
            if record is self._job:
                dropped.rotate(-1)
                continue
            if record in self._saved.reads:
                self._saved.reads.remove(record)
            elif record.data is not None and record.filled is not None:
                record.filled.synchronize()  # perhaps no stream waits for the copies
            if record.state not in DEVICE_ONLY:
                self._garbage.append(record.key)
            self._saved.remove(record)
            self._errors.pop(record.key, None)
            self._changed.notify_all()
            dropped.popleft()  # last, so that a call after Ctrl-C repeats the rest

    def _wake(self) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "memascend-activations")
        return self._thread.submit(self._work)

    # -- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        """Read and write until no job is left; called without the lock."""
        try:
            with self._copies.current():
                self._run_jobs()
        except Exception as error:  # the device failed, in no job's own part
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        """End every read with an error, and report it to callers that wait for room."""
        error.with_traceback(None).__context__ = None  # frees the bytes on the device
        with self._changed:
            while self._saved.reads:
                self._fail_read(self._saved.reads.popleft(), error)
            self._errors[""] = error
            self._changed.notify_all()

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            record, data = job
            try:
                if record.state in (State.READING, State.PREFETCHING):
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
        self._discard_garbage()
        with self._changed:
            self._give_up_dropped()
            if self._saved.reads:
                self._job = self._saved.reads.popleft()
                assert self._job.data is not None
                return self._job, self._job.data
            while self._saved.waiting and self._has_to_write():
                record = self._job = next(iter(self._saved.waiting.values()))
                data = record.data
                if data is not None:
                    self._saved.change(record, Act.START_WRITE)
                    return record, data
                del self._saved.waiting[record.number]  # its graph was dropped just now
            self._job = None
            self._changed.notify_all()  # a put() may wait for a job that was dropped
            return None

    def _discard_garbage(self) -> None:
        with self._changed:
            keys, self._garbage = self._garbage, []
        for key in keys:
            self._copies.discard(key)

    def _write(self, record: Record, data: torch.Tensor) -> None:
        try:
            self._copies.reserve(record)
        except HostMemoryError as error:
            stored = [one for one in [*self._saved.records.values()] if one.state in ON_DRIVE]
            raise _too_many_activations(sum(one.nbytes for one in stored), str(error)) from None
        self._copies.write(record, data)
        with self._changed:
            self.traffic.written_bytes += record.nbytes
            if record.is_modified():  # take() raises for it
                self._fail_write(record)
            else:
                self._saved.change(record, Act.END_WRITE)
            self._changed.notify_all()

    def _read(self, record: Record, data: torch.Tensor) -> None:
        filled = self._copies.read(record, data)
        with self._changed:
            self.traffic.read_bytes += record.nbytes
            record.filled = filled
            self._saved.change(record, Act.END_READ)

    def _note_lost(self, key: str, error: Exception) -> None:
        with self._changed:
            self._give_up_dropped()
            if not key or any(one.key == key for one in self._saved.records.values()):
                self._errors[key] = error

    def _note_failure(self, record: Record, error: Exception) -> None:
        error.with_traceback(None).__context__ = None  # they refer to the bytes on the device
        with self._changed:
            if record.state in (State.READING, State.PREFETCHING):
                self._fail_read(record, error)
            else:
                self._errors[record.key] = error
                self._fail_write(record)

    def _fail_read(self, record: Record, error: Exception) -> None:
        record.error = error
        self._saved.change(record, Act.FAIL_READ)

    def _fail_write(self, record: Record) -> None:
        """Keep a storage on the device, where it counts as held, and discard its bytes."""
        self._saved.change(record, Act.FAIL_WRITE)
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
