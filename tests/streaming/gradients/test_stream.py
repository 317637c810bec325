"""The gradient stream against the flat buffers it replaces, bit by bit.

The reference is DeepSpeed's CPU offload in a few lines: one buffer of sums that micro-steps copy to
or add to, and one fp32 buffer that finished sums are copied to and every step multiplies.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.errors import StoreError
from memascend.kernels.overflow import sum_of_squares
from memascend.nvme.store import TensorStore
from memascend.streaming.gradients.stream import FACTOR_COUNT_MAX, GradientStream
from memascend.transfer.staging import StagingSlots
from tests.support.examples import examples
from tests.support.gradient_streams import (
    GROUP,
    FlatBuffers,
    open_gradient_stream,
    same_bits,
)
from tests.support.streaming_fakes import FakeMemory, FakeStore
from tests.support.streaming_hosts import memory_store, staging_slots


def seen_by_tiles(gradient_stream: GradientStream, numel: int, tile_numel: int, dtype: torch.dtype):
    """The gradients as the optimizer step reads them."""
    tiles = []
    for begin in range(0, numel, tile_numel):
        count = min(tile_numel, numel - begin)
        raw = torch.full((count,), 77.0, dtype=dtype)
        gradient = raw if dtype is torch.float32 else torch.full((count,), -5.0)
        for ticket in gradient_stream.start_read(GROUP, begin, raw):
            ticket.wait()
        gradient_stream.convert(GROUP, begin, raw, gradient)
        tiles.append(gradient.clone())
    return torch.cat(tiles)


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 999)
        ),
        st.tuples(st.just("step"), st.sampled_from([1.0, 0.5, 0.3, 1 / 65536])),
        st.tuples(st.just("finish"), st.integers(0, 3)),
        st.tuples(st.just("set"), st.integers(0, 3), st.integers(0, 999)),
    ),
    max_size=40,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    tile_numel=st.sampled_from([4096, 8192]),
    events=events,
)
def test_any_history_leaves_what_flat_buffers_would_hold(sizes, dtype, tile_numel, events) -> None:
    gradient_stream, store, _ = open_gradient_stream()
    flat = FlatBuffers(sizes, dtype)
    arrived = set()
    for event in events:
        if event[0] == "put":
            _, index, accumulate, final, seed = event
            generator = torch.Generator().manual_seed(seed)
            gradient = torch.randn(sizes[index], generator=generator).to(dtype)
            gradient_stream.put(
                GROUP, flat.offsets[index], gradient, accumulate=accumulate, final=final
            )
            flat.put(index, gradient, accumulate=accumulate, final=final)
            arrived.add(index)
        elif event[0] == "finish" and event[1] in arrived:
            gradient_stream.make_final(GROUP, flat.offsets[event[1]])
            flat.finish(event[1], sizes[event[1]])
        elif event[0] == "set":
            value = torch.randn(sizes[event[1]], generator=torch.Generator().manual_seed(event[2]))
            gradient_stream.set(GROUP, flat.offsets[event[1]], value)
            flat.seen.narrow(0, flat.offsets[event[1]], sizes[event[1]]).copy_(value)
        elif event[0] == "step":
            numel = sum(sizes)
            assert same_bits(seen_by_tiles(gradient_stream, numel, tile_numel, dtype), flat.seen)
            gradient_stream.note_factor(GROUP, event[1], torch.float32)
            flat.seen.mul_(event[1])
    assert same_bits(seen_by_tiles(gradient_stream, sum(sizes), tile_numel, dtype), flat.seen)
    whole = torch.empty(sum(sizes))
    gradient_stream.get(GROUP, 0, whole)
    assert same_bits(whole, flat.seen)
    store.close()


def test_a_shard_without_gradients_is_multiplied_by_every_step() -> None:
    gradient_stream, _, _ = open_gradient_stream()
    gradient = torch.randn(3000).bfloat16()
    gradient_stream.put(GROUP, 0, gradient)
    expected = gradient.float()
    for step in range(3 * FACTOR_COUNT_MAX):
        factor = 1.0 + step / 1000
        gradient_stream.note_factor(GROUP, factor, torch.float32)
        expected.mul_(factor)
    assert same_bits(seen_by_tiles(gradient_stream, 3000, 4096, torch.bfloat16), expected)
    shard = gradient_stream.find(GROUP, 0)
    assert shard is not None
    assert len(shard.factors) <= FACTOR_COUNT_MAX


def test_the_sum_of_squares_is_that_of_the_latest_values() -> None:
    gradient_stream, _, _ = open_gradient_stream()
    first, second = torch.randn(9000).bfloat16(), torch.randn(700).bfloat16()
    gradient_stream.put(GROUP, 0, first)
    shard = gradient_stream.put(GROUP, 9000, second, final=False)
    shard = gradient_stream.put(GROUP, 9000, second, accumulate=True)
    doubled = (second + second).double()
    assert shard.squares is not None
    assert shard.squares.item() == pytest.approx(doubled.square().sum().item(), rel=1e-13)
    total = first.double().square().sum() + doubled.square().sum()
    assert gradient_stream.sum_of_squares().item() == pytest.approx(total.item(), rel=1e-13)


def test_sums_stay_in_the_precision_that_the_device_has() -> None:
    store = memory_store()
    gradient_stream = GradientStream(
        store=store,
        slots=staging_slots(store),
        sum_of_squares=lambda value: value.float().square().sum(),
    )
    for offset in (0, 300):
        gradient_stream.put(GROUP, offset, torch.full((300,), 2.0).half())
    assert gradient_stream.sum_of_squares().dtype == torch.float32
    assert gradient_stream.sum_of_squares().item() == 2400.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_shows_until_it_is_replaced(bad: float) -> None:
    gradient_stream, _, _ = open_gradient_stream()
    gradient = torch.randn(9000).half()
    gradient_stream.put(GROUP, 0, torch.where(torch.arange(9000) == 8999, bad, gradient))
    gradient_stream.put(GROUP, 9000, gradient)
    assert not torch.isfinite(gradient_stream.sum_of_squares())
    gradient_stream.put(GROUP, 0, gradient)
    assert torch.isfinite(gradient_stream.sum_of_squares())


def test_a_gradient_may_be_overwritten_as_soon_as_it_was_put() -> None:
    gradient_stream, _, _ = open_gradient_stream(slot_count=2)
    gradient = torch.randn(50_000)
    expected = gradient.clone()
    gradient_stream.put(GROUP, 0, gradient)
    gradient.fill_(0.0)
    assert same_bits(seen_by_tiles(gradient_stream, 50_000, 4096, torch.float32), expected)


class OnceRefusing:
    """A store that fails the next write; as after any failed write, the key is broken."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.is_armed = False
        self.broken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, *, key: str, **keywords: Any) -> Any:
        if self.is_armed:
            self.is_armed = False
            self.broken.add(key)
            raise StoreError(5, f"write of {key} failed")
        return self._store.write(key=key, **keywords)

    def read(self, *, key: str, **keywords: Any) -> Any:
        if key in self.broken:
            raise StoreError(5, f"an earlier write of {key} failed")
        return self._store.read(key=key, **keywords)

    def discard(self, *, key: str) -> bool:
        self.broken.discard(key)
        return self._store.discard(key=key)


