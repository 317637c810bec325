"""How fast volumes are: what a rate counts, what is asked of drives, and what is given back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memascend import _core
from memascend.base.units import MIB
from memascend.errors import StoreError
from memascend.volumes import speed
from memascend.volumes.speed import TICKET_BYTES_MIN, Bench, Load

LOAD = Load(chunk_bytes=MIB, queue_depth=4, engine="threads", span_bytes=16 * MIB)
PATIENCE_S = 60.0


@pytest.fixture
def volumes(tmp_path: Path) -> list[_core.VolumeOptions]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [_core.VolumeOptions(str(tmp_path / name)) for name in ("a", "b")]


# -- real drives -----------------------------------------------------------------------------------


def test_volumes_are_really_measured_side_by_side(
    tmp_path: Path, volumes: list[_core.VolumeOptions]
) -> None:
    with Bench(volumes, LOAD) as bench:
        assert bench.engine == "threads"
        for mode in ("read", "write", "mixed"):
            rates = bench.run(mode, 0.02)
            assert len(rates) == 2
            assert all(rate > 0 for rate in rates)
    assert os.listdir(tmp_path / "a") == []


def open_files(folder: Path) -> int:
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(link.startswith(f"{folder}/") for link in links)


@pytest.mark.parametrize(
    ("load", "error"),
    [(LOAD, StoreError), (Load(chunk_bytes=MIB, queue_depth=0, engine="threads"), ValueError)],
)
def test_a_volume_or_a_load_that_will_not_do_leaves_nothing_open(
    tmp_path: Path,
    volumes: list[_core.VolumeOptions],
    load: Load,
    error: type[Exception],
) -> None:
    too_small = _core.VolumeOptions(volumes[1].path, capacity_bytes=MIB)
    with pytest.raises(error):
        Bench([volumes[0], too_small], load)
    assert open_files(tmp_path) == 0


# -- drives whose speed is known -------------------------------------------------------------------


class Clock:
    """Time passes when somebody waits for a transfer."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Ticket:
    def __init__(self, store: Store, nbytes: int, kind: str) -> None:
        self._store, self.nbytes, self._kind = store, nbytes, kind

    def wait(self) -> None:
        self._store.in_flight -= 1
        self._store.clock.now += self.nbytes / self._store.rates[self._kind]
        if self._store.fails == self._kind:
            raise StoreError(5, f"{self._kind} failed")


