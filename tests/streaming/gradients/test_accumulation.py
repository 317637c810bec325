"""Gradients that wait on the drive to be added up, against sums that are made at once."""

from __future__ import annotations

import errno
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.base.sizes import APPENDED_COUNT_MAX
from memascend.base.units import PAGE_BYTES
from memascend.errors import StoreError, StoreFullError
from memascend.nvme.store import MemoryFaults
from memascend.plan.window import WindowBytes
from memascend.streaming.gradients.accumulation import StoredGradient, Window
from memascend.streaming.gradients.stream import GradientStream
from memascend.transfer.staging import StagingSlots
from tests.support.examples import examples
from tests.support.gradient_streams import (
    GROUP,
    FlatBuffers,
    open_gradient_stream,
    same_bits,
)
from tests.support.streaming_fakes import FakeMemory, FakeStore, LateDevice

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: In whole blocks of the drive, and more than a slot of sums.
NUMEL = 4096


def narrow(seed: int, dtype: torch.dtype = BF16, numel: int = NUMEL) -> torch.Tensor:
    """A gradient as upstream hands it over: widened, some zeros of either sign in it."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values[:: seed % 5 + 2] *= 0.0
    return values.to(dtype).float()


def train(gradient_stream: GradientStream, steps: int, *, first: int = 0) -> torch.Tensor:
    """One window of micro-steps; what CPU offload would make of it."""
    flat = FlatBuffers([NUMEL], FP32)
    for step in range(steps):
        how = {"accumulate": step > 0, "final": step == steps - 1}
        gradient_stream.put(GROUP, 0, narrow(first + step), arrived=BF16, **how)
        flat.put(0, narrow(first + step), **how)
    return flat.seen


def seen(gradient_stream: GradientStream) -> torch.Tensor:
    found = torch.empty(NUMEL)
    gradient_stream.get(GROUP, 0, found)
    return found


# -- the same to the bit ---------------------------------------------------------------------------

puts = st.tuples(
    st.sampled_from([BF16, BF16, BF16, FP16, None]),
    st.integers(0, 999),
    st.sampled_from([True, True, True, True, False]),
    st.sampled_from([False, False, False, False, True]),
)
others = st.sampled_from(["finish", "verdict", "set", "get", "multiply"])


@settings(max_examples=examples(150), deadline=None)
@given(
    slot_count=st.integers(2, 5),
    granted_pages=st.sampled_from([0, 0, 0, 1, 2, 7]),
    events=st.lists(
        st.tuples(st.booleans(), st.one_of(puts, puts, puts, others)), min_size=5, max_size=60
    ),
)
def test_whatever_happens_in_between_sums_are_those_of_flat_buffers(
    slot_count: int, granted_pages: int, events: list[Any]
) -> None:
    granted_bytes = granted_pages * PAGE_BYTES
    gradient_stream, store, _ = open_gradient_stream(
        slot_count=slot_count, granted_bytes=granted_bytes
    )
    flat = FlatBuffers([3000, 700], FP32)
    arrived = set()
    for index, event in events:
        offset, numel = flat.offsets[index], flat.sizes[index]
        if isinstance(event, tuple):
            dtype, seed, accumulate, final = event
            gradient = narrow(seed, dtype or FP32, numel)
            gradient_stream.put(
                GROUP, offset, gradient, accumulate=accumulate, final=final, arrived=dtype
            )
            flat.put(index, gradient, accumulate=accumulate, final=final)
            arrived.add(index)
        elif event == "finish" and index in arrived:
            gradient_stream.make_final(GROUP, offset)
            flat.finish(index, numel)
        elif event == "verdict":
            squares = flat.sums.double().square().sum().item()
            assert gradient_stream.sum_of_squares().item() == pytest.approx(squares, rel=1e-12)
        elif event == "set":
            gradient_stream.set(GROUP, offset, torch.full((numel,), 0.3))
            flat.seen.narrow(0, offset, numel).fill_(0.3)
        elif event == "multiply":
            gradient_stream.note_factor(GROUP, 0.7, FP32)
            flat.seen.mul_(0.7)
        found = torch.empty(3700)
        gradient_stream.get(GROUP, 0, found)
        assert same_bits(found, flat.seen)
    for index in arrived:
        gradient_stream.make_final(GROUP, flat.offsets[index])
        flat.finish(index, flat.sizes[index])
    found = torch.empty(3700)
    gradient_stream.get(GROUP, 0, found)
    assert same_bits(found, flat.seen)
    store.close()


def test_gradients_are_added_in_the_order_in_which_they_came() -> None:
    gradient_stream, _, _ = open_gradient_stream()
    values = [2.0**24, 1.0, 1.0, -(2.0**24)]
    for step, value in enumerate(values):
        gradient = torch.full((NUMEL,), value)
        gradient_stream.put(GROUP, 0, gradient, accumulate=step > 0, final=step == 3, arrived=BF16)
    assert (seen(gradient_stream) == sum(torch.tensor(values)).item()).all()
    assert sum(torch.tensor(values)) != sum(torch.tensor(values[::-1]))


@pytest.mark.parametrize(("accumulate", "expected"), [(True, 0.0), (False, -0.0)])
def test_a_window_that_only_adds_begins_with_zeros(accumulate: bool, expected: float) -> None:
    """As the flat buffer does in which a shard got nothing at the window's first micro-step."""
    gradient_stream, _, _ = open_gradient_stream()
    for _ in range(2):
        minus = torch.full((NUMEL,), -0.0)
        gradient_stream.put(GROUP, 0, minus, accumulate=accumulate, final=False, arrived=BF16)
        accumulate = True
    gradient_stream.make_final(GROUP, 0)
    assert same_bits(seen(gradient_stream), torch.full((NUMEL,), expected))