def test_a_failed_write_is_raised_and_not_read_back_as_data() -> None:
    store: Any = OnceRefusing(memory_store(None))
    slots = staging_slots(store, slot_count=3)
    gradient_stream = GradientStream(store=store, slots=slots, sum_of_squares=sum_of_squares)
    gradient_stream.put(GROUP, 0, torch.randn(50_000))
    slots.wait_writes()
    store.is_armed = True
    gradient_stream.put(GROUP, 0, torch.randn(50_000))
    with pytest.raises(StoreError, match="write of"):
        slots.wait_writes()
    with pytest.raises(StoreError, match="an earlier write"):
        gradient_stream.get(GROUP, 0, torch.empty(50_000))
    # More is added to what was lost: that is lost too.
    with pytest.raises(StoreError, match="an earlier write"):
        gradient_stream.put(GROUP, 0, torch.randn(50_000), accumulate=True)
    # A new window does not need it.
    gradient = torch.randn(50_000)
    gradient_stream.put(GROUP, 0, gradient)
    slots.wait_writes()
    found = torch.empty(50_000)
    gradient_stream.get(GROUP, 0, found)
    assert same_bits(found, gradient)


def test_errors_of_others_cost_no_slot() -> None:
    """A training loop may catch a device's out-of-memory error and go on."""

    def no_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    store = memory_store()
    slots = staging_slots(store, slot_count=3)
    GradientStream(store=store, slots=slots).put(GROUP, 0, torch.randn(5000))
    gradient_stream = GradientStream(store=store, slots=slots, sum_of_squares=no_memory)
    for accumulate in (False, True) * 4:
        with pytest.raises(torch.OutOfMemoryError):
            gradient_stream.put(GROUP, 0, torch.randn(5000), accumulate=accumulate)
    slots.resize(slot_bytes=slots.slot_bytes, slot_count=3)  # refuses while one is taken


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_new_value_is_given_to_who_wants_it(accumulate: bool) -> None:
    gradient_stream, _, _ = open_gradient_stream()
    first, second = torch.randn(9000).bfloat16(), torch.randn(9000).bfloat16()
    gradient_stream.put(GROUP, 0, first)
    found = torch.empty(9000)
    gradient_stream.put(GROUP, 0, second, accumulate=accumulate, result=found)
    expected = first + second if accumulate else second
    assert same_bits(found, expected.float())


def test_what_was_set_over_a_stored_product_stays() -> None:
    """The product of many factors lies where set() writes; it may be shorter than what is set."""
    gradient_stream, _, slots = open_gradient_stream()
    gradient_stream.put(GROUP, 0, torch.ones(900))
    for _ in range(FACTOR_COUNT_MAX + 1):
        gradient_stream.note_factor(GROUP, 0.5, torch.float32)
    value = torch.randn(1000)
    gradient_stream.set(GROUP, 0, value)
    slots.wait_writes()
    found = torch.empty(1000)
    gradient_stream.get(GROUP, 0, found)
    assert same_bits(found, value)


def test_discarding_gives_the_space_back() -> None:
    gradient_stream, store, _ = open_gradient_stream()
    gradient_stream.put(GROUP, 0, torch.randn(5000), final=False)
    gradient_stream.put(GROUP, 0, torch.randn(5000))
    gradient_stream.set(GROUP, 0, torch.randn(5000))
    gradient_stream.discard()
    assert store.keys() == []


def test_the_next_chunk_of_a_sum_is_being_read_while_one_is_added() -> None:
    store = FakeStore()
    slots = StagingSlots(store=store, memory=FakeMemory(), slot_bytes=4096, slot_count=3)
    gradient_stream = GradientStream(store=store, slots=slots)
    gradient_stream.put(GROUP, 0, torch.ones(3 * 1024))
    store.tickets.clear()
    gradient_stream.put(GROUP, 0, torch.ones(3 * 1024), accumulate=True)
    kinds = [kind for kind, _ in store.log()]
    assert kinds == ["read", "read", "write", "read", "write", "write"]
    target = torch.zeros(3 * 1024)
    gradient_stream.get(GROUP, 0, target)
    assert (target == 2).all()
