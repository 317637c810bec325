"""Gradients of a device whose copies happen late: who waits for it, and what comes before what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memascend.nvme.resident import ResidentStore
from memascend.streaming.gradients.stream import GiveMemory, GradientStream, SumOfSquares
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_fakes import FakeMemory, FakeStore, LateDevice
from tests.support.streaming_hosts import HostTensors, memory_store

GROUP = "0_9"
SLOT_COUNT = 4


def open_gradient_stream(
    store: FakeStore | ResidentStore,
    device: LateDevice,
    *,
    give_memory_to: GiveMemory | None = None,
    sum_of_squares: SumOfSquares | None = None,
) -> tuple[GradientStream, StagingSlots]:
    slots = StagingSlots(
        store=store,
        memory=FakeMemory(),
        slot_bytes=4096,
        slot_count=SLOT_COUNT,
        new_event=device.new_event,
        wait_idle=device.synchronize,
    )
    gradient_stream = GradientStream(
        store=store, slots=slots, give_memory_to=give_memory_to, sum_of_squares=sum_of_squares
    )
    return gradient_stream, slots


def test_as_long_as_there_are_slots_no_gradient_waits_for_the_device() -> None:
    """Not even where a window begins, and the store gives a sum the memory of what is seen."""
    store, device = FakeStore(), LateDevice()
    given: list[str] = []

    def give_memory_to(*, key: str, nbytes: int, over: str, before: Callable[[], object]) -> None:
        before()
        given.append(f"{over} > {key}")

    gradient_stream, slots = open_gradient_stream(store, device, give_memory_to=give_memory_to)
    with device:
        for final in (True, False):
            copied = device._done
            for index in range(SLOT_COUNT):
                gradient = device.tensor(torch.full((8,), float(index)))
                gradient_stream.put(GROUP, 8 * index, gradient, final=final)
                assert device._done == copied
            device.synchronize()
            slots.submit_all()
    assert given == [
        f"gradient.{GROUP}.{8 * index}.0 > gradient.{GROUP}.{8 * index}.1"
        for index in range(SLOT_COUNT)
    ]


def put_twice(gradient_stream: GradientStream, device: LateDevice) -> None:
    """A window's result, and the next window's beginning."""
    for final in (True, False):
        gradient_stream.put(GROUP, 0, device.tensor(torch.ones(8)), final=final)


def test_what_is_seen_is_in_the_store_before_its_memory_is_given_away() -> None:
    device, key = LateDevice(), f"gradient.{GROUP}.0.0"
    store = ResidentStore(memory_store(), stream_of=lambda key: key.partition(".")[0])
    store.grant({"gradient": 4096}, memory=HostTensors(), component="resident cache")
    gradient_stream, _ = open_gradient_stream(store, device, give_memory_to=store.give_memory_to)
    with device:
        put_twice(gradient_stream, device)
        seen = torch.zeros(8)
        store.read(key=key, target=seen).wait()
    assert torch.equal(seen, torch.ones(8))


@pytest.mark.parametrize("granted", ["nothing", "another stream", "another gradient"])
def test_where_no_memory_changes_hands_nobody_waits_for_the_copy_of_what_is_seen(
    granted: str,
) -> None:
    device = LateDevice()
    store = ResidentStore(memory_store(), stream_of=lambda key: key.partition(".")[0])
    if granted != "nothing":
        stream = "gradient" if granted == "another gradient" else "master"
        store.grant({stream: 4096}, memory=HostTensors(), component="resident cache")
        store.write(key=f"{stream}.first", source=torch.ones(1024)).wait()
    gradient_stream, _ = open_gradient_stream(store, device, give_memory_to=store.give_memory_to)
    with device:
        put_twice(gradient_stream, device)
        assert device._done == 0


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_drive_begins_behind_the_copy_and_not_behind_the_norm(accumulate: bool) -> None:
    store, device = FakeStore(), LateDevice()

    def sum_of_squares(value: torch.Tensor) -> torch.Tensor:
        device.issue(lambda: None)  # its kernels
        return torch.zeros(())

    gradient_stream, slots = open_gradient_stream(store, device, sum_of_squares=sum_of_squares)
    with device:
        gradient_stream.put(GROUP, 0, device.tensor(torch.ones(8)))
        slots.wait_writes()
        device.synchronize()
        store.tickets.clear()
        gradient_stream.put(GROUP, 0, device.tensor(torch.ones(8)), accumulate=accumulate)
        device.advance(device._issued - device._done - 1)  # all but the last: the norm
        slots.give_back(slots.take(1, torch.uint8))
        assert store.log()[-1] == ("write", f"gradient.{GROUP}.0.0")
        assert device._done < device._issued
