"""The contract of the store, the same on every engine."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref

import pytest

from memascend import _core
from memascend.errors import StoreError, StoreFullError
from tests.support.nvme_memory import PageMemory, open_store, read, refusal, write

MIB = 1 << 20
SIZES = [1, 511, 512, 4095, 4096, 4097, MIB + 3, 5 * MIB]


@pytest.fixture(params=["uring", "libaio", "threads", "memory", "threads, verified"])
def store(request, tmp_path):
    engine, _, is_verified = request.param.partition(", ")
    if engine in ("uring", "libaio") and refusal(engine):
        pytest.skip(f"needs {engine}: {refusal(engine)}")
    opened = open_store(tmp_path, engine, verify="full" if is_verified else "off")
    yield opened
    opened.close()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_what_was_written_is_read_back(store, nbytes, shift):
    content = random.Random(nbytes).randbytes(nbytes)
    write(store, "k", content, shift=shift).wait()
    assert read(store, "k", nbytes) == content
    assert read(store, "k", nbytes, shift=3) == content


@pytest.mark.parametrize("offset", [0, 1, 511, 512, 4095, 4096, 100_001])
@pytest.mark.parametrize("nbytes", [1, 513, 4096, 200_003])
def test_a_part_is_written_and_read_without_touching_its_neighbours(store, offset, nbytes):
    whole = bytearray(random.Random(1).randbytes(400_000))
    write(store, "k", bytes(whole)).wait()
    part = random.Random(2).randbytes(nbytes)
    write(store, "k", part, offset=offset, shift=offset % 7).wait()
    whole[offset : offset + nbytes] = part
    assert read(store, "k", nbytes, offset=offset, shift=nbytes % 5) == part
    assert read(store, "k", len(whole)) == whole


def test_parts_written_at_once_into_one_block_all_arrive(store):
    store.reserve(key="k", nbytes=10_000)
    write(store, "k", bytes(10_000)).wait()
    content = random.Random(3).randbytes(10_000)
    tickets = [write(store, "k", content[at : at + 7], offset=at) for at in range(0, 9996, 7)]
    for ticket in tickets:
        ticket.wait()
    assert read(store, "k", 9996) == content[:9996]


def test_a_read_sees_every_write_started_before_it(store):
    for turn in range(20):
        content = bytes([turn]) * (300_000 + turn % 2)
        ticket = write(store, "k", content)
        assert read(store, "k", len(content)) == content
        assert ticket.done()


def test_writes_of_one_range_keep_their_order(store):
    write(store, "k", bytes(100_000)).wait()
    tickets = [write(store, "k", bytes([n]) * 50_000, offset=25_000) for n in range(1, 30)]
    for ticket in tickets:
        ticket.wait()
    assert read(store, "k", 50_000, offset=25_000) == bytes([29]) * 50_000


def test_a_write_without_offset_replaces_a_key_of_another_size(store):
    write(store, "k", b"x" * 10_000).wait()
    write(store, "k", b"y" * 3).wait()
    assert store.nbytes(key="k") == 3
    assert read(store, "k", 3) == b"yyy"
    assert store.stats()["used_bytes"] == max(4096, store.offset_alignment_bytes)


def test_a_part_at_offset_0_leaves_the_size_of_its_key(store):
    store.reserve(key="k", nbytes=10_000)
    write(store, "k", b"abc", offset=0).wait()
    assert store.nbytes(key="k") == 10_000
    assert read(store, "k", 3) == b"abc"


def test_exchanged_keys_have_what_is_on_its_way_to_the_other(store):
    for turn in range(20):
        first, second = (random.Random(2 * turn + one).randbytes(MIB + 3) for one in (0, 1))
        write(store, "first", first)
        write(store, "second", second)
        store.exchange(key="first", other="second")
        assert read(store, "first", len(second)) == second
        assert read(store, "second", len(first)) == first
        write(store, "first", b"new", offset=5)
        assert read(store, "first", len(second)) == second[:5] + b"new" + second[8:]
        assert read(store, "second", len(first)) == first


def test_a_key_cannot_be_exchanged_with_one_that_is_not_there(store):
    write(store, "first", b"content")
    for key, other in (("first", "absent"), ("absent", "first")):
        with pytest.raises(StoreError, match='"absent"'):
            store.exchange(key=key, other=other)
    store.exchange(key="first", other="first")
    assert read(store, "first", 7) == b"content"


def test_keys_of_two_sizes_cannot_be_exchanged(store):
    write(store, "first", b"content")
    write(store, "second", b"contents")
    with pytest.raises(ValueError, match='"first" has 7 bytes and "second" 8'):
        store.exchange(key="first", other="second")
    assert read(store, "first", 7) == b"content"


def test_space_of_a_discarded_key_is_used_again(store):
    for turn in range(5):
        write(store, f"k{turn}", bytes(4 * MIB)).wait()
        assert store.discard(key=f"k{turn}")
    stats = store.stats()
    assert stats["used_bytes"] == 0
    assert stats["reserved_bytes"] == 8 * MIB
    assert not store.discard(key="k0")
    assert store.keys() == []


def test_space_that_no_key_has_goes_back_and_is_taken_again(store):
    kept = random.Random(7).randbytes(3 * MIB + 5)
    for name, nbytes in (("first", 40 * MIB), ("last", len(kept))):
        write(store, name, bytes(nbytes)).wait()
    write(store, "last", kept).wait()
    store.discard(key="first")
    before = store.stats()
    store.shrink()
    after = store.stats()
    assert after["used_bytes"] == before["used_bytes"]
    assert after["reserved_bytes"] == after["used_bytes"] < before["reserved_bytes"] - 40 * MIB
    other = random.Random(8).randbytes(20 * MIB)
    for name in ("again", "and again"):
        write(store, name, other).wait()
    store.shrink()
    for name, content in (("last", kept), ("again", other), ("and again", other)):
        assert read(store, name, len(content)) == content


def test_keys_are_listed_and_sized(store):
    store.reserve(key="b", nbytes=5)
    store.reserve(key="a", nbytes=0)
    assert store.keys() == ["a", "b"]
    assert store.contains(key="a")
    assert not store.contains(key="c")
    assert (store.nbytes(key="a"), store.nbytes(key="b")) == (0, 5)


def test_a_key_of_no_bytes_is_written_and_read(store):
    ticket = write(store, "k", b"")
    ticket.wait()
    assert ticket.nbytes == 0
    assert read(store, "k", 0) == b""


def test_many_keys_in_flight_at_once_keep_apart(store):
    contents = {f"k{n}": random.Random(n).randbytes(3000 + 517 * n) for n in range(200)}
    tickets = [write(store, key, content) for key, content in contents.items()]
    for ticket in tickets:
        ticket.wait()
    for key, content in contents.items():
        assert read(store, key, len(content)) == content
    assert store.stats()["in_flight_count"] == 0


def test_slack_memory_spares_the_bounce_of_an_odd_tail(store):
    content = os.urandom(5001)
    slot_bytes = max(8192, store.offset_alignment_bytes)
    source = PageMemory(slot_bytes)
    source.put(content)
    before = store.stats()["bytes_bounced"]
    store.write(
        key="k", address=source.address, nbytes=5001, capacity=slot_bytes, hold=source
    ).wait()
    target = PageMemory(slot_bytes)
    store.read(
        key="k", address=target.address, nbytes=5001, capacity=slot_bytes, hold=target
    ).wait()
    assert target.get(0, 5001) == content
    assert store.stats()["bytes_bounced"] == before


def test_slack_memory_of_a_part_does_not_spoil_what_follows_it(store):
    write(store, "k", b"a" * 20_000).wait()
    source = PageMemory(8192)
    source.put(b"b" * 5000)
    store.write(
        key="k", address=source.address, nbytes=5000, offset=0, capacity=8192, hold=source
    ).wait()
    assert read(store, "k", 20_000) == b"b" * 5000 + b"a" * 15_000


def test_a_key_that_is_not_there_is_named(store):
    with pytest.raises(StoreError, match='no key "absent"') as caught:
        read(store, "absent", 1)
    assert caught.value.key == "absent"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (10, 1), (2**64 - 1, 2)])
def test_bytes_outside_a_key_are_refused(store, offset, nbytes):
    store.reserve(key="k", nbytes=10)
    memory = PageMemory(64)
    for start in (store.read, store.write):
        with pytest.raises(ValueError, match="not all in"):
            start(key="k", address=memory.address, nbytes=nbytes, offset=offset)


def test_more_than_the_disk_has_is_refused_at_once_and_changes_nothing(store):
    write(store, "k", b"abc").wait()
    before = store.stats()["reserved_bytes"]
    for nbytes in (1 << 60, 2**64 - 1):
        with pytest.raises(
            StoreFullError, match=r"needed \d+ bytes, available \d+ bytes"
        ) as caught:
            store.reserve(key="k", nbytes=nbytes)
        assert caught.value.key == "k"
        assert caught.value.nbytes == nbytes
    assert store.stats()["reserved_bytes"] == before
    assert read(store, "k", 3) == b"abc"


def test_a_closed_store_refuses_to_work(store):
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.reserve(key="k", nbytes=1)


def test_the_owner_of_memory_is_let_go_after_the_io(store):
    memory = PageMemory(MIB)
    alive = weakref.ref(memory)
    ticket = store.write(key="k", address=memory.address, nbytes=MIB, hold=memory)
    del memory
    ticket.wait()
    gc.collect()
    assert alive() is None


def test_closing_waits_for_what_is_in_flight(store):
    ticket = write(store, "k", bytes(5 * MIB))
    store.close()
    assert ticket.done()


def test_threads_read_and_write_at_the_same_time(store):
    failures = []

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        try:
            for turn in range(30):
                content = numbers.randbytes(numbers.randrange(1, 200_000))
                write(store, f"k{seed}", content, shift=turn % 3)
                if read(store, f"k{seed}", len(content), shift=turn % 5) != content:
                    failures.append((seed, turn))
                if turn % 7 == 0:
                    store.discard(key=f"k{seed}")
        except Exception as error:
            failures.append((seed, error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []


def test_an_unknown_engine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be auto, uring, libaio, threads or memory"):
        open_store(tmp_path, "aio")


def test_two_stores_on_one_directory_do_not_see_each_other(tmp_path):
    first = open_store(tmp_path, "auto")
    second = open_store(tmp_path, "auto")
    write(first, "k", b"first").wait()
    write(second, "k", b"other").wait()
    assert read(first, "k", 5) == b"first"
    assert read(second, "k", 5) == b"other"
    assert os.listdir(tmp_path) == []
    first.close()
    assert read(second, "k", 5) == b"other"


def test_a_start_keeps_the_interpreter_while_the_store_is_free():
    """Else another Python thread has it, for milliseconds per transfer."""
    faults = _core.MemoryFaults()
    store = open_store("(memory)", "memory", faults=faults)
    store.reserve(key="k", nbytes=64 * 4096)
    memory = PageMemory(64 * 4096)
    turns = 0
    stopping = False

    def take_turns():
        nonlocal turns
        while not stopping:
            turns += 1
            time.sleep(0)  # gives the interpreter back

    interval = sys.getswitchinterval()
    other = threading.Thread(target=take_turns)
    sys.setswitchinterval(100)  # seconds: a turn is had only where it is given
    try:
        other.start()
        faults.paused = True  # nothing ends, so that nobody else is in the store
        before = turns
        tickets = [
            store.write(
                key="k", address=memory.address, nbytes=4096, offset=block * 4096, hold=memory
            )
            for block in range(64)
        ]
        during = turns - before
    finally:
        stopping = True
        sys.setswitchinterval(interval)
        other.join()
        faults.paused = False
    for ticket in tickets:
        ticket.wait()
    assert during == 0


def test_time_is_counted_of_who_waits_but_not_of_who_works_behind_training(store):
    def waited():
        return store.stats()["wait_seconds"]

    def wait_behind():
        _core.wait_behind()
        store.wait_all()

    store.wait_all()
    before = waited()
    assert before > 0
    thread = threading.Thread(target=wait_behind)
    thread.start()
    thread.join()
    assert waited() == before
    store.wait_all()
    assert waited() > before
