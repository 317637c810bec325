"""Saved storages in the order of saving, from whose end backward takes them.

Knows numbers and sizes. Call with the stream's lock held. A call that Ctrl-C interrupted can be
repeated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate

_ENTRIES_MIN = 16


class SavedStack:
    """Finds the largest storage below a number, and the last one below it to prefetch.

    Both cost O(log n) while storages are removed from the end, as backward does. If others are
    removed, the next search costs O(n) once.
    """

    def __init__(self) -> None:
        """Create an empty stack."""
        self._entries: list[tuple[int, int]] = []  # (number, nbytes), ascending; removed: 0 bytes
        self._maxima = [0]  # for i up to some entry: the largest size of the first i entries
        self._entries_max = _ENTRIES_MIN
        self._to_prefetch: list[int] = []  # ascending

    def push(self, number: int, nbytes: int) -> None:
        """Add a storage; `number` must be larger than all before."""
        if len(self._entries) >= self._entries_max:
            kept = [entry for entry in self._entries if entry[1]]
            self._entries, self._maxima = kept, [0]
            self._entries_max = max(_ENTRIES_MIN, 2 * len(kept))
        self._entries.append((number, nbytes))

    def remove(self, number: int) -> None:
        """Remove a storage; no effect if it is unknown."""
        self.leave_out(number)
        index = self._index(number)
        if index == len(self._entries) or self._entries[index][0] != number:
            return
        self._entries[index] = (number, 0)
        end = len(self._entries)
        while end and not self._entries[end - 1][1]:
            end -= 1
        del self._maxima[1 + min(index, end) :]
        del self._entries[end:]

    def largest(self, before: int | None = None) -> int:
        """Return the largest size, of numbers below `before` if given; 0 if there are none."""
        end = len(self._entries) if before is None else self._index(before)
        begin = len(self._maxima) - 1
        if begin < end:
            sizes = [nbytes for _, nbytes in self._entries[begin:end]]
            self._maxima[begin:] = accumulate(sizes, max, initial=self._maxima[begin])
        return self._maxima[end]

    def prefetch(self, number: int) -> None:
        """Add a storage to those that are prefetched."""
        if not self.prefetches(number):
            insort(self._to_prefetch, number)

    def leave_out(self, number: int) -> None:
        """Remove a storage from those that are prefetched; no effect if it is not one."""
        if self.prefetches(number):
            del self._to_prefetch[bisect_left(self._to_prefetch, number)]

    def prefetches(self, number: int) -> bool:
        """Return whether a storage is prefetched when its turn comes."""
        index = bisect_left(self._to_prefetch, number)
        return self._to_prefetch[index : index + 1] == [number]

    def next_before(self, number: int) -> int | None:
        """Return the largest number below `number` to prefetch; None if there is none."""
        index = bisect_left(self._to_prefetch, number)
        return self._to_prefetch[index - 1] if index else None

    def _index(self, number: int) -> int:
        """Return the number of entries before a storage's number."""
        return bisect_left(self._entries, (number, 0))
