"""Tensors of any size through few slots: every byte arrives, on any device, whatever goes wrong."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from memascend.errors import StoreError
from memascend.memory.allocator import HostAllocator
from memascend.memory.guard import Guard
from memascend.nvme.store import MemoryFaults, TensorStore
from memascend.transfer.staging import StagingSlots
from tests.support.staging_slots import SLOT_BYTES, counted, make_staging
from tests.support.streaming_fakes import FakeMemory, FakeStore, FakeTicket, LateDevice


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def staging(store: FakeStore) -> StagingSlots:
    return make_staging(store)


def byte_of(staging: StagingSlots, key: str, offset: int) -> torch.Tensor:
    return next(staging.read_each([(key, offset, 1, torch.uint8)]))


# -- whole transfers -----------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 10_000])
def test_what_is_written_is_read_whatever_its_size(
    staging: StagingSlots, store: FakeStore, numel: int
) -> None:
    source, target = counted(numel, torch.float32), torch.zeros(numel)
    store.reserve(key="a", nbytes=source.nbytes)
    staging.write(key="a", source=source)
    staging.read(key="a", target=target)
    assert torch.equal(source, target)
    staging.wait_writes()


def test_an_empty_tensor_is_no_transfer(staging: StagingSlots, store: FakeStore) -> None:
    staging.write(key="a", source=torch.empty(0))
    staging.read(key="a", target=torch.empty(0))
    staging.wait_writes()
    assert store.tickets == []


def test_a_source_is_cast_on_its_way(staging: StagingSlots, store: FakeStore) -> None:
    source = torch.randn(5000)
    store.reserve(key="a", nbytes=10_000)
    staging.write(key="a", source=source, dtype=torch.bfloat16)
    target = torch.zeros(5000, dtype=torch.bfloat16)
    staging.read(key="a", target=target)
    assert torch.equal(target, source.bfloat16())


def test_the_source_may_change_once_write_has_returned(
    staging: StagingSlots, store: FakeStore
) -> None:
    source = torch.ones(5000)
    store.reserve(key="a", nbytes=source.nbytes)
    staging.write(key="a", source=source)
    source.zero_()
    staging.wait_writes()
    assert bool((store.value("a", torch.float32) == 1).all())


def test_reads_are_under_way_while_earlier_ones_are_copied(store: FakeStore) -> None:
    staging = make_staging(store, slot_count=4)
    store.content["a"] = torch.zeros(10 * SLOT_BYTES, dtype=torch.uint8)
    staging.read(key="a", target=torch.zeros(10 * SLOT_BYTES, dtype=torch.uint8))
    assert store.in_flight_peak == 4


def test_writes_of_a_key_come_before_its_read(store: FakeStore) -> None:
    device = LateDevice()
    staging = make_staging(store, device=device)
    store.reserve(key="a", nbytes=400)
    store.reserve(key="b", nbytes=400)
    with device:
        staging.write(key="b", source=device.tensor(torch.full((100,), 2.0)))
        staging.write(key="a", source=device.tensor(torch.full((100,), 3.0)))
        target = device.tensor(torch.zeros(100))
        staging.read(key="a", target=target)
        device.synchronize()
    assert target.plain()[0] == 3.0


def test_what_stays_in_the_way_of_a_read_is_not_its_writes(store: FakeStore) -> None:
    """A read needs one slot, and gets by on it while all others hold writes."""
    staging = make_staging(store, slot_count=3)
    store.content["a"] = counted(5 * SLOT_BYTES, torch.uint8)
    store.reserve(key="b", nbytes=2 * SLOT_BYTES)
    staging.write(key="b", source=torch.zeros(2 * SLOT_BYTES, dtype=torch.uint8))
    target = torch.zeros(5 * SLOT_BYTES, dtype=torch.uint8)
    staging.read(key="a", target=target)
    assert torch.equal(target, store.content["a"])


# -- single slots --------------------------------------------------------------------------------


def test_a_chunk_is_read_changed_and_written_back(staging: StagingSlots, store: FakeStore) -> None:
    store.content["a"] = torch.arange(100.0).view(torch.uint8)
    chunk = next(staging.read_each([("a", 40, 10, torch.float32)]))
    chunk.add_(1)
    staging.submit("a", chunk, 40)
    staging.wait_writes()
    assert store.value("a", torch.float32)[9:21].tolist() == [9, *range(11, 21), 20]


@pytest.mark.parametrize("slot_count", [2, 3, 5])
def test_runs_are_read_ahead_in_order_by_who_keeps_a_slot_meanwhile(
    store: FakeStore, slot_count: int
) -> None:
    staging = make_staging(store, slot_count=slot_count)
    for key in "ab":
        store.content[key] = counted(4 * SLOT_BYTES, torch.uint8, ord(key))
    runs = [(key, begin * SLOT_BYTES, SLOT_BYTES, torch.uint8) for begin in (0, 3) for key in "ab"]
    kept = staging.take(SLOT_BYTES, torch.uint8)
    for run, staged in zip(runs, staging.read_each(runs), strict=True):
        key, begin, count, _ = run
        assert torch.equal(staged, store.content[key][begin : begin + count])
        staging.give_back(staged)
    staging.give_back(kept)
    assert store.in_flight_peak == slot_count - 1


@pytest.mark.parametrize("numel", [0, -1, 1025])
def test_a_slot_is_not_given_for_what_does_not_fit(staging: StagingSlots, numel: int) -> None:
    for _ in range(10):  # and none is lost
        with pytest.raises(ValueError, match=r"chunks\(\)"):
            staging.take(numel, torch.float32)
    staging.take(1024, torch.float32)


def test_taking_more_than_there_is_says_so(staging: StagingSlots) -> None:
    taken = [staging.take(1, torch.float32) for _ in range(3)]
    assert len(taken) == 3
    with pytest.raises(AssertionError, match="none was given back"):
        staging.take(1, torch.float32)


@pytest.mark.parametrize(("slot_bytes", "slot_count"), [(0, 2), (-1, 2), (4096, 1)])
def test_slots_that_serve_nothing_are_refused(slot_bytes: int, slot_count: int) -> None:
    with pytest.raises(ValueError, match="slot_"):
        StagingSlots(
            store=FakeStore(),
            memory=FakeMemory(),
            slot_bytes=slot_bytes,
            slot_count=slot_count,
        )


def test_memory_is_taken_once(store: FakeStore) -> None:
    memory = FakeMemory()
    StagingSlots(store=store, memory=memory, slot_bytes=8192, slot_count=3)
    assert memory.taken == [("staging slots", 8192)] * 3


# -- failures ------------------------------------------------------------------------------------


def all_slots_are_free(staging: StagingSlots, count: int = 3) -> bool:
    taken = [staging.take(SLOT_BYTES, torch.uint8) for _ in range(count)]
    for slot in taken:
        staging.give_back(slot)
    return len({slot.data_ptr() for slot in taken}) == count


def test_a_failed_write_is_told_by_wait_writes_alone(
    staging: StagingSlots, store: FakeStore
) -> None:
    store.failing.add(("write", "a"))
    store.reserve(key="a", nbytes=10 * SLOT_BYTES)
    store.content["b"] = counted(10 * SLOT_BYTES, torch.uint8)
    staging.write(key="a", source=torch.zeros(10 * SLOT_BYTES, dtype=torch.uint8))
    target = torch.zeros(10 * SLOT_BYTES, dtype=torch.uint8)
    staging.read(key="b", target=target)
    assert torch.equal(target, store.content["b"])
    with pytest.raises(StoreError, match="write of a failed"):
        staging.wait_writes()
    staging.wait_writes()
    assert all_slots_are_free(staging)


def test_a_write_that_cannot_be_started_is_told_once_too(staging: StagingSlots) -> None:
    staging.write(key="never reserved", source=torch.zeros(5 * SLOT_BYTES))
    with pytest.raises(StoreError, match="no key"):
        staging.wait_writes()
    staging.wait_writes()
    assert all_slots_are_free(staging)


def test_a_failed_read_gives_every_slot_back(staging: StagingSlots, store: FakeStore) -> None:
    store.content["a"] = torch.zeros(10 * SLOT_BYTES, dtype=torch.uint8)
    store.failing.add(("read", "a"))
    with pytest.raises(StoreError, match="read of a failed"):
        staging.read(key="a", target=torch.zeros(10 * SLOT_BYTES, dtype=torch.uint8))
    with pytest.raises(StoreError, match="read of a failed"):
        byte_of(staging, "a", 0)
    assert all(ticket.finished for ticket in store.tickets)
    assert all_slots_are_free(staging)


def test_a_read_that_cannot_be_started_gives_its_slot_back(staging: StagingSlots) -> None:
    for _ in range(5):
        with pytest.raises(StoreError, match="no key"):
            staging.read(key="nobody", target=torch.zeros(10))
        with pytest.raises(StoreError, match="no key"):
            byte_of(staging, "nobody", 0)
    assert all_slots_are_free(staging)


def test_a_source_that_cannot_be_copied_gives_its_slot_back(staging: StagingSlots) -> None:
    for _ in range(5):
        with pytest.raises((RuntimeError, NotImplementedError)):
            staging.write(key="a", source=torch.zeros(10, device="meta"))
    assert all_slots_are_free(staging)


# -- a device whose copies happen late -------------------------------------------------------------


def test_a_slot_goes_to_the_drive_only_when_its_copy_has_happened(store: FakeStore) -> None:
    device = LateDevice()
    staging = make_staging(store, device=device)
    store.reserve(key="a", nbytes=400)
    with device:
        staging.write(key="a", source=device.tensor(torch.ones(100)))
        assert store.tickets == []
        device.synchronize()
        staging.wait_writes()
    assert store.value("a", torch.float32).tolist() == [1.0] * 100


def test_a_read_waits_for_copies_into_the_bytes_that_it_reads_alone(store: FakeStore) -> None:
    device = LateDevice()
    staging = make_staging(store, device=device)
    store.content["a"] = torch.zeros(2 * SLOT_BYTES, dtype=torch.uint8)
    with device:
        source = device.tensor(torch.ones(SLOT_BYTES, dtype=torch.uint8))
        staging.write(key="a", source=source, offset_bytes=1)
        for offset, kinds in ((SLOT_BYTES + 1, ["read"]), (SLOT_BYTES, ["read", "write", "read"])):
            chunk = byte_of(staging, "a", offset)
            assert [kind for kind, _ in store.log()] == kinds
            staging.give_back(chunk)
    assert chunk.tolist() == [1]


def test_writes_of_a_key_that_overlap_one_another_keep_their_order(store: FakeStore) -> None:
    device = LateDevice()
    staging = make_staging(store, device=device)
    store.reserve(key="a", nbytes=3)
    with device:
        for offset, pair in enumerate(torch.tensor([[1, 1], [2, 2]], dtype=torch.uint8)):
            staging.write(key="a", source=device.tensor(pair), offset_bytes=offset)
        staging.give_back(byte_of(staging, "a", 2))
        staging.wait_writes()
    assert store.content["a"].tolist() == [1, 2, 2]


def test_a_slot_is_read_into_again_only_when_it_was_copied_out(store: FakeStore) -> None:
    device = LateDevice()
    staging = make_staging(store, slot_count=2, device=device)
    store.content["a"] = counted(9 * SLOT_BYTES, torch.uint8)
    with device:
        target = device.tensor(torch.zeros(9 * SLOT_BYTES, dtype=torch.uint8))
        staging.read(key="a", target=target)
        device.synchronize()
    assert torch.equal(target.plain(), store.content["a"])


# -- the real store --------------------------------------------------------------------------------


@pytest.fixture(params=["well", "with faults"])
def real_store(request: pytest.FixtureRequest) -> Iterator[TensorStore]:
    memory = HostAllocator(lock=False, huge_pages="off")
    often = 0.3 if request.param == "with faults" else 0.0
    with TensorStore(
        volumes=["unused"],
        bounce=memory.tensor(64 << 10, torch.uint8, component="bounce buffers"),
        engine="memory",
        chunk_bytes=64 << 10,
        faults=MemoryFaults(seed=7, short=often, again=often, reorder=often, delay=often),
    ) as store:
        yield store


def test_the_real_store_keeps_every_byte(real_store: TensorStore) -> None:
    memory = HostAllocator(lock=False, huge_pages="off")
    staging = StagingSlots(store=real_store, memory=memory, slot_bytes=64 << 10, slot_count=3)
    sources = {f"k{i}": torch.randn(numel) for i, numel in enumerate((1, 3, 70_001, 200_000))}
    for key, source in sources.items():
        real_store.reserve(key=key, nbytes=source.nbytes)
        staging.write(key=key, source=source)
    for key, source in sources.items():
        target = torch.empty_like(source)
        staging.read(key=key, target=target)
        assert torch.equal(source, target)
        staging.write(key=key, source=-source[1:], offset_bytes=4)
        staging.read(key=key, target=target)
        assert torch.equal(target, torch.cat([source[:1], -source[1:]]))
    staging.wait_writes()


def test_a_broken_drive_is_told_and_no_slot_is_lost() -> None:
    memory = HostAllocator(lock=False, huge_pages="off")
    with TensorStore(
        volumes=["unused"],
        bounce=memory.tensor(64 << 10, torch.uint8, component="bounce buffers"),
        engine="memory",
        faults=MemoryFaults(seed=3, eio=0.2),
        eio_retries=0,
    ) as store:
        staging = StagingSlots(store=store, memory=memory, slot_bytes=64 << 10, slot_count=3)
        store.reserve(key="a", nbytes=4 << 20)
        for _ in range(5):
            staging.write(key="a", source=torch.zeros(4 << 20, dtype=torch.uint8))
            with pytest.raises(StoreError):
                staging.wait_writes()
            with pytest.raises(StoreError):
                staging.read(key="a", target=torch.zeros(4 << 20, dtype=torch.uint8))
        assert all_slots_are_free(staging)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_slot_that_a_silent_drive_still_uses_is_lent_to_nobody_as_the_program_ends(
    staging: StagingSlots, store: FakeStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refuse(_: FakeTicket) -> None:
        raise StoreError(110, "no answer")

    store.reserve(key="a", nbytes=SLOT_BYTES)
    tensor = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(FakeTicket, "wait", refuse)
    wait: Callable[[], object] = functools.partial(staging.read, key="a", target=tensor)
    if kind == "write":
        staging.write(key="a", source=tensor)
        wait = staging.wait_writes
    with pytest.raises(StoreError, match="no answer"):
        wait()
    monkeypatch.undo()
    [ticket] = store.tickets
    for _ in range(2):
        staging.give_back(staging.take(SLOT_BYTES, torch.uint8))
        assert not ticket.finished
    slots = [staging.take(SLOT_BYTES, torch.uint8) for _ in range(3)]
    assert ticket.finished
    assert len({slot.data_ptr() for slot in slots}) == 3


# -- a thread beside the others ------------------------------------------------------------------


def test_a_turn_waits_for_room_without_the_lock(store: FakeStore) -> None:
    lock = threading.RLock()
    staging = make_staging(store, guard=Guard(lock))
    with lock:
        for key in "abc":
            store.reserve(key=key, nbytes=SLOT_BYTES)
            staging.write(key=key, source=counted(SLOT_BYTES, torch.uint8))
    found: list[bool] = []
    wait = FakeTicket.wait

    def watched(ticket: FakeTicket) -> None:
        if not ticket.finished:
            found.append(lock._is_owned())  # type: ignore[attr-defined]
        wait(ticket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTicket, "wait", watched)
        with staging.turn(SLOT_BYTES):
            assert lock._is_owned()  # type: ignore[attr-defined]
            staging.free(staging.take(SLOT_BYTES, torch.uint8))
    assert found == [False]
    with lock:
        assert isinstance(staging.turn(SLOT_BYTES), nullcontext)
        staging.wait_writes()


def test_a_turn_leaves_the_error_of_a_write_to_its_waiter(store: FakeStore) -> None:
    lock = threading.RLock()
    staging = make_staging(store, guard=Guard(lock))
    store.reserve(key="a", nbytes=SLOT_BYTES)
    store.failing.add(("write", "a"))
    with lock:
        for _ in range(len(staging)):
            staging.write(key="a", source=counted(SLOT_BYTES, torch.uint8))
    with staging.turn(SLOT_BYTES):
        staging.free(staging.take(SLOT_BYTES, torch.uint8))
    with lock, pytest.raises(StoreError, match="a failed"):
        staging.wait_writes()