def test_what_is_widened_on_the_host_may_be_longer_than_one_piece() -> None:
    store = FakeStore()
    slots = StagingSlots(store=store, memory=FakeMemory(), slot_bytes=1 << 20, slot_count=3)
    numel = 200_001
    first, second = (narrow(seed, numel=numel) for seed in (1, 2))
    for key, value in (("a", first), ("b", second)):
        store.content[key] = value.bfloat16().view(torch.uint8)
    stored = [StoredGradient(key, 3, numel, BF16) for key in "ab"]
    window = Window(True, numel, FP32, torch.device("cpu"), stored)
    for begin, staged, value in window.add_up(slots, None, None):
        assert same_bits(value, (first + second)[begin : begin + staged.numel()])
        slots.give_back(staged)
    slots.resize(slot_bytes=4096, slot_count=2)  # refuses while one is taken


# -- what moves and where it lies ------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 8, 9, 17])
def test_a_window_keeps_and_moves_what_is_planned(steps: int) -> None:
    gradient_stream, store, slots = open_gradient_stream()
    planned = WindowBytes(steps=steps, arriving_itemsize=2, sum_itemsize=4)
    for window in range(3):
        before = store.stats()
        expected = train(gradient_stream, steps, first=100 * window)
        slots.wait_writes()
        after = store.stats()
        moved = [after[name] - before[name] for name in ("bytes_read", "bytes_written")]
        assert moved == [planned.read_bytes * NUMEL, planned.written_bytes * NUMEL]
        assert same_bits(seen(gradient_stream), expected)
    kept = sum(store.nbytes(key=key) for key in store.keys())  # noqa: SIM118  a store is no dict
    assert kept == planned.drive_bytes * NUMEL
    gradient_stream.discard()
    assert store.keys() == []


def test_a_long_window_whose_end_is_not_known_takes_no_more_places() -> None:
    gradient_stream, store, _ = open_gradient_stream()
    for step in range(64):
        gradient_stream.put(GROUP, 0, narrow(step), accumulate=step > 0, final=False, arrived=BF16)
    assert len(store.keys()) == 1 + APPENDED_COUNT_MAX
    gradient_stream.make_final(GROUP, 0)
    assert same_bits(seen(gradient_stream), sum(map(narrow, range(1, 64)), narrow(0)))


def test_gradients_of_the_sums_own_dtype_do_not_wait() -> None:
    gradient_stream, store, _ = open_gradient_stream()
    for accumulate in (False, True):
        gradient_stream.put(GROUP, 0, narrow(1).bfloat16(), accumulate=accumulate, final=False)
    assert store.keys() == [f"gradient.{GROUP}.0.0"]


def test_a_new_value_that_somebody_wants_is_made_at_once() -> None:
    gradient_stream, _, _ = open_gradient_stream()
    found = torch.empty(NUMEL)
    gradient_stream.put(GROUP, 0, narrow(1), final=False, arrived=BF16)
    gradient_stream.put(
        GROUP, 0, narrow(2), accumulate=True, final=False, arrived=BF16, result=found
    )
    assert same_bits(found, narrow(1) + narrow(2))


