"""Gradients that wait on the device for a thread that copies them, so that backward goes on.

The hook that brings a gradient runs on the thread that launches backward. If it waited for a
staging slot or for a tile, the device would run out of work. So it leaves a copy of the gradient on
the device, within a fixed number of bytes, and returns. The thread stores the gradients in order of
arrival, on a stream of its own.

While gradients wait, their stream and the tiles of early steps belong to that thread. Any other
caller waits until none is left: its methods are `locked` (memascend/deepspeed/optimizer/locked.py).
Knows tensors and the device; not where gradients are stored.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from memascend.base.interfaces import Device, Event, OnStream
from memascend.base.units import format_nbytes
from memascend.base.waiting import event_here
from memascend.memory.guard import Guard

log = logging.getLogger(__name__)

#: Stores a gradient; its copies are issued on the current stream when it returns.
StoreGradient = Callable[[torch.Tensor], None]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A gradient on the device; None once it is stored, or dropped."""

    gradient: torch.Tensor | None
    nbytes: int
    arrived: Event | None
    store: StoreGradient
    future: Future[None] | None = None


class GradientsOnDevice:
    """A queue of gradients. Hooks put; any thread may wait."""

    def __init__(self, device: Device, guard: Guard) -> None:
        """Start without room: every gradient is left to its hook.

        Args:
            device: The device of the gradients. Without streams there is never room.
            guard: Has the runtime's lock, under which a gradient joins the queue.
        """
        self._device, self._guard = device, guard
        self._waiting: deque[_Waiting] = deque()
        self._error: Exception | None = None
        self._is_dropping = False
        self._thread: ThreadPoolExecutor | None = None
        self._thread_id = 0
        self._on_stream: OnStream | None = None  # of the thread, once there is one
        #: Bytes within which gradients wait, and the most that have waited.
        self.room_bytes = self.bytes_peak = 0

    @property
    def has_streams(self) -> bool:
        """Whether the device copies by itself, so that waiting for it gains something."""
        return self._device.new_stream is not None

    # -- hooks -----------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Return whether a gradient of `nbytes` may wait; larger ones are stored by their hook."""
        return self.has_streams and 0 < nbytes <= self.room_bytes

    def grant(self, nbytes: int) -> bool:
        """Return whether `nbytes` of the room may hold other values now: no gradient may wait."""
        if self.held_bytes or not self.has_room(nbytes):
            return False
        self.bytes_peak = max(self.bytes_peak, nbytes)
        return True

    def put(self, gradient: torch.Tensor, store: StoreGradient) -> bool:
        """Leave a gradient to the thread, once there is room; it may be overwritten on return.

        Returns:
            False if the caller must store it: it is too large, or the device has no memory for it.
            No gradient waits then.

        Raises:
            StoreError: An earlier gradient could not be stored; other errors likewise.
        """
        while self.has_room(gradient.nbytes):
            self._wait_for_room(gradient.nbytes)
            self.check()
            with self._guard.lock:
                if self.held_bytes + gradient.nbytes <= self.room_bytes:
                    if self._join(gradient, store):
                        return True
                    self._give_up(gradient.nbytes)
        self.wait()
        self.check()
        return False

    def check(self) -> None:
        """Raise the error that kept a gradient from being stored, until they are abandoned."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # which would keep device memory

    # -- any thread ------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Return whether no gradient waits; True on the thread that stores them."""
        return not self._waiting or threading.get_ident() == self._thread_id

    def wait(self) -> None:
        """Wait until no gradient waits; errors are left to `check`."""
        if self.is_quiet():
            return
        if self._guard.is_held():
            raise AssertionError(
                "gradients are waited for with the lock that their thread needs, for ever. cause: "
                "a mistake of memascend. fix: please report it"
            )
        waiting = list(self._waiting)
        with suppress(RuntimeError):  # the interpreter ends, and has waited for the thread
            # Behind all of them, also one whose future was lost by Ctrl-C.
            self._get_thread().submit(_do_nothing).result()
        with self._guard.lock:  # hooks add and remove, too
            for one in waiting:
                with suppress(ValueError):  # a hook has removed it
                    self._waiting.remove(one)

    def abandon(self) -> None:
        """Drop the gradients that wait, and errors."""
        self._is_dropping = True
        try:
            self.wait()
        finally:
            self._is_dropping = False
        self._error = None

    def close(self) -> None:
        """Drop the gradients that wait, and end the thread."""
        self.abandon()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    # -- inner -----------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Device bytes of the gradients that wait now."""
        # A copy, made at once: hooks of another thread may add one meanwhile.
        return sum(one.nbytes for one in tuple(self._waiting) if one.gradient is not None)

    def _wait_for_room(self, nbytes: int) -> None:
        while self.held_bytes + nbytes > self.room_bytes:
            waiting = tuple(self._waiting)
            oldest = next((one for one in waiting if one.gradient is not None), None)
            if oldest is None or oldest.future is None:
                self.wait()
            else:
                oldest.future.result()

    def _join(self, gradient: torch.Tensor, store: StoreGradient) -> bool:
        """Queue a copy of a gradient, whose memory DeepSpeed uses again; False without memory."""
        try:
            kept = gradient.clone()
        except torch.OutOfMemoryError:
            return False
        while self._waiting and self._waiting[0].gradient is None:
            self._waiting.popleft()
        self._is_dropping = False  # Ctrl-C may have left it set
        one = _Waiting(kept, kept.nbytes, event_here(self._device.new_event), store)
        self._waiting.append(one)
        self.bytes_peak = max(self.bytes_peak, self.held_bytes)
        one.future = self._get_thread().submit(self._serve, one)
        return True

    def _give_up(self, nbytes: int) -> None:
        """Leave gradients to their hooks from now on: each try would empty torch's cache."""
        self.room_bytes = 0
        log.warning(
            "memascend: the device has no memory for a gradient of %s that waits for the drive, so "
            "backward waits from now on. fix: fewer tokens in a micro-batch, or a smaller "
            "memascend.streaming.gradients.device_bytes",
            format_nbytes(nbytes),
        )

    def _get_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "memascend-gradients")
        return self._thread

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self, one: _Waiting) -> None:
        self._thread_id = threading.get_ident()
        try:
            if self._error is None and not self._is_dropping:
                self._device.use_here()
                if self._on_stream is None and self._device.new_stream is not None:
                    self._on_stream = self._device.new_stream()
                with nullcontext() if self._on_stream is None else self._on_stream():
                    self._serve_on_stream(one)
        except Exception as error:
            error.with_traceback(None).__context__ = None  # frees the bytes on the device
            self._error = self._error or error
        finally:
            one.gradient = None

    def _serve_on_stream(self, one: _Waiting) -> None:
        assert one.gradient is not None
        try:
            if one.arrived is not None:
                one.arrived.wait()
            one.store(one.gradient)
        finally:
            copied = event_here(self._device.new_event)
            if copied is not None:
                copied.synchronize()  # before the gradient's memory is used again


def _do_nothing() -> None:
    """Mark a point in the thread's queue: its future is done when all gradients before it are."""
