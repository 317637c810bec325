"""Memory that the device may still compute with is bounded, and the host goes no further ahead."""

from __future__ import annotations

from memascend.base.device_memory import RELEASED_COUNT_MIN, released_bytes_max
from memascend.base.units import GIB, MIB
from memascend.streaming.parameters.released_memory import ReleasedMemory
from tests.support.streaming_fakes import FakeEvent


def let_go(memory: ReleasedMemory, *sizes: int) -> list[FakeEvent]:
    events = [FakeEvent() for _ in sizes]
    for event, nbytes in zip(events, sizes, strict=True):
        memory.wait()
        memory.note(nbytes, event)
    return events


def waiting(events: list[FakeEvent]) -> list[bool]:
    return [not event.passed for event in events]


def test_the_oldest_are_waited_for_and_no_more_than_the_limit_is_left() -> None:
    memory = ReleasedMemory(limit_bytes=50)
    events = let_go(memory, *[10] * 9)
    memory.wait()
    assert waiting(events) == [False] * 4 + [True] * 5
    assert [event.wait_count for event in events] == [1] * 4 + [0] * 5


def test_what_has_passed_by_itself_is_not_waited_for() -> None:
    memory = ReleasedMemory(limit_bytes=50)
    events = let_go(memory, *[10] * 5)
    for event in events:
        event.passed = True
    more = let_go(memory, *[10] * 5)
    memory.wait()
    assert sum(event.wait_count for event in events + more) == 0


def test_a_few_may_wait_however_large_they_are() -> None:
    memory = ReleasedMemory(limit_bytes=50)
    events = let_go(memory, *[1000] * 4)
    memory.wait()
    assert waiting(events) == [False] * (4 - RELEASED_COUNT_MIN) + [True] * RELEASED_COUNT_MIN


class Clock:
    """A host and a device that computes one layer after the other, in a time of their own."""

    LAYER_S = 1e-3

    def __init__(self) -> None:
        self.host_s = self.device_s = self.busy_s = 0.0

    def launch(self) -> DeviceEvent:
        """Have the device compute a layer as soon as it may; return the event behind it."""
        self.device_s = max(self.device_s, self.host_s) + self.LAYER_S
        self.busy_s += self.LAYER_S
        return DeviceEvent(self, self.device_s)

    @property
    def idle(self) -> float:
        """The share of the time in which the device had nothing to do."""
        return 1 - self.busy_s / self.device_s


class DeviceEvent:
    def __init__(self, clock: Clock, passes_s: float) -> None:
        self._clock, self._passes_s = clock, passes_s

    def record(self) -> None: ...

    def query(self) -> bool:
        return self._clock.host_s >= self._passes_s

    def synchronize(self) -> None:
        self._clock.host_s = max(self._clock.host_s, self._passes_s)

    def wait(self) -> None: ...


#: The largest matrices of a model with 8 billion parameters, each a layer of a millisecond.
MATRIX_BYTES = 112 * MIB
#: Python's time for a module, and what holds the host up now and then: a read, other threads.
PYTHON_S, DELAY_S, BETWEEN_DELAYS = 0.4e-3, 5e-3, 12


def idle_share(device_bytes: int) -> float:
    """Return for how much of a pass a device of this size stands still."""
    clock, memory = Clock(), ReleasedMemory(limit_bytes=released_bytes_max(device_bytes))
    for layer in range(40 * BETWEEN_DELAYS):
        memory.wait()
        clock.host_s += DELAY_S if layer % BETWEEN_DELAYS == 0 else PYTHON_S
        memory.note(MATRIX_BYTES, clock.launch())
    return clock.idle


def test_a_large_device_does_not_stand_still_while_the_host_is_held_up() -> None:
    assert max(idle_share(size * GIB) for size in (24, 80)) <= 0.05
    # So little may wait on a small one that the device feels it.
    assert idle_share(8 * GIB) >= 0.15
