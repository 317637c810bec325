"""What the store does when the device misbehaves, on the memory engine with seeded faults."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from memascend import _core
from memascend.errors import StoreError, StoreFullError
from tests.support.nvme_memory import CANARY, PageMemory, open_store, read, write
from tests.support.nvme_model import StoreModel, run_as_test


def open_faulty(**faults: float) -> tuple[_core.Store, _core.MemoryFaults]:
    """A store whose EIO is final, so that one is enough."""
    chosen = _core.MemoryFaults(**faults)
    return open_store("(memory)", "memory", faults=chosen, eio_retries=0), chosen


class StoreAgainstDict(StoreModel):
    """The store, with short transfers, retries and reordering, does what a dict of bytes does."""

    @initialize(seed=st.integers(0, 2**32))
    def open(self, seed: int) -> None:
        note(f"faults of seed {seed}")
        store, _ = open_faulty(seed=seed, short=0.3, again=0.1, reorder=0.5, delay=0.2)
        self.begin(store)

    @invariant()
    def keys_agree(self) -> None:
        assert self.store.keys() == sorted(self.model)


TestStoreAgainstDict = run_as_test(StoreAgainstDict, max_examples=40)


def test_the_rest_of_a_short_transfer_is_asked_for_again():
    store, _ = open_faulty(seed=1, short=0.5)
    content = bytes(range(256)) * 4096
    write(store, "k", content).wait()
    assert read(store, "k", len(content)) == content
    assert store.stats()["resubmitted"] > 0


def test_a_device_that_never_moves_a_whole_block_is_given_up():
    store, _ = open_faulty(seed=1, again=1.0)
    with pytest.raises(StoreError) as caught:
        write(store, "k", bytes(4096)).wait()
    assert caught.value.errno in (errno.EAGAIN, errno.EINTR)
    assert store.stats()["retries"] >= 64  # EAGAIN has a time limit, EINTR a count


def test_an_error_names_key_volume_offset_nbytes_and_errno():
    store, _ = open_faulty(seed=2, eio=1.0)
    ticket = write(store, "layer.0.weight", bytes(256 * 1024))
    with pytest.raises(StoreError, match=r'cannot write "layer\.0\.weight"') as caught:
        ticket.wait()
    error = caught.value
    assert (error.key, error.volume, error.errno) == ("layer.0.weight", "(memory)", errno.EIO)
    assert (error.offset, error.nbytes) == (0, 128 * 1024)
    assert ticket.done()
    assert isinstance(error, OSError)
    with pytest.raises(StoreError):
        ticket.wait()


def test_a_write_without_space_on_the_device_says_so():
    store, _ = open_faulty(seed=2, enospc=1.0)
    with pytest.raises(StoreError, match="the file system is full") as caught:
        write(store, "k", bytes(4096)).wait()
    assert caught.value.errno == errno.ENOSPC


def test_an_eio_of_a_moment_is_survived_and_counted():
    faults = _core.MemoryFaults(seed=7, eio=0.2, short=0.2, again=0.2, reorder=0.5)
    store = open_store("(memory)", "memory", faults=faults, eio_retries=12, eio_pause_seconds=0.001)
    content = os.urandom(8 << 20)
    write(store, "k", content, shift=1).wait()
    assert read(store, "k", len(content), shift=3) == content
    stats = store.stats()
    assert min(stats["eio_retries"], stats["retries"], stats["resubmitted"]) > 0


def test_a_pause_after_eio_does_not_hold_other_transfers_up():
    faults = _core.MemoryFaults()
    store = open_store("(memory)", "memory", faults=faults, eio_pause_seconds=2)
    write(store, "k", b"b" * 4096).wait()
    faults.gone = errno.EIO
    paused = write(store, "paused", b"a" * 4096)
    while not store.stats()["eio_retries"]:
        time.sleep(0.001)
    faults.gone = 0
    assert read(store, "k", 4096) == b"b" * 4096
    assert not paused.done()
    paused.wait()


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.ENODEV, "the drive is gone"),
        (errno.ENXIO, "the drive is gone"),
        (errno.EROFS, "the file system is read-only"),
        (errno.ENOSPC, "the file system is full though the space was reserved"),
        (errno.EDQUOT, "quota"),
        (errno.ESTALE, "network file system"),
        (errno.EREMOTEIO, "its file system failed"),
    ],
)
def test_a_volume_that_fails_under_load_is_one_clear_error_at_once(code, cause):
    store, faults = open_faulty(reorder=0.5, delay=0.2)
    content = bytes(1 << 20)
    write(store, "k", content).wait()
    faults.paused = True
    tickets = [write(store, f"k{number}", content) for number in range(4)]
    faults.gone = code
    faults.paused = False
    for ticket in tickets:
        with pytest.raises(StoreError, match=f"likely cause: .*{cause}.*\nfix: ") as caught:
            ticket.wait()
        assert caught.value.errno == code
        assert str(caught.value).endswith("; start again from data that is known to be good")
    stats = store.stats()
    assert (stats["in_flight_count"], stats["eio_retries"], stats["retries"]) == (0, 0, 0)
    faults.gone = 0
    assert read(store, "k", len(content)) == content  # what was there is not lost


def test_nothing_touches_memory_after_its_transfer_has_failed():
    store, _ = open_faulty(seed=5, eio=0.05, reorder=1.0, delay=0.5)
    failures = 0
    for turn in range(20):
        try:
            write(store, f"k{turn}", bytes(1 << 20)).wait()
            memory = PageMemory(1 << 20)
            ticket = store.read(key=f"k{turn}", address=memory.address, nbytes=1 << 20)
            ticket.wait()
        except StoreError as error:
            failures += 1
            if "cannot read" in str(error):
                memory.put(bytes([CANARY]) * memory.nbytes)
                time.sleep(0.002)
                assert memory.get() == bytes([CANARY]) * memory.nbytes
    assert failures > 0


def attempt(action: Callable[[], object]) -> str:
    """Error text of an action, empty when it worked."""
    try:
        action()
    except StoreError as error:
        return str(error)
    return ""


def test_a_key_whose_write_failed_cannot_be_read_until_it_is_written_again():
    store, _ = open_faulty(seed=1, eio=0.5)
    while not attempt(lambda: write(store, "k", b"a" * 4096).wait()):
        pass
    assert "an earlier write of it failed" in attempt(lambda: read(store, "k", 4096))
    while attempt(lambda: write(store, "k", b"b" * 4096).wait()):
        pass
    while text := attempt(lambda: read(store, "k", 4096)):
        assert "earlier" not in text
    target = PageMemory(4096)
    while attempt(
        lambda: store.read(key="k", address=target.address, nbytes=4096, hold=target).wait()
    ):
        pass
    assert target.get() == b"b" * 4096


def test_a_read_that_waited_for_a_failed_write_fails_with_it():
    store, faults = open_faulty(seed=0, eio=1.0)
    faults.paused = True
    writing = write(store, "k", bytes(4096))
    memory = PageMemory(4096)
    reading = store.read(key="k", address=memory.address, nbytes=4096, hold=memory)
    faults.paused = False
    for ticket in (writing, reading):
        with pytest.raises(StoreError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO
    assert store.stats()["requests"] == 1


def test_an_owner_is_kept_while_its_memory_is_in_flight():
    store, faults = open_faulty()
    faults.paused = True
    memory = PageMemory(4096)
    alive = weakref.ref(memory)
    ticket = store.write(key="k", address=memory.address, nbytes=4096, hold=memory)
    del memory
    gc.collect()
    time.sleep(0.02)
    assert alive() is not None
    assert not ticket.done()
    faults.paused = False
    ticket.wait()
    assert alive() is None


def test_an_owner_is_let_go_though_its_ticket_was_dropped():
    store, _ = open_faulty()
    memory = PageMemory(4096)
    alive = weakref.ref(memory)
    store.write(key="k", address=memory.address, nbytes=4096, hold=memory)
    del memory
    store.wait_all()
    assert alive() is None


def test_transfers_that_overlap_wait_and_others_do_not():
    store, faults = open_faulty()
    write(store, "k", bytes(16_384)).wait()
    faults.paused = True
    before = store.stats()["requests"]
    write(store, "k", b"x" * 4096, offset=0)
    write(store, "k", b"y" * 4096, offset=0)  # waits
    last = write(store, "k", b"z" * 4096, offset=8192)
    deadline = time.monotonic() + 10
    while store.stats()["requests"] < before + 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert store.stats()["requests"] == before + 2
    assert store.stats()["in_flight_count"] == 3
    faults.paused = False
    store.wait_all()
    assert last.done()
    assert read(store, "k", 4096) == b"y" * 4096


def test_a_full_volume_says_what_is_needed_and_what_is_there():
    store, _ = open_faulty(capacity_bytes=1 << 20)
    write(store, "a", b"a" * (512 << 10)).wait()
    with pytest.raises(
        StoreFullError, match="needed 614400 bytes, available 524288 bytes"
    ) as caught:
        store.reserve(key="b", nbytes=600 << 10)
    assert caught.value.errno == errno.ENOSPC
    assert store.keys() == ["a"]
    with pytest.raises(StoreFullError):
        store.reserve(key="a", nbytes=600 << 10)
    assert read(store, "a", 512 << 10) == b"a" * (512 << 10)


def test_a_full_and_fragmented_volume_still_holds_what_fits_in_pieces():
    store, _ = open_faulty(capacity_bytes=1 << 20)
    for name in "abcdefgh":
        write(store, name, name.encode() * (128 << 10)).wait()
    for name in "aceg":
        store.discard(key=name)
    content = bytes(range(256)) * (2 * 1024)
    write(store, "wide", content, shift=1).wait()
    assert read(store, "wide", len(content)) == content
    assert read(store, "wide", 200_000, offset=100_001, shift=9) == content[100_001:300_001]
    for name in "bdfh":
        assert read(store, name, 128 << 10) == name.encode() * (128 << 10)


def test_a_silent_device_is_reported_once_and_waited_for(capfd):
    faults = _core.MemoryFaults()
    store = open_store("(memory)", "memory", faults=faults, watchdog_seconds=0.05)
    faults.paused = True
    ticket = write(store, "slow", bytes(4096))
    while not store.stats()["stalls"]:  # as often as its test's timeout allows
        time.sleep(0.01)
    assert store.stats()["stalls"] == 1
    faults.paused = False
    ticket.wait()
    text = capfd.readouterr().err
    assert text.count("no answer from the device") == 1
    assert 'write of "slow" (4096 bytes at offset 0 in (memory)); still waiting' in text


def test_silence_is_an_error_once_the_program_ends():
    faults = _core.MemoryFaults()
    store = open_store("(memory)", "memory", faults=faults, watchdog_seconds=0.05)
    store.end_patience()
    write(store, "quick", bytes(4096)).wait()
    faults.paused = True
    ticket = write(store, "slow", bytes(4096))
    for wait in (ticket.wait, store.wait_all, store.close):
        with pytest.raises(StoreError, match="did not answer in time") as caught:
            wait()
        assert (caught.value.key, caught.value.errno) == ("slow", errno.ETIMEDOUT)
    faults.paused = False
    while not ticket.done():  # as often as its test's timeout allows
        time.sleep(0.01)
    ticket.wait()
    store.close()


def test_the_first_write_of_a_new_store_is_not_taken_for_silence(tmp_path):
    for _ in range(100):
        store = open_store(tmp_path, "threads")
        write(store, "k", bytes(4096)).wait()
        assert store.stats()["stalls"] == 0
        store.close()


def interrupt(wait):
    """Call what waits, and have Ctrl-C come; whoever catches it is there before."""
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    wait()


def test_ctrl_c_ends_the_closing_of_a_store_whose_device_is_silent(capfd):
    """Nothing waits for it again, neither the store's last owner nor the end of the process."""
    store, faults = open_faulty()
    faults.paused = True
    ticket = write(store, "k", bytes(4096))
    for wait in (store.wait_all, store.close):
        with pytest.raises(KeyboardInterrupt):
            interrupt(wait)
    began = time.monotonic()
    del store, ticket
    gc.collect()
    assert time.monotonic() - began < 5
    faults.paused = False