def test_sums_in_memory_are_added_to_where_they_are() -> None:
    gradient_stream, store, slots = open_gradient_stream(granted_bytes=4 * NUMEL)
    written = []
    for window in range(3):
        before = store.stats()["bytes_written"]
        expected = train(gradient_stream, 4, first=10 * window)
        slots.wait_writes()
        written.append(store.stats()["bytes_written"] - before)
        assert same_bits(seen(gradient_stream), expected)
    # Each window's result, once the next one needs the memory.
    assert written == [0, 4 * NUMEL, 4 * NUMEL]


# -- who waits -------------------------------------------------------------------------------------


def test_a_gradient_that_waits_is_neither_read_nor_waited_for() -> None:
    store, device = FakeStore(), LateDevice()
    slots = StagingSlots(
        store=store, memory=FakeMemory(), slot_bytes=4096, slot_count=4, new_event=device.new_event
    )
    gradient_stream = GradientStream(store=store, slots=slots)
    with device:
        for step in range(4):
            gradient = device.tensor(torch.full((1024,), float(step)))
            how = {"accumulate": step > 0, "final": False}
            gradient_stream.put(GROUP, 0, gradient, arrived=BF16, **how)
        assert (device._done, store.log()) == (0, [])
        device.synchronize()
        slots.wait_writes()
    assert [kind for kind, _ in store.log()] == ["write"] * 4


def test_while_one_gradient_is_added_the_next_ones_are_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FakeStore()
    slots = StagingSlots(store=store, memory=FakeMemory(), slot_bytes=4096, slot_count=4)
    gradient_stream = GradientStream(store=store, slots=slots)
    for step in range(3):
        gradient_stream.put(
            GROUP, 0, torch.ones(2048), accumulate=step > 0, final=False, arrived=BF16
        )
    slots.wait_writes()
    store.tickets.clear()
    in_flight = []
    give_back = slots.give_back

    def watched(staged: torch.Tensor) -> None:
        in_flight.append(sum(not one.done() for one in store.tickets if one.kind == "read"))
        give_back(staged)

    monkeypatch.setattr(slots, "give_back", watched)
    gradient_stream.make_final(GROUP, 0)
    assert in_flight == [2, 2, 2, 2, 1, 0]
    reads = [key[-1] for kind, key in store.log() if kind == "read"]
    assert reads == ["3", "4", "5", "3", "4", "5"]


# -- single values ---------------------------------------------------------------------------------


def test_until_the_window_is_over_the_last_one_is_seen() -> None:
    gradient_stream, _, _ = open_gradient_stream()
    expected = train(gradient_stream, 3)
    for step in range(2):
        gradient_stream.put(
            GROUP, 0, narrow(50 + step), accumulate=step > 0, final=False, arrived=BF16
        )
        assert same_bits(seen(gradient_stream), expected)
    value = narrow(99)
    gradient_stream.set(GROUP, 0, value)
    assert same_bits(seen(gradient_stream), value)
    gradient_stream.make_final(GROUP, 0)
    assert same_bits(seen(gradient_stream), narrow(50) + narrow(51))


def test_what_got_nothing_in_the_last_micro_step_goes_on_in_the_next_window() -> None:
    """Stale, as in the flat buffer: to be added to if it gets nothing in the first one, either."""
    gradient_stream, _, _ = open_gradient_stream()
    expected = train(gradient_stream, 2)
    for step in range(2):
        gradient_stream.put(GROUP, 0, narrow(step), accumulate=step > 0, final=False, arrived=BF16)
    assert same_bits(seen(gradient_stream), expected)
    gradient_stream.put(GROUP, 0, narrow(7), accumulate=True, final=False, arrived=BF16)
    gradient_stream.put(GROUP, 0, narrow(8), accumulate=True, arrived=BF16)
    assert same_bits(seen(gradient_stream), narrow(0) + narrow(1) + narrow(7) + narrow(8))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_verdict_is_on_what_waits_too(bad: float) -> None:
    """CPU offload looks at its buffer of sums, whether the step sees them or not."""
    gradient_stream, _, _ = open_gradient_stream()
    train(gradient_stream, 2)
    gradient_stream.put(GROUP, 0, torch.full((NUMEL,), bad), final=False, arrived=FP16)
    gradient_stream.put(GROUP, 0, narrow(1), accumulate=True, final=False, arrived=FP16)
    assert not torch.isfinite(gradient_stream.sum_of_squares())
    assert torch.isfinite(seen(gradient_stream)).all()
    train(gradient_stream, 2)
    assert torch.isfinite(gradient_stream.sum_of_squares())


