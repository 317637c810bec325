"""How many bytes of what was saved for backward are where, without a look at all of it.

Knows records and their sizes. Whoever calls has the stream's lock.
"""

from __future__ import annotations

from bisect import bisect_left

from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activation_records import Record

_PLACES_MIN = 16


class RunningMaximum:
    """Sizes of things by rising numbers, and the largest of those before one. O(log n)."""

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: list[int] = []  # rising; those that were removed, too
        # A tree of maxima: the sizes begin in the middle, above any two is the larger one.
        self._tree = [0] * (2 * _PLACES_MIN)

    def add(self, number: int, nbytes: int) -> None:
        """Note the size of a thing; its number is larger than all before."""
        if len(self._numbers) == len(self._tree) // 2:
            self._make_room()
        self._numbers.append(number)
        self._set(len(self._numbers) - 1, nbytes)

    def remove(self, number: int) -> None:
        """Forget a thing; harmless where it is not known."""
        place = bisect_left(self._numbers, number)
        if place < len(self._numbers) and self._numbers[place] == number:
            self._set(place, 0)

    def largest(self, end: int | None = None) -> int:
        """Return the largest size, of things before a number if there is one; 0 of none."""
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
        """Give up the places of what was removed, and have as many again."""
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
    """Bytes of the storages that are saved: those that are held, read ahead, on the device at all.

    Each is told with a storage's own note of how it was counted: so it is counted once, whatever
    line Ctrl-C came at.
    """

    def __init__(self, traffic: ActivationTraffic) -> None:
        """Begin with none.

        Args:
            traffic: Gets the peak on the device.
        """
        self.held_bytes = 0
        self.ahead_bytes = 0
        self.device_bytes = 0
        self._traffic = traffic
        self._sizes = RunningMaximum()

    def largest(self, end: int | None = None) -> int:
        """Return the size of the largest that is saved; of those before a number."""
        return self._sizes.largest(end)

    def add(self, record: Record) -> None:
        """Count one that is saved."""
        self._sizes.add(record.number, record.nbytes)
        self.note_device(record)

    def remove(self, record: Record) -> None:
        """Count one no more, in no way."""
        self.count(record, is_held=False, is_ahead=False)
        self._count_on_device(record, False)
        self._sizes.remove(record.number)

    def count(self, record: Record, *, is_held: bool, is_ahead: bool) -> None:
        """Count it as held, as read ahead, or as neither."""
        held_bytes = self.held_bytes + (is_held - record.is_held) * record.nbytes
        self.held_bytes, record.is_held = held_bytes, is_held
        ahead_bytes = self.ahead_bytes + (is_ahead - record.is_ahead) * record.nbytes
        self.ahead_bytes, record.is_ahead = ahead_bytes, is_ahead

    def note_device(self, record: Record) -> None:
        """Count its bytes where they are on the device."""
        self._count_on_device(record, record.data is not None)
        peak_bytes = max(self._traffic.device_bytes_peak, self.device_bytes)
        self._traffic.device_bytes_peak = peak_bytes

    def _count_on_device(self, record: Record, is_there: bool) -> None:
        device_bytes = self.device_bytes + (is_there - record.is_on_device) * record.nbytes
        self.device_bytes, record.is_on_device = device_bytes, is_there
