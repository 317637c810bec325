"""Locks on open files and folders; the kernel takes them back from a process that has ended."""

from __future__ import annotations

import fcntl
from time import monotonic, sleep

_POLL_S = 0.02


def lock_within(descriptor: int, seconds: float) -> bool:
    """Take the lock for this process alone; return False where another has it for so long.

    Raises:
        OSError: The file system knows no locks.
    """
    end = monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > end:
                return False
            sleep(_POLL_S)
        else:
            return True
