"""Keys striped over several volumes: content, shares, room, and what a full volume does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from memascend import _core
from memascend.errors import StoreError, StoreFullError
from tests.support.nvme_memory import open_store, read, write
from tests.support.nvme_model import KEYS, SHIFTS, StoreModel, run_as_test

STRIPE = 64 << 10
BLOCK = 4096


def open_volumes(*volumes: _core.VolumeOptions | str, **options: object) -> _core.Store:
    settings: dict[str, object] = {"stripe_bytes": STRIPE, "grow_bytes": STRIPE}
    settings.update(options)
    return open_store("(memory)", "memory", volumes=list(volumes), **settings)


def used_bytes(store: _core.Store) -> list[int]:
    return [volume.used_bytes for volume in store.volume_stats()]


class StripedStoreAgainstDict(StoreModel):
    """One to four volumes of any capacity and weight hold what a dict of bytes holds."""

    @initialize(
        seed=st.integers(0, 2**32),
        volumes=st.lists(
            st.tuples(st.integers(1, 400), st.floats(0.1, 10)), min_size=1, max_size=4
        ),
    )
    def open(self, seed: int, volumes: list[tuple[int, float]]) -> None:
        note(f"faults of seed {seed}, volumes {volumes}")
        store = open_volumes(
            *(
                _core.VolumeOptions(str(index), weight=weight, capacity_bytes=blocks * BLOCK)
                for index, (blocks, weight) in enumerate(volumes)
            ),
            chunk_bytes=32 << 10,
            faults=_core.MemoryFaults(seed=seed, short=0.2, again=0.1, reorder=0.5, delay=0.1),
        )
        self.begin(store)
        self.available_bytes = store.available_bytes()
        assert self.available_bytes == sum(blocks * BLOCK for blocks, _ in volumes)

    @rule(key=KEYS, nbytes=st.integers(0, 500_000), shift=SHIFTS)
    def write_whole(self, key: str, nbytes: int, shift: int) -> None:
        content = self.fresh(nbytes)
        available = self.store.available_bytes()
        same_size = key in self.model and len(self.model[key]) == nbytes
        try:
            write(self.store, key, content, shift=shift)
        except StoreFullError:
            assert not same_size
            assert -(-nbytes // BLOCK) * BLOCK > available
            assert self.store.available_bytes() == available
        else:
            self.model[key] = content

    @invariant()
    def space_is_accounted_for(self) -> None:
        if self.store is None:
            return
        taken = sum(-(-len(content) // BLOCK) * BLOCK for content in self.model.values())
        assert sum(used_bytes(self.store)) == taken
        assert self.store.available_bytes() == self.available_bytes - taken

    def teardown(self) -> None:
        if self.store is not None:
            self.end()
            for key in self.model:
                self.store.discard(key=key)
            assert self.store.available_bytes() == self.available_bytes
            assert self.store.stats()["used_bytes"] == 0
            self.store.close()


TestStripedStoreAgainstDict = run_as_test(StripedStoreAgainstDict, max_examples=60)


def test_a_large_key_lies_on_all_volumes_in_proportion_to_their_weights():
    store = open_volumes(_core.VolumeOptions("fast", weight=3.0), "slow")
    store.reserve(key="k", nbytes=40 * STRIPE)
    assert used_bytes(store) == [30 * STRIPE, 10 * STRIPE]
    assert [volume.path for volume in store.volume_stats()] == ["fast", "slow"]


def test_a_transfer_asks_for_a_stripe_at_a_time_and_joins_those_of_one_volume():
    store = open_volumes(_core.VolumeOptions("fast", weight=3.0), "slow", chunk_bytes=1 << 20)
    write(store, "k", bytes(32 * STRIPE)).wait()
    assert store.stats()["requests"] <= 17  # 32 stripes, 24 of them beside others of their volume
    assert store.stats()["bytes_bounced"] == 0


def test_small_keys_stay_whole_and_go_where_there_is_least():
    store = open_volumes("a", "b")
    for index in range(6):
        write(store, f"k{index}", bytes(STRIPE)).wait()
    assert used_bytes(store) == [3 * STRIPE, 3 * STRIPE]
    assert store.stats()["requests"] == 6


def test_a_full_volume_leaves_the_rest_to_the_others():
    store = open_volumes(_core.VolumeOptions("small", capacity_bytes=2 * STRIPE), "large")
    content = os.urandom(20 * STRIPE + 5)
    write(store, "k", content).wait()
    assert used_bytes(store) == [2 * STRIPE, 18 * STRIPE + BLOCK]
    assert read(store, "k", len(content)) == content


def test_volumes_that_are_all_full_are_listed_and_nothing_changes():
    store = open_volumes(
        _core.VolumeOptions("one", capacity_bytes=4 * STRIPE),
        _core.VolumeOptions("two", capacity_bytes=8 * STRIPE),
    )
    write(store, "k", b"k" * STRIPE).wait()
    before = used_bytes(store)
    with pytest.raises(StoreFullError) as caught:
        store.reserve(key="wide", nbytes=12 * STRIPE)
    text = str(caught.value)
    assert "one: 65536 bytes used, 196608 bytes available" in text
    assert "two: 0 bytes used, 524288 bytes available" in text
    assert "available 720896 bytes" in text
    assert caught.value.errno == errno.ENOSPC
    assert used_bytes(store) == before
    assert read(store, "k", STRIPE) == b"k" * STRIPE


def test_a_capacity_holds_for_files_too(tmp_path):
    store = open_store(
        tmp_path, "threads", volumes=[_core.VolumeOptions(str(tmp_path), capacity_bytes=1 << 20)]
    )
    with pytest.raises(StoreFullError, match="available 1048576 bytes"):
        store.reserve(key="k", nbytes=(1 << 20) + 1)
    store.reserve(key="k", nbytes=1 << 20)


def test_files_of_one_file_system_do_not_count_its_room_twice(tmp_path):
    single = open_store(tmp_path, "threads")
    double = open_store(tmp_path, "threads", volumes=[str(tmp_path), str(tmp_path)])
    available = single.available_bytes()
    assert double.available_bytes() < 1.5 * available


def test_a_symbolic_link_in_place_of_the_directory_is_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link"):
        open_store(tmp_path / "link", "threads")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive(weight):
    with pytest.raises(ValueError, match="weight must be positive"):
        open_volumes(_core.VolumeOptions("a", weight=weight), "b")


def test_a_store_without_volumes_is_refused():
    with pytest.raises(ValueError, match="at least one volume"):
        open_volumes()


def test_an_error_on_one_volume_names_it():
    store = open_volumes("a", "b", faults=_core.MemoryFaults(eio=1.0), eio_retries=0)
    with pytest.raises(StoreError) as caught:
        write(store, "k", bytes(STRIPE)).wait()
    assert caught.value.volume == "a"


def test_a_drive_that_answers_slowly_does_not_hold_the_others_back():
    faults = _core.MemoryFaults()
    store = open_volumes("slow", "fast", faults=faults, queue_depth=4)
    store.reserve(key="on slow", nbytes=STRIPE)
    store.reserve(key="on fast", nbytes=STRIPE)
    faults.paused_volume = 0
    late = [write(store, f"late {index}", bytes(16 * STRIPE)) for index in range(4)]
    for _ in range(20):
        write(store, "on fast", bytes(STRIPE)).wait()
        assert read(store, "on fast", STRIPE) == bytes(STRIPE)
    assert not any(ticket.done() for ticket in late)
    faults.paused_volume = -1
    store.wait_all()
    assert all(ticket.done() for ticket in late)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_threads_of_a_volume_stay_near_its_drive_as_far_as_they_may(tmp_path, engine):
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    for cpus, expected in (([one], {one}), ([4000, -1], allowed), ([], allowed)):
        volume = _core.VolumeOptions(str(tmp_path))
        volume.cpus = cpus
        others = set(Path("/proc/self/task").iterdir())
        store = open_store(tmp_path, engine, volumes=[volume])
        new = set(Path("/proc/self/task").iterdir()) - others
        ours = [task for task in new if (task / "comm").read_text().startswith("memascend-")]
        assert ours
        assert all(os.sched_getaffinity(int(task.name)) == expected for task in ours)
        store.close()
    assert os.sched_getaffinity(0) == allowed
