"""Backs off from a device that is full. Knows numbers. Call with the stream's lock held."""

from __future__ import annotations


class BackOff:
    """Counts attempts to skip. A failed allocation is slow: torch empties its caches before it."""

    def __init__(self) -> None:
        """Skip no attempt."""
        self._skipped = 0  # attempts still to be skipped
        self._skipped_next = 1

    def reset(self) -> None:
        """Note that the device had room, or may have it again."""
        self._skipped, self._skipped_next = 0, 1

    def double(self) -> None:
        """Note that the device was full: skip twice as many attempts as the last time."""
        self._skipped, self._skipped_next = self._skipped_next, 2 * self._skipped_next

    def skips(self) -> bool:
        """Return whether to skip this attempt; counts the attempts that are skipped."""
        if self._skipped == 0:
            return False
        self._skipped -= 1
        return True
