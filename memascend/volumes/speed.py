"""The speed of volumes, all at the same time, through the engine that training uses.

Every volume gets a store of its own and a thread that keeps it full of reads, writes or both, with
the request size and queue depth of training. All run at once, since drives behind one switch share
its PCIe lanes. The memory is two buffers and a bounce buffer for any number of drives.

Needs only the native core; each call opens and closes all it uses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from memascend import _core
from memascend.base.progress import Advance
from memascend.base.units import MIB

Mode = Literal["read", "write", "mixed"]
#: Called with the bytes of each ended write of the span, in their order; true when it is enough.
Watch = Callable[[int], bool]

#: Minimum bytes of one ticket: several requests, so that Python does not limit a fast drive.
TICKET_BYTES_MIN = 4 * MIB
_KEY = "speed"
_BOUNCE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Load:
    """The load on each volume."""

    chunk_bytes: int  # bytes of one request
    queue_depth: int  # requests in flight on each volume
    engine: str = "auto"  # "auto", "uring", "libaio" or "threads"
    span_bytes: int = 256 * MIB  # bytes of each volume that are written and read, over and over
    span_share: float = 0.5  # maximum part of a volume's free space that the span takes
    #: Maximum time to write the span before the first measurement; the part written by then becomes
    #: the span.
    fill_seconds: float = 10.0


class Bench:
    """Volumes under one load; `run` may be called repeatedly. Used by one thread."""

    def __init__(
        self,
        volumes: Sequence[_core.VolumeOptions],
        load: Load,
        advance: Advance | None = None,
        watches: Sequence[Watch] = (),
    ) -> None:
        """Open a store on each volume and write the span, on all of them at once.

        `advance` is called from the threads of the volumes. `watches` has one for each volume, or
        none; what is written when it says that it is enough becomes the span.

        Raises:
            OSError: A volume cannot be opened, written, or has less room than two tickets.
            ValueError: The load is not one the engine can run.
        """
        ticket_bytes = max(TICKET_BYTES_MIN, load.chunk_bytes)
        self._memory = [_Pages(ticket_bytes), _Pages(ticket_bytes), _Pages(_BOUNCE_BYTES)]
        # Random, since compressible data would flatter drives that compress.
        self._memory[0].map.write(os.urandom(ticket_bytes))
        self._volumes: list[_LoadedVolume] = []
        try:
            for volume, watch in zip(volumes, watches or [_never] * len(volumes), strict=True):
                self._volumes.append(_LoadedVolume(volume, load, advance, watch, *self._memory))
            _together(self._volumes, lambda volume: volume.fill(load.fill_seconds))
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> str:
        """Name of the engine in use."""
        return self._volumes[0].store.engine_name

    def run(self, mode: Mode, seconds: float) -> list[float]:
        """Return the bytes per second of each volume, all of them busy at the same time.

        Counts from the moment the queues are full, which takes at most `seconds` more. If a drive
        needs longer than `seconds` for one turn of a full queue, it gets up to five times as long,
        since completions within less come in bursts.

        Raises:
            StoreError: A transfer failed.
        """
        return _together(self._volumes, lambda volume: volume.run(mode, seconds))

    def traffic(self) -> list[dict[str, Any]]:
        """Return the traffic of each volume so far, with the latency of its requests."""
        return [volume.store.volume_stats()[0].traffic for volume in self._volumes]

    def close(self) -> None:
        """End the I/O and free the space."""
        for volume in self._volumes:
            volume.store.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pages:
    """Page-aligned memory."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        self._view = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._view)


