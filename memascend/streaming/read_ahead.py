"""Which of what was saved for backward is to be read ahead next, and when there is no use in it.

Knows numbers. Whoever calls has the stream's lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class ReadAhead:
    """Numbers of storages that may be read ahead: the last before the one in use comes next."""

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: list[int] = []  # rising
        self._left_out = 0  # times that are still to be left out
        self._left_out_next = 1

    def add(self, number: int) -> None:
        """Have one read ahead in its turn."""
        insort(self._numbers, number)

    def remove(self, number: int) -> None:
        """Have one read ahead no more; harmless where it is not known."""
        place = bisect_left(self._numbers, number)
        if self._numbers[place : place + 1] == [number]:
            del self._numbers[place]

    def last_before(self, number: int) -> int | None:
        """Return the one that comes next when this one is in use; None when there is none."""
        place = bisect_left(self._numbers, number)
        return self._numbers[place - 1] if place else None

    def note_room(self) -> None:
        """Note that the device had room, or may have it again."""
        self._left_out, self._left_out_next = 0, 1

    def note_full(self) -> None:
        """Note that it had none, which it takes long to say: asked for less and less often."""
        self._left_out, self._left_out_next = self._left_out_next, 2 * self._left_out_next

    def is_left_out(self) -> bool:
        """Return whether there is no use in asking the device this time."""
        if self._left_out == 0:
            return False
        self._left_out -= 1
        return True
