"""The resident cache: whatever lies in memory, keys read as if all of them were on the drive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memascend.errors import StoreError, StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import MemoryFaults
from memascend.streaming.gradients.stream import GradientStream
from memascend.transfer.staging import StagingSlots
from tests.support.examples import examples
from tests.support.resident_stores import content, open_resident, pattern, stream_of
from tests.support.streaming_hosts import PAGE_BYTES, HostTensors, memory_store

SLOT_COUNT = 3


class ResidentAgainstDict(RuleBasedStateMachine):
    """With any grants, at any time, over a drive with short and late transfers."""

    keys = st.sampled_from(["one.a", "one.b", "one.c", "other.a", "other.b", "third.a", "a"])
    sizes = st.one_of(st.integers(0, 5 * PAGE_BYTES), st.integers(0, 5).map(PAGE_BYTES.__mul__))

    @initialize(seed=st.integers(0, 2**32))
    def open(self, seed: int) -> None:
        self.store = open_resident(
            MemoryFaults(seed=seed, short=0.3, again=0.1, reorder=0.5, delay=0.2)
        )
        self.memory = HostTensors()
        self.model: dict[str, bytes | None] = {}  # None: reserved, not written
        self.sizes_of: dict[str, int] = {}
        self.serial = 0

    def fresh(self, nbytes: int) -> torch.Tensor:
        self.serial += 1
        return pattern(nbytes, self.serial)

    @rule(one=st.integers(0, 8), other=st.integers(0, 8))
    def grant(self, one: int, other: int) -> None:
        wanted = {"one": one * PAGE_BYTES, "other": max(0, other * PAGE_BYTES - 1)}
        self.store.grant(wanted, memory=self.memory, component="resident cache")
        expected = {"one": one * PAGE_BYTES, "other": other * PAGE_BYTES}
        assert self.store.granted == {key: value for key, value in expected.items() if value}

    @rule()
    def revoke(self) -> None:
        self.store.revoke()
        assert self.store.granted == {}

    @rule(key=keys, nbytes=sizes)
    def reserve(self, key: str, nbytes: int) -> None:
        self.store.reserve(key=key, nbytes=nbytes)
        if self.sizes_of.get(key) != nbytes:
            self.model[key], self.sizes_of[key] = None, nbytes

    @rule(key=keys, nbytes=sizes)
    def write_whole(self, key: str, nbytes: int) -> None:
        source = self.fresh(nbytes)
        self.store.write(key=key, source=source)
        self.model[key], self.sizes_of[key] = source.numpy().tobytes(), nbytes

    @rule(key=keys, start=st.floats(0, 1), stop=st.floats(0, 1))
    def write_part(self, key: str, start: float, stop: float) -> None:
        old = self.model.get(key)
        if old is None:
            return
        offset, end = sorted((int(start * len(old)), int(stop * len(old))))
        part = self.fresh(end - offset)
        self.model[key] = old[:offset] + part.numpy().tobytes() + old[end:]
        self.store.write(key=key, source=part, offset_bytes=offset)

    @rule(key=keys, start=st.floats(0, 1), stop=st.floats(0, 1))
    def read_part(self, key: str, start: float, stop: float) -> None:
        old = self.model.get(key)
        if old is None:
            return
        offset, end = sorted((int(start * len(old)), int(stop * len(old))))
        around = torch.full((end - offset + 200,), 0x5A, dtype=torch.uint8)
        target = around[100 : 100 + end - offset]
        self.store.read(key=key, target=target, offset_bytes=offset).wait()
        assert target.numpy().tobytes() == old[offset:end]
        assert (around[:100] == 0x5A).all()
        assert (around[100 + end - offset :] == 0x5A).all()

    @rule(key=keys, over=keys, nbytes=sizes)
    def give_memory_to(self, key: str, over: str, nbytes: int) -> None:
        if key == over:
            return
        self.store.give_memory_to(key=key, nbytes=nbytes, over=over)
        self.store.reserve(key=key, nbytes=nbytes)
        self.model[key], self.sizes_of[key] = None, nbytes

    @rule(key=keys, seed=st.integers(0, 255))
    def take_over(self, key: str, seed: int) -> None:
        if key not in self.sizes_of:
            return
        value = torch.full((self.sizes_of[key],), seed, dtype=torch.uint8)
        self.store.write(key="beside.a", source=value)
        self.store.take_over(key=key, other="beside.a")
        self.store.discard(key="beside.a")
        self.model[key] = value.numpy().tobytes()

    @rule(key=keys)
    def discard(self, key: str) -> None:
        assert self.store.discard(key=key) == (key in self.sizes_of)
        self.model.pop(key, None)
        self.sizes_of.pop(key, None)

    @invariant()
    def keys_agree(self) -> None:
        assert self.store.keys() == sorted(self.sizes_of)
        for key, nbytes in self.sizes_of.items():
            assert self.store.contains(key=key)
            assert self.store.nbytes(key=key) == nbytes

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for key, expected in self.model.items():
                if expected is not None:
                    assert content(self.store, key).numpy().tobytes() == expected
            self.store.close()


TestResidentAgainstDict = ResidentAgainstDict.TestCase
TestResidentAgainstDict.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- what lies where -------------------------------------------------------------------------------


def test_without_a_grant_everything_is_on_the_drive() -> None:
    store = open_resident()
    store.write(key="one.a", source=pattern(5000)).wait()
    assert store.core.keys() == ["one.a"]
    assert store.granted == {}
    assert store.stats()["resident_bytes_written"] == 0


def test_a_key_that_fits_never_touches_the_drive() -> None:
    store = open_resident(one=2 * PAGE_BYTES)
    ticket = store.write(key="one.a", source=pattern(5000))
    assert ticket.done()
    assert torch.equal(content(store, "one.a"), pattern(5000))
    assert store.core.keys() == []
    stats = store.stats()
    assert (stats["bytes_read"], stats["bytes_written"]) == (0, 0)
    assert stats["resident_bytes_read"] == stats["resident_bytes_read.one"] == 5000
    assert stats["resident_bytes_written.one"] == 5000


def test_keys_of_odd_sizes_fill_the_memory_to_the_byte() -> None:
    sizes = [1, 4097, 777, 5000, 2509]
    assert sum(sizes) <= 4 * PAGE_BYTES
    store = open_resident(one=sum(sizes))
    for number, nbytes in enumerate(sizes):
        store.write(key=f"one.{number}", source=pattern(nbytes, number)).wait()
    assert store.core.keys() == []
    for number, nbytes in enumerate(sizes):
        assert torch.equal(content(store, f"one.{number}"), pattern(nbytes, number))


def test_of_a_key_too_large_the_first_pages_are_in_memory() -> None:
    store = open_resident(one=2 * PAGE_BYTES)
    nbytes = 5 * PAGE_BYTES + 10
    store.write(key="one.a", source=pattern(nbytes)).wait()
    assert store.stats()["resident_bytes_written"] == 2 * PAGE_BYTES
    assert torch.equal(content(store, "one.a"), pattern(nbytes))
    store.write(key="one.a", source=pattern(nbytes, 2)[:-10], offset_bytes=10).wait()
    stats = store.stats()
    assert stats["resident_bytes_read"] == 2 * PAGE_BYTES
    assert stats["resident_bytes_written"] == 2 * 2 * PAGE_BYTES - 10
    assert torch.equal(content(store, "one.a")[10:], pattern(nbytes, 2)[:-10])


def test_a_transfer_over_the_border_is_one_ticket() -> None:
    faults = MemoryFaults()
    store = open_resident(faults, one=PAGE_BYTES)
    store.write(key="one.a", source=pattern(3 * PAGE_BYTES)).wait()
    faults.paused = True
    target = torch.zeros(200, dtype=torch.uint8)
    ticket = store.read(key="one.a", target=target, offset_bytes=PAGE_BYTES - 100)
    assert not ticket.done()
    faults.paused = False
    ticket.wait()
    assert torch.equal(target, pattern(3 * PAGE_BYTES)[PAGE_BYTES - 100 : PAGE_BYTES + 100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_of_any_dtype_and_shape_pass(dtype: torch.dtype) -> None:
    store = open_resident(one=PAGE_BYTES)
    source = torch.arange(4000).reshape(40, 100).to(dtype)
    store.write(key="one.a", source=source).wait()
    target = torch.zeros_like(source).requires_grad_(dtype != torch.uint8)
    store.read(key="one.a", target=target).wait()
    assert torch.equal(target, source)
    store.write(key="one.scalar", source=torch.tensor(3.0)).wait()


@pytest.mark.parametrize("in_memory", [0, 2 * PAGE_BYTES, 4 * PAGE_BYTES])
def test_what_is_taken_over_stays_where_its_key_was(in_memory: int) -> None:
    store = open_resident(one=in_memory)
    store.write(key="one.a", source=pattern(3 * PAGE_BYTES)).wait()
    new = pattern(3 * PAGE_BYTES).flip(0).contiguous()
    store.write(key="beside.a", source=new)  # on its way still
    store.take_over(key="one.a", other="beside.a")
    assert torch.equal(content(store, "one.a"), new)
    assert store.memory_of(key="one.a") == min(in_memory, 3 * PAGE_BYTES)


def test_discarded_keys_give_their_memory_to_the_next() -> None:
    store = open_resident(one=2 * PAGE_BYTES)
    for number in range(5):
        store.write(key=f"one.{number}", source=pattern(2 * PAGE_BYTES)).wait()
        assert store.discard(key=f"one.{number}")
        assert not store.discard(key=f"one.{number}")
    assert store.stats()["bytes_written"] == 0


def test_a_preferred_key_takes_the_memory_of_the_other() -> None:
    store = open_resident(one=2 * PAGE_BYTES)
    store.write(key="one.a", source=pattern(2 * PAGE_BYTES, 1)).wait()
    store.write(key="one.b", source=pattern(2 * PAGE_BYTES, 2)).wait()
    assert store.core.keys() == ["one.b"]
    used_bytes = store.stats()["used_bytes"]
    for old, new in (("one.a", "one.b"), ("one.b", "one.a")):
        store.give_memory_to(key=new, nbytes=2 * PAGE_BYTES, over=old)
        assert store.core.keys() == [old]
        store.write(key=new, source=pattern(2 * PAGE_BYTES, 3)).wait()
        assert torch.equal(content(store, new), pattern(2 * PAGE_BYTES, 3))
    assert torch.equal(content(store, "one.b"), pattern(2 * PAGE_BYTES, 3))
    assert store.stats()["used_bytes"] == used_bytes


def test_with_memory_for_both_a_preferred_key_takes_none_away() -> None:
    store = open_resident(one=2 * PAGE_BYTES)
    store.write(key="one.a", source=pattern(PAGE_BYTES)).wait()
    store.give_memory_to(key="one.b", nbytes=PAGE_BYTES, over="one.a")
    assert store.keys() == ["one.a", "one.b"]
    assert store.core.keys() == []
    assert torch.equal(content(store, "one.a"), pattern(PAGE_BYTES))


def test_keys_that_are_on_the_drive_first_move_into_memory() -> None:
    store = open_resident()
    for number in range(4):
        store.write(key=f"one.{number}", source=pattern(2 * PAGE_BYTES, number)).wait()
    store.write(key="third.a", source=pattern(100)).wait()
    store.grant({"one": 5 * PAGE_BYTES}, memory=HostTensors(), component="resident cache")
    assert store.core.keys() == ["one.2", "one.3", "third.a"]
    for number in range(4):
        assert torch.equal(content(store, f"one.{number}"), pattern(2 * PAGE_BYTES, number))
    store.write(key="one.2", source=pattern(2 * PAGE_BYTES, 9)).wait()
    assert torch.equal(content(store, "one.2"), pattern(2 * PAGE_BYTES, 9))


def test_memory_of_streams_without_keys_is_given_back() -> None:
    store = open_resident(one=PAGE_BYTES, other=PAGE_BYTES)
    store.write(key="one.a", source=pattern(10)).wait()
    store.trim()
    assert store.granted == {"one": PAGE_BYTES}
    assert torch.equal(content(store, "one.a"), pattern(10))


def test_sums_of_gradients_stay_in_memory_from_window_to_window() -> None:
    store = ResidentStore(memory_store(), stream_of=lambda key: key.partition(".")[0])
    store.grant({"gradient": 4000}, memory=HostTensors(), component="resident cache")
    slots = StagingSlots(
        store=store, memory=HostTensors(), slot_bytes=PAGE_BYTES, slot_count=SLOT_COUNT
    )
    gradient_stream = GradientStream(store=store, slots=slots, give_memory_to=store.give_memory_to)
    windows, micro_steps = 4, 3
    for window in range(windows):
        for step in range(micro_steps):
            final = step == micro_steps - 1
            gradient = torch.full((1000,), float(window + 1))
            gradient_stream.put("g", 0, gradient, accumulate=step > 0, final=final)
            seen = torch.empty(1000)
            gradient_stream.get("g", 0, seen)
            assert (seen == micro_steps * (window + final)).all()
    # The drive sees each window's result once, when the next window begins.
    assert store.stats()["bytes_written"] == (windows - 1) * 4096  # in whole blocks
    assert store.stats()["resident_bytes_written.gradient"] == windows * micro_steps * 4000


# -- mistakes and faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (99, 2), (-1, 1)])
def test_bytes_outside_a_key_are_refused(offset: int, nbytes: int) -> None:
    store = open_resident(one=PAGE_BYTES)
    store.write(key="one.a", source=pattern(100)).wait()
    with pytest.raises(ValueError, match=r"not all in .one\.a., which (has 100|begins)"):
        store.read(key="one.a", target=pattern(nbytes), offset_bytes=offset)
    with pytest.raises(ValueError, match="not all in"):
        store.write(key="one.a", source=pattern(nbytes), offset_bytes=offset)
    assert torch.equal(content(store, "one.a"), pattern(100))


def test_unknown_keys_and_strided_tensors_are_the_stores_errors() -> None:
    store = open_resident(one=PAGE_BYTES)
    with pytest.raises(StoreError, match="no key"):
        store.read(key="one.a", target=pattern(1))
    with pytest.raises(StoreError, match="no key"):
        store.write(key="one.a", source=pattern(1), offset_bytes=0)
    store.reserve(key="one.a", nbytes=48)
    with pytest.raises(ValueError, match="contiguous CPU tensors"):
        store.write(key="one.a", source=torch.zeros(4, 3).t())
    with pytest.raises(ValueError, match="contiguous CPU tensors"):
        store.read(key="one.a", target=torch.zeros(4, 3).t())


def test_a_full_drive_changes_nothing() -> None:
    store = open_resident(MemoryFaults(capacity_bytes=1 << 20), one=2 * PAGE_BYTES)
    store.write(key="one.a", source=pattern(3 * PAGE_BYTES)).wait()
    for _ in range(2):
        with pytest.raises(StoreFullError):
            store.reserve(key="one.a", nbytes=2 << 20)
        with pytest.raises(StoreFullError):
            store.write(key="one.b", source=torch.zeros(2 << 20, dtype=torch.uint8))
    assert store.keys() == ["one.a"]
    assert store.memory_of(key="one.a") == 2 * PAGE_BYTES
    assert torch.equal(content(store, "one.a"), pattern(3 * PAGE_BYTES))


def test_after_a_failed_write_the_drives_part_raises_until_written_whole() -> None:
    faults = MemoryFaults(enospc=1.0)
    store = open_resident(faults, one=PAGE_BYTES)
    ticket = store.write(key="one.a", source=pattern(2 * PAGE_BYTES))
    with pytest.raises(StoreError, match="cannot write"):
        ticket.wait()
    with pytest.raises(StoreError, match="earlier write of it failed"):
        content(store, "one.a")
    head = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    store.read(key="one.a", target=head).wait()
    assert torch.equal(head, pattern(2 * PAGE_BYTES)[:PAGE_BYTES])


def test_a_key_that_cannot_be_read_stays_on_the_drive() -> None:
    faults = MemoryFaults(seed=5, eio=0.5)
    store = ResidentStore(memory_store(faults), stream_of=stream_of)
    written = []
    for number in range(20):
        try:
            store.write(key=f"one.{number:02}", source=pattern(PAGE_BYTES, number)).wait()
            written.append(f"one.{number:02}")
        except StoreError:
            store.discard(key=f"one.{number:02}")
    with pytest.raises(StoreError, match="cannot read"):
        store.grant({"one": 20 * PAGE_BYTES}, memory=HostTensors(), component="resident cache")
    assert store.keys() == written


def test_a_closed_store_serves_nothing() -> None:
    store = open_resident(one=PAGE_BYTES)
    store.write(key="one.a", source=pattern(10)).wait()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read(key="one.a", target=pattern(10))