class Store:
    """One drive: transfers take their time one after the other."""

    clock: Clock
    made: list[Store]
    rates: dict[str, float]
    fails = ""
    room_bytes = 1 << 40
    engine_name = "threads"

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.reserved_bytes = self.in_flight = self.in_flight_max = 0
        self.places: list[tuple[str, int]] = []
        self.is_closed = False
        self.made.append(self)

    def available_bytes(self) -> int:
        return self.room_bytes

    def reserve(self, *, key: str, nbytes: int) -> None:
        self.reserved_bytes = nbytes

    def write(self, *, nbytes: int, offset: int, **_: object) -> Ticket:
        return self._start("write", nbytes, offset)

    def read(self, *, nbytes: int, offset: int, **_: object) -> Ticket:
        return self._start("read", nbytes, offset)

    def close(self) -> None:
        self.is_closed = True

    def _start(self, kind: str, nbytes: int, offset: int) -> Ticket:
        assert offset + nbytes <= self.reserved_bytes
        self.places.append((kind, offset))
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        return Ticket(self, nbytes, kind)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The stores that were opened, on drives of 1 and 2 GB/s for reading and writing."""
    clock = Clock()
    made: list[Store] = []

    class ThisStore(Store):
        pass

    ThisStore.clock, ThisStore.made = clock, made
    ThisStore.rates = {"read": 1e9, "write": 2e9}
    monkeypatch.setattr(speed._core, "Store", ThisStore)
    monkeypatch.setattr(speed, "time", clock)
    return made


VOLUME = _core.VolumeOptions("/drive")


def test_a_rate_is_that_of_full_queues(stores: list[Store]) -> None:
    with Bench([VOLUME], LOAD) as bench:
        assert bench.run("read", 1.0) == [pytest.approx(1e9)]
        assert bench.run("write", 1.0) == [pytest.approx(2e9)]
        [mixed] = bench.run("mixed", 1.0)
        assert pytest.approx(mixed, rel=0.01) == 2 / (1 / 1e9 + 1 / 2e9)
    assert stores[0].in_flight == 0
    assert stores[0].is_closed


def test_all_that_is_moved_is_told(stores: list[Store]) -> None:
    told: list[int] = []
    with Bench([VOLUME], LOAD, told.append) as bench:
        assert sum(told) == LOAD.span_bytes
        bench.run("mixed", 0.1)
    assert sum(told) == TICKET_BYTES_MIN * len(stores[0].places) > LOAD.span_bytes


def test_the_load_is_that_of_training(stores: list[Store]) -> None:
    with Bench([VOLUME], Load(chunk_bytes=8 * MIB, queue_depth=16, span_bytes=1024 * MIB)) as bench:
        bench.run("read", 0.1)
    [store] = stores
    options = store.options
    assert (options["chunk_bytes"], options["queue_depth"]) == (8 * MIB, 16)
    assert options["volumes"] == [VOLUME]
    assert store.reserved_bytes == 1024 * MIB
    assert store.in_flight_max >= 16


def test_the_span_is_written_before_anything_is_measured(stores: list[Store]) -> None:
    span = [place * TICKET_BYTES_MIN for place in range(LOAD.span_bytes // TICKET_BYTES_MIN)]
    with Bench([VOLUME], LOAD) as bench:
        [store] = stores
        assert store.places == [("write", offset) for offset in span]
        store.places.clear()
        bench.run("read", 0.1)
        assert set(store.places) == {("read", offset) for offset in span}
        store.places.clear()
        bench.run("mixed", 0.1)
        kinds = [kind for kind, _ in store.places]
        assert kinds == (["write", "read"] * len(kinds))[: len(kinds)]


def test_of_a_slow_drive_only_what_was_written_in_time_is_read(stores: list[Store]) -> None:
    """Reads of what was only reserved would be answered without the drive."""
    seconds = TICKET_BYTES_MIN / 2e9  # for one ticket
    load = Load(chunk_bytes=MIB, queue_depth=4, span_bytes=64 * MIB, fill_seconds=2.5 * seconds)
    with Bench([VOLUME], load) as bench:
        written = {offset for _, offset in stores[0].places}
        assert 2 <= len(written) < 16
        stores[0].places.clear()
        bench.run("read", 0.1)
    assert {offset for _, offset in stores[0].places} == written


def test_at_least_two_tickets_are_written(stores: list[Store]) -> None:
    with Bench([VOLUME], Load(chunk_bytes=MIB, queue_depth=4, fill_seconds=0.0)):
        assert len(stores[0].places) == 2


def test_at_most_half_of_the_room_is_used(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed._core.Store, "room_bytes", 40 * MIB)
    with Bench([VOLUME], Load(chunk_bytes=MIB, queue_depth=4)):
        assert stores[0].reserved_bytes == 20 * MIB


def test_a_drive_that_takes_longer_than_asked_gets_up_to_five_times_as_long(
    stores: list[Store],
) -> None:
    with Bench([VOLUME], LOAD) as bench:
        [store] = stores
        # A ticket takes as long as asked: of a queue of some only the first would come back.
        store.rates["read"] = TICKET_BYTES_MIN / 1.0
        store.places.clear()
        began = store.clock.now
        assert bench.run("read", 1.0) == [pytest.approx(TICKET_BYTES_MIN)]
        queue = store.in_flight_max
        assert store.clock.now - began <= (1 + 5 + queue) * 1.0
        assert len(store.places) >= 2 * queue


def test_the_span_ends_when_what_was_written_is_enough(stores: list[Store]) -> None:
    seen: list[int] = []

    def watch(nbytes: int) -> bool:
        seen.append(nbytes)
        return len(seen) == 5

    load = Load(chunk_bytes=MIB, queue_depth=4, span_bytes=256 * MIB, span_share=0.25)
    with Bench([VOLUME], load, None, [watch]) as bench:
        [store] = stores
        assert seen == [TICKET_BYTES_MIN] * 5
        written = {offset for _, offset in store.places}
        assert 5 <= len(written) <= 5 + store.in_flight_max
        store.places.clear()
        bench.run("read", 0.1)
    assert {offset for _, offset in store.places} == written


def test_a_share_of_the_room_limits_the_span(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed._core.Store, "room_bytes", 80 * MIB)
    with Bench([VOLUME], Load(chunk_bytes=MIB, queue_depth=4, span_share=0.75)):
        assert stores[0].reserved_bytes == 60 * MIB


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_transfer_that_fails_is_an_error_and_closes_all(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(speed._core.Store, "fails", kind)

    def measure() -> None:
        with Bench([VOLUME, VOLUME], LOAD) as bench:
            bench.run("read", 0.1)

    with pytest.raises(StoreError, match=f"{kind} failed"):
        measure()
    assert [store.is_closed for store in stores] == [True, True]


# -- all at the same time --------------------------------------------------------------------------


def together(actions: list[Callable[[], float]]) -> list[float]:
    return speed._together(actions, lambda action: action())  # type: ignore[arg-type,call-arg]


def test_volumes_are_busy_at_the_same_time() -> None:
    meeting = threading.Barrier(3)

    def meet(rate: float) -> Callable[[], float]:
        def run() -> float:
            meeting.wait(PATIENCE_S)
            return rate

        return run

    assert together([meet(1.0), meet(2.0), meet(3.0)]) == [1.0, 2.0, 3.0]


def test_an_error_on_one_volume_waits_for_the_others() -> None:
    ended: list[str] = []

    def fail() -> float:
        raise StoreError(5, "broken")

    def work() -> float:
        ended.append("other")
        return 1.0

    with pytest.raises(StoreError, match="broken"):
        together([fail, work])
    assert ended == ["other"]
