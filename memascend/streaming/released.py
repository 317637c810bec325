"""Device memory of parameters that were let go, and that the device may still compute with.

The host runs ahead of the device. A parameter that it lets go is used by kernels that have not run,
so its memory is not free before they have; what is gathered meanwhile needs other memory. Where
parameters come from host memory nothing else holds the host back, and a whole model could pile up.
So the bytes are counted, and before more is gathered the oldest are waited for.

Knows events and byte counts; never DeepSpeed. One thread at a time may call.
"""

from __future__ import annotations

from collections import deque

from memascend.base.device_memory import RELEASED_COUNT_MIN
from memascend.base.interfaces import Event


class ReleasedMemory:
    """What was let go, oldest first."""

    def __init__(self, *, limit_bytes: int) -> None:
        """Begin with nothing.

        Args:
            limit_bytes: Most bytes that may wait for the device, or RELEASED_COUNT_MIN parameters.
        """
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[Event, int]] = deque()
        self._waiting_bytes = 0

    def note(self, nbytes: int, event: Event) -> None:
        """Count memory that is free once an event has passed, recorded where it was let go."""
        self._waiting.append((event, nbytes))
        self._waiting_bytes += nbytes

    def wait(self) -> None:
        """Return when no more than the limit is waiting."""
        while self._waiting and self._waiting[0][0].query():
            self._pop()
        while self._waiting_bytes > self._limit_bytes and len(self._waiting) > RELEASED_COUNT_MIN:
            self._waiting[0][0].synchronize()
            self._pop()

    def _pop(self) -> None:
        self._waiting_bytes -= self._waiting.popleft()[1]