class _LoadedVolume:
    """One volume: its store, and the span that is written and read."""

    def __init__(
        self,
        volume: _core.VolumeOptions,
        load: Load,
        advance: Advance | None,
        is_enough: Watch,
        source: _Pages,
        target: _Pages,
        bounce: _Pages,
    ) -> None:
        self._source, self._target = source, target
        self._advance, self._is_enough = advance, is_enough
        self.is_stopped = False
        self.store = _core.Store(
            volumes=[volume],
            engine=load.engine,
            queue_depth=load.queue_depth,
            chunk_bytes=load.chunk_bytes,
            bounce_address=bounce.address,
            bounce_nbytes=bounce.nbytes,
            bounce_hold=None,
        )
        try:
            room_bytes = int(self.store.available_bytes() * load.span_share)
            span_bytes = min(load.span_bytes, room_bytes)
            self._count = max(2, span_bytes // source.nbytes)
            self.store.reserve(key=_KEY, nbytes=self._count * source.nbytes)
        except BaseException:
            self.store.close()
            raise
        in_flight_bytes = load.queue_depth * load.chunk_bytes
        self._in_flight_max = min(self._count, 2 + in_flight_bytes // source.nbytes)

    def fill(self, seconds: float) -> float:
        """Write the span once; the part not written in time, or not needed, is cut off.

        A read of space that is only reserved would not reach the drive.
        """
        end = time.monotonic() + seconds
        tickets: deque[_core.Ticket] = deque()
        written = 0
        while (
            not self.is_stopped
            and written < self._count
            and (written < 2 or time.monotonic() < end)
        ):
            if len(tickets) == self._in_flight_max:
                ended = tickets.popleft()
                self._wait(ended)
                if self._is_enough(ended.nbytes) and written >= 2:
                    break
            tickets.append(self._start(written, writes=True))
            written += 1
        for ticket in tickets:
            self._wait(ticket)
        self._count = written
        self._in_flight_max = min(self._in_flight_max, written)
        return 0.0

    def run(self, mode: Mode, seconds: float) -> float:
        tickets: deque[_core.Ticket] = deque()
        done_bytes, done_count, turn = 0, 0, 0
        start = now = time.monotonic()
        is_warm = False
        while not self.is_stopped and (
            not is_warm or now - start < seconds or self._is_short(done_count, now - start, seconds)
        ):
            while len(tickets) < self._in_flight_max:
                # Never two transfers in flight on one place: the second would wait for the first.
                writes = mode == "write" or (mode == "mixed" and turn % 2 == 0)
                tickets.append(self._start(turn % self._count, writes=writes))
                turn += 1
            ticket = tickets.popleft()
            self._wait(ticket)
            done_bytes += ticket.nbytes
            done_count += 1
            now = time.monotonic()
            if not is_warm and (done_count >= self._in_flight_max or now - start >= seconds):
                # The queue was empty at first, so completions until now give no rate.
                is_warm, start, done_bytes, done_count = True, now, 0, 0
        for ticket in tickets:  # not counted: the other volumes may have ended already
            self._wait(ticket)
        return done_bytes / (now - start)

    def _is_short(self, done_count: int, elapsed: float, seconds: float) -> bool:
        """Return whether less than one turn of the queue has completed and time is left."""
        return done_count < self._in_flight_max and elapsed < 5 * seconds

    def _wait(self, ticket: _core.Ticket) -> None:
        ticket.wait()
        if self._advance is not None:
            self._advance(ticket.nbytes)

    def _start(self, place: int, *, writes: bool) -> _core.Ticket:
        memory = self._source if writes else self._target
        transfer = self.store.write if writes else self.store.read
        return transfer(
            key=_KEY, address=memory.address, nbytes=memory.nbytes, offset=place * memory.nbytes
        )


def _never(nbytes: int) -> bool:
    return False


def _together(
    volumes: Sequence[_LoadedVolume], action: Callable[[_LoadedVolume], float]
) -> list[float]:
    """Run an action on all volumes at the same time; raise the first error."""
    barrier = threading.Barrier(len(volumes))

    def work(volume: _LoadedVolume) -> float:
        barrier.wait()
        return action(volume)

    with ThreadPoolExecutor(len(volumes)) as threads:
        try:
            return list(threads.map(work, volumes))
        except BaseException:  # Ctrl-C, too: stop the other threads
            for volume in volumes:
                volume.is_stopped = True
            raise
