"""Bytes of saved activations by place, kept up to date without iterating over all of them.

Knows records and their sizes. Call with the stream's lock held.
"""

from __future__ import annotations

from bisect import bisect_left

from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activations.records import Record

_PLACES_MIN = 16


class RunningMaximum:
    """Sizes by ascending number; finds the maximum over numbers below a bound. O(log n)."""

    def __init__(self) -> None:
        """Create an empty sequence."""
        self._numbers: list[int] = []  # ascending, removed ones included
        # A tree of maxima: leaves (sizes) in the second half, each node the larger of its children.
        self._tree = [0] * (2 * _PLACES_MIN)

    def add(self, number: int, nbytes: int) -> None:
        """Add a size; `number` must be larger than all before."""
        if len(self._numbers) == len(self._tree) // 2:
            self._make_room()
        self._numbers.append(number)
        self._set(len(self._numbers) - 1, nbytes)

    def remove(self, number: int) -> None:
        """Remove a number; no effect if it is unknown."""
        place = bisect_left(self._numbers, number)
        if place < len(self._numbers) and self._numbers[place] == number:
            self._set(place, 0)

    def largest(self, end: int | None = None) -> int:
        """Return the largest size, of numbers below `end` if given; 0 if there are none."""
        if end is None:
            return self._tree[1]
        half = len(self._tree) // 2
        begin, after = half, half + bisect_left(self._numbers, end)
        largest = 0
        while begin < after:
            if begin % 2:
                largest = max(largest, self._tree[begin])
                begin += 1
            if after % 2:
                after -= 1
                largest = max(largest, self._tree[after])
            begin, after = begin // 2, after // 2
        return largest

    def _set(self, place: int, nbytes: int) -> None:
        place += len(self._tree) // 2
        self._tree[place] = nbytes
        while place > 1:
            place //= 2
            self._tree[place] = max(self._tree[2 * place], self._tree[2 * place + 1])

    def _make_room(self) -> None:
        """Drop removed entries and resize the tree so that at least half of it is free."""
        half = len(self._tree) // 2
        kept = [(n, size) for n, size in zip(self._numbers, self._tree[half:], strict=True) if size]
        room = _PLACES_MIN
        while room < 2 * len(kept):
            room *= 2
        tree = [0] * room + [size for _, size in kept] + [0] * (room - len(kept))
        for place in reversed(range(1, room)):
            tree[place] = max(tree[2 * place], tree[2 * place + 1])
        self._numbers, self._tree = [number for number, _ in kept], tree


class SavedSizes:
    """Bytes of saved storages: held, prefetched, and in total on the device.

    Each Record stores how it is counted, so counting is idempotent: a call that Ctrl-C interrupted
    can be repeated.
    """

    def __init__(self, traffic: ActivationTraffic) -> None:
        """Start at zero.

        Args:
            traffic: Receives the peak bytes on the device.
        """
        self.held_bytes = 0
        self.ahead_bytes = 0
        self.device_bytes = 0
        self._traffic = traffic
        self._sizes = RunningMaximum()

    def largest(self, end: int | None = None) -> int:
        """Return the bytes of the largest saved storage, of numbers below `end` if given."""
        return self._sizes.largest(end)

    def add(self, record: Record) -> None:
        """Count a newly saved storage."""
        self._sizes.add(record.number, record.nbytes)
        self.note_device(record)

    def remove(self, record: Record) -> None:
        """Stop counting a storage."""
        self.count(record, is_held=False, is_ahead=False)
        self._count_on_device(record, False)
        self._sizes.remove(record.number)

    def count(self, record: Record, *, is_held: bool, is_ahead: bool) -> None:
        """Count a storage as held, as prefetched, or as neither."""
        held_bytes = self.held_bytes + (is_held - record.is_held) * record.nbytes
        self.held_bytes, record.is_held = held_bytes, is_held
        ahead_bytes = self.ahead_bytes + (is_ahead - record.is_ahead) * record.nbytes
        self.ahead_bytes, record.is_ahead = ahead_bytes, is_ahead

    def note_device(self, record: Record) -> None:
        """Count a storage's bytes if they are on the device; update the peak."""
        self._count_on_device(record, record.data is not None)
        peak_bytes = max(self._traffic.device_bytes_peak, self.device_bytes)
        self._traffic.device_bytes_peak = peak_bytes

    def _count_on_device(self, record: Record, is_there: bool) -> None:
        device_bytes = self.device_bytes + (is_there - record.is_on_device) * record.nbytes
        self.device_bytes, record.is_on_device = device_bytes, is_there
