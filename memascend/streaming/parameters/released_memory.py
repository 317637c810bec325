"""Device memory of parameters that were let go while queued kernels still use them.

The host runs ahead of the device. The memory of a released parameter is free only after the kernels
that use it have run; parameters gathered meanwhile need other memory. If parameters come from host
memory, nothing else slows the host, and a whole model could accumulate on the device. So the bytes
are counted, and before the next gather the host waits for the oldest ones.

Knows events and byte counts; never DeepSpeed. One thread at a time may call.
"""

from __future__ import annotations

from memascend.base.device_memory import RELEASED_COUNT_MIN
from memascend.base.interfaces import Event
from memascend.base.waiting import CopyTicket
from memascend.transfer.pending import Pending


class ReleasedMemory:
    """Released memory that waits for the device, oldest first."""

    def __init__(self, *, limit_bytes: int) -> None:
        """Start with no released memory.

        Args:
            limit_bytes: Bytes that may wait for the device. RELEASED_COUNT_MIN parameters may
                always wait, even if they are larger.
        """
        self._limit_bytes = limit_bytes
        self._waiting: Pending[int] = Pending(self._subtract)
        self._waiting_bytes = 0

    def note(self, nbytes: int, event: Event) -> None:
        """Count `nbytes` that are free once `event`, recorded at the release, has passed."""
        self._waiting.add(CopyTicket(event), nbytes)
        self._waiting_bytes += nbytes

    def wait(self) -> None:
        """Wait until no more than the limit is waiting."""
        self._waiting.release_done()
        while self._waiting_bytes > self._limit_bytes and len(self._waiting) > RELEASED_COUNT_MIN:
            self._waiting.wait_oldest()

    def _subtract(self, nbytes: int) -> None:
        self._waiting_bytes -= nbytes