# -- faults ----------------------------------------------------------------------------------------


def test_a_gradient_that_could_not_be_written_is_missing_until_a_new_window() -> None:
    faults = MemoryFaults()
    gradient_stream, _, slots = open_gradient_stream(faults=faults)
    before = train(gradient_stream, 2)
    for step in range(3):
        slots.wait_writes()
        faults.gone = errno.ENODEV if step == 1 else 0
        gradient_stream.put(GROUP, 0, narrow(step), accumulate=step > 0, final=False, arrived=BF16)
        if step == 1:
            with pytest.raises(StoreError):
                slots.wait_writes()
    for _ in range(2):
        with pytest.raises(StoreError, match="earlier write"):
            gradient_stream.put(GROUP, 0, narrow(3), accumulate=True, arrived=BF16)
        with pytest.raises(StoreError, match="earlier write"):
            gradient_stream.make_final(GROUP, 0)
        assert same_bits(seen(gradient_stream), before)
    expected = train(gradient_stream, 4, first=10)
    slots.wait_writes()
    assert same_bits(seen(gradient_stream), expected)
    slots.resize(slot_bytes=slots.slot_bytes, slot_count=3)  # refuses while one is taken


def test_a_sum_that_could_not_be_written_is_missing_until_a_new_window() -> None:
    faults = MemoryFaults()
    gradient_stream, _, slots = open_gradient_stream(faults=faults)
    train(gradient_stream, 2)
    slots.wait_writes()
    faults.gone = errno.ENODEV
    gradient_stream.put(GROUP, 0, narrow(2))
    with pytest.raises(StoreError):
        slots.wait_writes()
    faults.gone = 0
    with pytest.raises(StoreError, match="earlier write"):
        seen(gradient_stream)
    gradient_stream.put(GROUP, 0, narrow(3), accumulate=True, final=False, arrived=BF16)
    with pytest.raises(StoreError, match="earlier write"):
        gradient_stream.make_final(GROUP, 0)  # more was added to what was lost
    expected = train(gradient_stream, 3)
    slots.wait_writes()
    assert same_bits(seen(gradient_stream), expected)


def test_a_full_drive_is_an_error_before_anything_has_changed() -> None:
    places = 3
    faults = MemoryFaults(capacity_bytes=(4 + 2 * places) * NUMEL)
    gradient_stream, store, _ = open_gradient_stream(faults=faults)
    for step in range(places):
        gradient_stream.put(GROUP, 0, narrow(step), accumulate=step > 0, final=False, arrived=BF16)
    keys = store.keys()
    for _ in range(2):
        with pytest.raises(StoreFullError):
            gradient_stream.put(GROUP, 0, narrow(9), accumulate=True, final=False, arrived=BF16)
    assert store.keys() == keys
    gradient_stream.put(GROUP, 0, narrow(places), accumulate=True, arrived=BF16)
    assert same_bits(seen(gradient_stream), narrow(0) + narrow(1) + narrow(2) + narrow(3))


def test_where_there_is_no_room_for_the_sum_nothing_waits_for_it() -> None:
    gradient_stream, store, _ = open_gradient_stream(faults=MemoryFaults(capacity_bytes=3 * NUMEL))
    with pytest.raises(StoreFullError):
        gradient_stream.put(GROUP, 0, narrow(1), final=False, arrived=BF16)
    assert store.keys() == []


def test_an_error_in_between_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device is out of memory, and the training loop goes on."""
    gradient_stream, _, slots = open_gradient_stream()
    for step in range(3):
        gradient_stream.put(GROUP, 0, narrow(step), accumulate=step > 0, final=False, arrived=BF16)

    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    for name in ("add_", "copy_"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, name, no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                gradient_stream.put(GROUP, 0, narrow(3), accumulate=True, arrived=BF16)
    slots.resize(slot_bytes=slots.slot_bytes, slot_count=3)  # refuses while one is taken
    gradient_stream.make_final(GROUP, 0)
    assert same_bits(seen(gradient_stream), narrow(0) + narrow(1) + narrow(2))
