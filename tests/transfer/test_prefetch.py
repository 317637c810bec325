"""First chunks read ahead: what they save of a wait, and that nobody else waits or goes wrong."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from memascend.errors import StoreError
from memascend.transfer.staging import StagingSlots
from tests.support.staging_slots import SLOT_BYTES, make_staging
from tests.support.streaming_fakes import FakeStore, FakeTicket, LateDevice

SLOT_COUNT = 4
SLOT_NUMEL = SLOT_BYTES // 4
CHUNK_COUNT = 10
NUMEL = CHUNK_COUNT * SLOT_NUMEL - 5


class Drive(FakeStore):
    """Serves one read after the other, each in a stated time; the time is not that of a clock."""

    LATENCY_US = 80  # until a drive that had nothing to do has the first byte
    CHUNK_US = 1000  # of one chunk, as 8 MiB at 8 GB/s

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self.waited_us: list[int] = []
        self._free_us = 0

    def read(self, **arguments: object) -> FakeTicket:
        ticket = super().read(**arguments)  # type: ignore[arg-type]
        self._free_us = max(self._free_us, self.now_us + self.LATENCY_US) + self.CHUNK_US
        due_us, finish = self._free_us, ticket.finish

        def finish_late() -> None:
            if not ticket.finished and due_us > self.now_us:
                self.waited_us.append(due_us - self.now_us)
                self.now_us = due_us
            finish()

        ticket.finish = finish_late  # type: ignore[method-assign]
        return ticket


def make(
    store: FakeStore, device: LateDevice | None = None, slot_count: int = SLOT_COUNT
) -> StagingSlots:
    return make_staging(store, device, slot_count=slot_count)


def put(store: FakeStore, key: str, value: float | None = None) -> torch.Tensor:
    content = torch.randn(NUMEL) if value is None else torch.full((NUMEL,), value)
    store.content[key] = content.view(torch.uint8).clone()
    return content


def start(staging: StagingSlots, key: str = "head") -> None:
    staging.prefetch.start(key=key, numel=NUMEL, dtype=torch.float32)


def fetch(staging: StagingSlots, key: str = "head") -> torch.Tensor:
    target = torch.zeros(NUMEL)
    staging.read(key=key, target=target)
    return target


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def staging(store: FakeStore) -> StagingSlots:
    return make(store)


# -- what it saves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed_us", "waits", "waited_us"),
    [
        pytest.param(None, CHUNK_COUNT, 10_080, id="not read ahead"),
        pytest.param(0, CHUNK_COUNT, 10_080, id="nothing computed meanwhile"),
        pytest.param(1500, CHUNK_COUNT - 1, 8580, id="one chunk's time and a half"),
        pytest.param(50_000, CHUNK_COUNT - 2, 8080, id="time for all of them"),
    ],
)
def test_a_gather_does_not_wait_for_what_the_drive_did_while_a_layer_computed(
    computed_us: int | None, waits: int, waited_us: int
) -> None:
    drive = Drive()
    content, staging = put(drive, "head"), make(drive)
    if computed_us is not None:
        start(staging)
        drive.now_us += computed_us
    assert torch.equal(fetch(staging), content)
    assert (len(drive.waited_us), sum(drive.waited_us)) == (waits, waited_us)
    assert len(drive.tickets) == CHUNK_COUNT  # no byte is read twice


@pytest.mark.parametrize(
    ("slot_count", "ahead"), [(2, 0), (3, 1), (4, 2), (8, 6), (16, CHUNK_COUNT)]
)
def test_two_slots_are_left_to_everybody_else(
    store: FakeStore, slot_count: int, ahead: int
) -> None:
    content, staging = put(store, "head"), make(store, slot_count=slot_count)
    start(staging)
    assert len(store.tickets) == ahead
    start(staging)  # again: they are under way
    assert len(store.tickets) == ahead
    assert torch.equal(fetch(staging), content)
    assert len(store.tickets) == CHUNK_COUNT


def test_starting_waits_for_no_slot_and_goes_on_when_one_is_free(
    staging: StagingSlots, store: FakeStore
) -> None:
    content = put(store, "head")
    taken = [staging.take(SLOT_NUMEL, torch.float32) for _ in range(SLOT_COUNT)]
    start(staging)
    assert store.tickets == []
    for count, staged in enumerate(taken[:3], start=1):
        staging.give_back(staged)
        start(staging)
        assert len(store.tickets) == min(count, 2)
    staging.give_back(taken[3])
    assert torch.equal(fetch(staging), content)


# -- in nobody's way -------------------------------------------------------------------------------


def test_others_go_on_with_the_slots_that_are_left(staging: StagingSlots, store: FakeStore) -> None:
    content, other = put(store, "head"), put(store, "other")
    start(staging)
    store.reserve(key="new", nbytes=other.nbytes)
    staging.write(key="new", source=other)
    staging.wait_writes()
    assert torch.equal(store.value("new", torch.float32), other)
    assert torch.equal(fetch(staging, "other"), other)
    assert torch.equal(fetch(staging), content)
    heads = [ticket for ticket in store.tickets if ticket.key == "head"]
    assert len(heads) == CHUNK_COUNT  # none gave way


def test_who_needs_every_slot_gets_it_the_chunk_needed_last_first(
    staging: StagingSlots, store: FakeStore
) -> None:
    content = put(store, "head")
    start(staging)
    first, second = store.tickets
    taken = [staging.take(SLOT_NUMEL, torch.float32) for _ in range(3)]
    assert (first.finished, second.finished) == (False, True)
    taken.append(staging.take(SLOT_NUMEL, torch.float32))
    assert first.finished
    with pytest.raises(AssertionError, match="every staging slot is taken"):
        staging.take(1, torch.float32)
    for staged in taken:
        staged.fill_(-1)
        staging.give_back(staged)
    assert torch.equal(fetch(staging), content)


def test_what_has_given_way_is_not_begun_again_before_it_is_needed(
    staging: StagingSlots, store: FakeStore
) -> None:
    """Else it would be read again at each of many calls, for others to take its slots each time."""
    content = put(store, "head")
    start(staging)
    for _ in range(5):
        taken = [staging.take(SLOT_NUMEL, torch.float32) for _ in range(3)]
        for staged in taken:
            staging.give_back(staged)
        start(staging)
    assert len(store.tickets) == 2
    assert torch.equal(fetch(staging), content)
    assert len(store.tickets) == 2 + CHUNK_COUNT - 1
    start(staging)
    assert len(store.tickets) == 2 + CHUNK_COUNT - 1 + 2


def test_runs_that_are_read_each_with_all_slots_get_them(
    staging: StagingSlots, store: FakeStore
) -> None:
    content, other = put(store, "head"), put(store, "other")
    start(staging)
    runs = [("other", SLOT_BYTES * i, SLOT_NUMEL, torch.float32) for i in range(CHUNK_COUNT - 1)]
    with closing(staging.read_each(runs)) as each:
        for index, staged in enumerate(each):
            mine = staging.take(SLOT_NUMEL, torch.float32)
            assert torch.equal(staged, other[index * SLOT_NUMEL :][:SLOT_NUMEL])
            staging.give_back(mine)
            staging.give_back(staged)
    assert torch.equal(fetch(staging), content)


def test_the_slots_can_be_exchanged(staging: StagingSlots, store: FakeStore) -> None:
    content = put(store, "head")
    start(staging)
    staging.resize(slot_bytes=2 * SLOT_BYTES, slot_count=3)
    assert all(ticket.finished for ticket in store.tickets)
    assert torch.equal(fetch(staging), content)


def test_a_device_that_is_late_gets_the_right_bytes(store: FakeStore) -> None:
    device = LateDevice()
    staging = make(store, device)
    with device:
        for value in (1.0, 2.0, 3.0):
            put(store, "head", value)
            start(staging)
            target = device.tensor(torch.zeros(NUMEL))
            staging.read(key="head", target=target)
            start(staging, "head")  # while copies out of the slots are still to be made
            device.synchronize()
            assert torch.equal(target.plain(), torch.full((NUMEL,), value))
            staging.prefetch.drop("head")


# -- what is there is what the store has -----------------------------------------------------------


def test_what_is_forgotten_is_read_anew(staging: StagingSlots, store: FakeStore) -> None:
    put(store, "head", 1.0)
    start(staging)
    staging.prefetch.drop("other")
    staging.prefetch.drop("head")
    staging.write(key="head", source=torch.full((NUMEL,), 2.0))
    assert torch.equal(fetch(staging), torch.full((NUMEL,), 2.0))


def test_another_key_takes_the_place_of_the_one_before(
    staging: StagingSlots, store: FakeStore
) -> None:
    contents = {key: put(store, key) for key in ("head", "embedding")}
    for key in contents:
        start(staging, key)
    assert [ticket.key for ticket in store.tickets] == ["head"] * 2 + ["embedding"] * 2
    for key, content in contents.items():
        assert torch.equal(fetch(staging, key), content)


def test_a_part_of_the_key_is_read_by_itself(staging: StagingSlots, store: FakeStore) -> None:
    content = put(store, "head")
    start(staging)
    for offset, numel in ((0, 3), (8, NUMEL - 8)):
        target = torch.zeros(numel)
        staging.read(key="head", target=target, offset_bytes=4 * offset)
        assert torch.equal(target, content[offset : offset + numel])
    bits = torch.zeros(2 * NUMEL, dtype=torch.int16)
    staging.read(key="head", target=bits)
    assert torch.equal(bits, content.view(torch.int16))
    assert torch.equal(fetch(staging), content)


def test_a_read_that_failed_is_an_error_of_who_needs_it_and_tried_again(
    staging: StagingSlots, store: FakeStore
) -> None:
    content = put(store, "head")
    store.failing.add(("read", "head"))
    start(staging)
    with pytest.raises(StoreError, match="read of head failed"):
        fetch(staging)
    store.failing.clear()
    assert torch.equal(fetch(staging), content)
    assert staging._slots.free_count == SLOT_COUNT


def test_giving_up_one_that_failed_is_no_error(staging: StagingSlots, store: FakeStore) -> None:
    put(store, "head")
    store.failing.add(("read", "head"))
    start(staging)
    staging.prefetch.drop()
    assert staging._slots.free_count == SLOT_COUNT
    assert not staging.prefetch.give_way()


def test_a_read_that_cannot_start_leaves_no_slot_taken(
    staging: StagingSlots, store: FakeStore
) -> None:
    with pytest.raises(StoreError, match="no key"):
        start(staging)
    assert staging._slots.free_count == SLOT_COUNT
