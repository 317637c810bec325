"""Chooses the saved activation to read ahead next, and backs off while the device is full.

Knows numbers. Call with the stream's lock held.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class ReadAhead:
    """Numbers of storages that may be read ahead: the last before the one in use comes next."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._numbers: list[int] = []  # ascending
        self._left_out = 0  # attempts still to be skipped
        self._left_out_next = 1

    def add(self, number: int) -> None:
        """Add a storage's number."""
        insort(self._numbers, number)

    def remove(self, number: int) -> None:
        """Remove a storage's number; no effect if it is unknown."""
        place = bisect_left(self._numbers, number)
        if self._numbers[place : place + 1] == [number]:
            del self._numbers[place]

    def last_before(self, number: int) -> int | None:
        """Return the largest number below `number`; None when there is none."""
        place = bisect_left(self._numbers, number)
        return self._numbers[place - 1] if place else None

    def note_room(self) -> None:
        """Note that the device had room, or may have it again: reset the back-off."""
        self._left_out, self._left_out_next = 0, 1

    def note_full(self) -> None:
        """Note that the device was full. A failed allocation is slow: double the back-off."""
        self._left_out, self._left_out_next = self._left_out_next, 2 * self._left_out_next

    def is_left_out(self) -> bool:
        """Return whether to skip this attempt; counts the attempts that are skipped."""
        if self._left_out == 0:
            return False
        self._left_out -= 1
        return True
