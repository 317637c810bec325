"""Ctrl-C at any line of the staging slots: none is lost, and none is used while it is in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing, suppress

import pytest
import torch

from memascend.errors import StoreError
from memascend.transfer.staging import StagingSlots
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.staging_slots import SLOT_BYTES, SLOT_COUNT, make_staging
from tests.support.streaming_fakes import (
    FakeStore,
    LateDevice,
    LateTensor,
)
from tests.transfer.test_staging_shared import share_small_slots

NUMEL = 5 * SLOT_BYTES // 4
SMALL = ("one", "two", "three")  # of what may share a slot


def all_slots_are_free(staging: StagingSlots) -> bool:
    taken = [staging.take(SLOT_BYTES, torch.uint8) for _ in range(SLOT_COUNT)]
    for slot in taken:
        staging.give_back(slot)
    return len({slot.data_ptr() for slot in taken}) == SLOT_COUNT


def fill_with(value: int, begin: int, staged: torch.Tensor) -> None:
    staged.fill_(value)


class Work:
    """Every way through the slots, and what comes of it."""

    def __init__(self, staging: StagingSlots, store: FakeStore, device: LateDevice) -> None:
        self.staging, self.store, self.device = staging, store, device
        for key in ("written", "chunk", "filled", *SMALL):
            store.reserve(key=key, nbytes=NUMEL * 4)

    def do(self, value: int) -> None:
        staging, device = self.staging, self.device
        staging.prefetch.drop()  # as whoever is about to write
        staging.write(key="written", source=device.tensor(torch.full((NUMEL,), float(value))))
        for key in SMALL:
            staging.write(key=key, source=device.tensor(torch.full((4,), float(value))))
        staging.fill(key="filled", nbytes=NUMEL * 4, source=functools.partial(fill_with, value))
        with closing(staging.read_each([("chunk", 0, 8, torch.float32)])) as chunks:
            chunk = next(chunks)
        chunk.fill_(value)
        staging.submit("chunk", chunk, 0)
        staging.prefetch.start(key="written", numel=NUMEL, dtype=torch.float32)
        target = device.tensor(torch.zeros(NUMEL))
        staging.read(key="written", target=target)
        staging.prefetch.start(key="filled", numel=NUMEL, dtype=torch.float32)
        streamed = [part.clone() for part in staging.stream(key="filled", nbytes=NUMEL * 4)]
        staging.wait_writes()
        device.synchronize()
        self.done = (target, torch.cat(streamed))

    def check(self, value: int) -> None:
        target, streamed = self.done
        assert isinstance(target, LateTensor)
        assert torch.equal(target.plain(), torch.full((NUMEL,), float(value)))
        assert torch.equal(streamed, torch.full((NUMEL * 4,), value, dtype=torch.uint8))
        for key, numel in (("chunk", 8), *((key, 4) for key in SMALL)):
            assert self.store.value(key, torch.float32)[:numel].tolist() == [value] * numel


def interrupt_each_line(work_on: Callable[[FakeStore], Work], stride: int) -> int:
    """Interrupt a pass at lines, and again, and make two more; return how often."""
    works: list[tuple[FakeStore, Work]] = []

    def make() -> Callable[[], None]:
        store = FakeStore()
        works[:] = [(store, work_on(store))]
        works[0][1].do(1)
        return functools.partial(works[0][1].do, 2)

    count = 0
    for where in interruptions(make, stride):
        count += 1
        [(store, work)] = works
        for value in (3, 4):
            work.do(value)
            work.check(value)
        for ticket in store.tickets:
            ticket.finish()  # those that nobody waits for any more
        assert all_slots_are_free(work.staging), where
    return count


@each_stride(23)
@pytest.mark.parametrize("late", [False, True], ids=["host", "device, slots are shared"])
def test_after_ctrl_c_at_any_line_all_slots_serve_again(
    late: bool, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        share_small_slots(monkeypatch)

    def work_on(store: FakeStore) -> Work:
        device = LateDevice()
        return Work(make_staging(store, device if late else None), store, device)

    if late:
        assert interrupt_each_line(work_on, stride) > 300 // stride
    else:
        with pytest.MonkeyPatch.context() as patch:  # copies are over on return
            patch.setattr(LateDevice, "issue", lambda device, copy: copy())
            assert interrupt_each_line(work_on, stride) > 300 // stride


def test_a_slot_that_a_second_ctrl_c_leaves_in_flight_waits_for_the_drive() -> None:
    store = FakeStore()
    staging = make_staging(store)
    store.content["a"] = torch.arange(16.0).view(torch.uint8)
    store.interrupts = True
    with suppress(KeyboardInterrupt):  # pytest.raises would keep the frames, and they the slot
        next(staging.read_each([("a", 0, 16, torch.float32)]))
    others = [staging.take(16, torch.float32).fill_(7) for _ in range(SLOT_COUNT - 1)]
    [late] = store.tickets
    assert not late.finished
    others.append(staging.take(16, torch.float32))
    assert late.finished
    others[-1].fill_(7)
    assert all(torch.equal(other, torch.full((16,), 7.0)) for other in others)
    with pytest.raises(AssertionError, match="every staging slot is taken"):
        staging.take(16, torch.float32)


def test_ctrl_c_behind_the_start_of_a_read_leaves_its_slot_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter looks for signals when a call returns: nobody has got the ticket."""
    store = FakeStore()
    staging = make_staging(store)
    store.content["a"] = torch.arange(16.0).view(torch.uint8)
    read = store.read

    def interrupted_read(**arguments: object) -> None:
        read(**arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "read", interrupted_read)
    for ask in (
        lambda: next(staging.read_each([("a", 0, 16, torch.float32)])),
        lambda: staging.read(key="a", target=torch.zeros(16)),
        lambda: list(staging.stream(key="a", nbytes=64)),
    ):
        with suppress(KeyboardInterrupt):
            ask()
        others = [staging.take(16, torch.float32).fill_(7) for _ in range(SLOT_COUNT - 1)]
        store.tickets[-1].finish()
        assert all(torch.equal(other, torch.full((16,), 7.0)) for other in others)
        for other in others:
            staging.give_back(other)
        assert all_slots_are_free(staging)


def test_what_ctrl_c_has_left_goes_before_the_slots_are_exchanged() -> None:
    store, device = FakeStore(), LateDevice()
    staging = make_staging(store, device)
    with device:
        staged = staging.take(16, torch.float32)
        device.tensor(staged).copy_(torch.ones(16))
        with pytest.raises(ValueError, match="1 are taken"):
            staging.resize(slot_bytes=SLOT_BYTES, slot_count=2)
        del staged  # as by Ctrl-C
        staging.resize(slot_bytes=SLOT_BYTES, slot_count=2)
        assert not device._waiting


def test_an_error_in_a_block_gives_the_slot_back_and_ctrl_c_does_not() -> None:
    staging = make_staging(FakeStore())
    for error, free_count in ((StoreError(5, "no"), SLOT_COUNT), (KeyboardInterrupt(), 2)):
        staged = staging.take(1, torch.uint8)
        with pytest.raises(type(error)), staging.given_back_on_error(staged):
            raise error
        assert staging._slots.free_count == free_count