WAITS = {
    "for a transfer": lambda store, ticket: ticket.wait(),
    "for all": lambda store, ticket: store.wait_all(),
    "to give a key another size": lambda store, ticket: store.reserve(key="k", nbytes=8192),
    "to write a key of another size": lambda store, ticket: write(store, "k", bytes(8192)),
    "to discard a key": lambda store, ticket: store.discard(key="k"),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_signal_ends_a_wait_for_a_silent_device(wait):
    store, faults = open_faulty()
    faults.paused = True
    ticket = write(store, "k", bytes(range(256)) * 16)
    used = store.stats()["used_bytes"]
    with pytest.raises(KeyboardInterrupt):
        interrupt(lambda: wait(store, ticket))
    assert not ticket.done()
    faults.paused = False
    ticket.wait()
    assert read(store, "k", 4096) == bytes(range(256)) * 16
    assert store.stats()["used_bytes"] == used
    store.close()


def test_a_signal_handler_may_close_the_store_that_its_thread_waits_for():
    store, faults = open_faulty()
    write(store, "k", bytes(4096)).wait()
    faults.paused = True
    ticket = write(store, "k", bytes(4096))

    def close(number, frame):
        faults.paused = False
        store.close()

    before = signal.signal(signal.SIGALRM, close)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(ValueError, match="closed"):
            store.reserve(key="k", nbytes=8192)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ticket.done()
