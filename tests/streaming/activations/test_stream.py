"""Storages go to the drive while more is saved, and come back, whatever happens in between."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress

import pytest
import torch

from memascend.errors import HostMemoryError, StoreError, StoreFullError
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import MemoryFaults
from memascend.streaming.activations.copies import Copies
from memascend.streaming.activations.records import Activation, State
from memascend.streaming.activations.stream import ActivationStream
from tests.support.activation_streams import (
    WAIT_S,
    InOrder,
    activation_stream,
    keys,
    numbers,
    wait_until,
)

NBYTES = numbers(0).nbytes


def put_all(stream: ActivationStream, count: int) -> list[Activation]:
    return [stream.put(numbers(seed)) for seed in range(count)]


def stored(count: int) -> tuple[MemoryFaults, ActivationStream, list[Activation]]:
    """A stream with all but the last on the drive, and what its drive does wrong."""
    faults = MemoryFaults()
    stream = activation_stream(faults)
    saved = put_all(stream, count)
    stream.drain()
    return faults, stream, saved


def take_all(stream: ActivationStream, saved: list[Activation]) -> None:
    for one in reversed(saved):
        stream.take(one)


def value(stream: ActivationStream, activation: Activation) -> torch.Tensor:
    found = stream.take(activation).view(torch.float32).clone()
    stream.release(activation)
    return found


def test_a_device_that_cannot_be_made_current_is_an_error_of_what_was_saved() -> None:
    def refuse() -> None:
        raise RuntimeError("no such device")

    stream = activation_stream(use_device=refuse)
    saved = put_all(stream, 2)
    with pytest.raises(RuntimeError, match="no such device"):
        stream.drain()
    assert torch.equal(value(stream, saved[0]), numbers(0))  # it stayed on the device


def test_a_device_that_fails_between_jobs_ends_every_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dropped read-ahead storage is waited for by the thread, and CUDA reports an old error."""
    fails = threading.Event()

    class Failing(InOrder):
        def synchronize(self) -> None:
            if fails.is_set():
                raise RuntimeError("the device is lost")
            super().synchronize()

    monkeypatch.setattr(Copies, "stream_here", lambda self, device: None)
    stream = activation_stream(new_event=Failing)
    saved: list[Activation | None] = [*put_all(stream, 6)]
    stream.drain()
    stream.take(saved[4])  # type: ignore[arg-type]
    stream.drain()  # the one before it is read ahead
    begins, goes_on = threading.Event(), threading.Event()
    discard = stream._discard_garbage

    def wait() -> None:
        begins.set()
        assert goes_on.wait(WAIT_S)
        discard()

    monkeypatch.setattr(stream, "_discard_garbage", wait)
    told: list[Exception] = []

    def take() -> None:
        try:
            stream.take(saved[0])  # type: ignore[arg-type]
        except RuntimeError as error:
            told.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert begins.wait(WAIT_S)
    fails.set()
    saved[3] = None
    gc.collect()
    goes_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "the device is lost" in str(told)
    fails.clear()


@pytest.mark.parametrize("order", ["backward", "forward"])
def test_all_come_back_in_any_order_and_leave_nothing(order: str) -> None:
    stream = activation_stream()
    saved = dict(enumerate(put_all(stream, 9)))
    for seed in sorted(saved, reverse=order == "backward"):
        assert torch.equal(value(stream, saved.pop(seed)), numbers(seed))
    assert stream.count == 0
    assert keys(stream) == []
    traffic = stream.traffic
    assert (traffic.count, traffic.saved_bytes) == (9, 9 * NBYTES)
    # Some are taken before they are written, or while they are; one always waits.
    assert 0 < traffic.read_bytes <= traffic.written_bytes <= 8 * NBYTES


def test_what_waits_on_the_device_is_taken_where_it_is() -> None:
    stream = activation_stream(device_bytes=NBYTES)
    tensors = [numbers(0), numbers(1)]
    saved = [stream.put(tensor) for tensor in tensors]
    stream.drain()
    assert [stream.take(one).data_ptr() for one in saved] == [t.data_ptr() for t in tensors]
    assert stream.traffic.written_bytes == 0


def test_no_more_is_on_the_device_than_may_be() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults, device_bytes=NBYTES)
    saved: list[Activation] = []
    faults.paused = True
    thread = threading.Thread(target=lambda: saved.extend(put_all(stream, 6)))
    thread.start()
    wait_until(lambda: stream.traffic.device_bytes_peak == 3 * NBYTES)
    thread.join(0.1)
    assert thread.is_alive()  # the fourth waits for the drive
    assert stream.traffic.count == 3
    faults.paused = False
    thread.join()
    assert stream.traffic.device_bytes_peak == 3 * NBYTES
    for seed in reversed(range(6)):
        assert torch.equal(value(stream, saved.pop()), numbers(seed))


def test_room_that_the_largest_took_with_it_is_made() -> None:
    stream = activation_stream()
    saved = [stream.put(numbers(0, 5000)), *(stream.put(numbers(seed, 500)) for seed in range(9))]
    stream.drain()
    del saved[0]  # until now so many small ones could wait as it had bytes
    thread = threading.Thread(target=lambda: saved.append(stream.put(numbers(9, 500))), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    stream.drain()
    assert stream._saved.held_bytes == 500 * 4


def test_the_next_ones_are_read_ahead_within_their_share_of_the_device() -> None:
    stream = activation_stream()
    saved = put_all(stream, 8)
    stream.drain()
    stream.take(saved[7])
    stream.drain()
    there = [one.record.data is not None for one in saved]
    assert there == [False] * 5 + [True] * 3  # the last was never written
    assert stream.traffic.read_bytes == 2 * NBYTES
    stream.take(saved[6])
    stream.drain()
    assert stream.traffic.read_bytes == 3 * NBYTES


def test_less_is_read_ahead_while_a_slow_drive_has_not_taken_what_was_saved() -> None:
    faults, stream, saved = stored(6)
    faults.paused = True
    saved.append(stream.put(numbers(6)))
    wait_until(lambda: saved[5].record.state is State.WRITING)
    stream.take(saved[6])
    there = [one.record.data is not None for one in saved]
    assert there == [False] * 4 + [True] * 3  # the one read ahead, the one on its way, in use
    faults.paused = False
    stream.release(saved[6])
    for seed in reversed(range(7)):
        assert torch.equal(value(stream, saved.pop()), numbers(seed))


def test_it_can_be_taken_again_after_it_was_let_go() -> None:
    stream = activation_stream()
    saved = put_all(stream, 5)
    for _ in range(3):
        for seed in reversed(range(5)):
            assert torch.equal(value(stream, saved[seed]), numbers(seed))
    saved.append(stream.put(numbers(5)))
    assert torch.equal(value(stream, saved[5]), numbers(5))


def test_what_two_let_go_is_counted_once() -> None:
    stream = activation_stream(device_bytes=NBYTES)
    saved = put_all(stream, 2)
    for then in (stream.take, stream.take, stream.release, stream.release):
        then(saved[0])
    assert stream._saved.held_bytes == 2 * NBYTES
    saved.clear()
    assert (stream.count, stream._saved.held_bytes) == (0, 0)


def test_a_dropped_graph_gives_everything_back_at_any_moment() -> None:
    faults, stream, saved = stored(5)
    assert len(keys(stream)) > 0
    faults.paused = True
    saved.append(stream.put(numbers(5)))  # the one before is being written
    wait_until(lambda: saved[4].record.state is State.WRITING)
    stream.take(saved[5])
    states = {one.record.state for one in saved}
    assert states == {State.TAKEN, State.WRITING, State.PREFETCHING, State.STORED}
    saved.clear()
    gc.collect()
    faults.paused = False
    assert keys(stream) == []
    assert stream.count == 0
    assert torch.equal(value(stream, stream.put(numbers(9))), numbers(9))
    assert stream.count == 0
    assert (stream._saved.held_bytes, stream._saved.ahead_bytes) == (0, 0)


def test_a_broken_drive_is_told_to_whoever_comes_next_and_nobody_hangs() -> None:
    faults, stream, saved = stored(4)
    faults.gone = 5
    with pytest.raises(StoreError):
        saved += put_all(stream, 9)
    with pytest.raises(StoreError):
        take_all(stream, saved)
    faults.gone = 0
    with suppress(StoreError):  # of one that was still on its way
        stream.drain()
    # Those who held on to what could not be written keep no one waiting.
    later = put_all(stream, 5)
    for seed in reversed(range(5)):
        assert torch.equal(value(stream, later[seed]), numbers(seed))


def test_a_full_drive_is_told_and_loses_nothing_that_is_on_the_device() -> None:
    stream = activation_stream(MemoryFaults(capacity_bytes=NBYTES))
    with pytest.raises(StoreFullError):
        put_all(stream, 40)
    stream.drain()
    assert keys(stream) == []


def test_more_activations_than_there_is_memory_for_checksums_are_refused_with_the_remedy() -> None:
    arena = HostAllocator(lock=False, limit_bytes=4096)
    stream = activation_stream(verify="reads", checksum_memory=arena.core)
    told = "activations: 0 B of them .*host memory limit reached.*memascend.host_memory_limit"
    with pytest.raises(HostMemoryError, match=told) as caught:
        put_all(stream, 40)
    assert caught.value.__context__ is None  # whose frames have the bytes on the device
    stream.drain()
    assert keys(stream) == []


def test_what_was_lost_with_a_dropped_graph_is_nobodys_error() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults)
    faults.paused = True
    saved = [stream.put(numbers(seed, 1000)) for seed in range(2)]
    wait_until(lambda: saved[0].record.state is State.STORED)  # as far as the device knows
    faults.gone = 5
    saved.clear()
    faults.paused = False
    stream.drain()
    faults.gone = 0
    assert torch.equal(value(stream, stream.put(numbers(3))), numbers(3))


def test_what_could_not_be_copied_leaves_no_space_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = activation_stream()

    def fail(**_: object) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(stream.slots, "write", fail)
    saved = put_all(stream, 2)
    with pytest.raises(RuntimeError, match="no copy"):
        stream.drain()
    assert torch.equal(value(stream, saved[0]), numbers(0))
    saved.clear()
    assert keys(stream) == []


def test_an_error_of_the_device_while_slots_are_written_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = activation_stream()

    def fail() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(stream.slots, "wait_writes", fail)
    saved = put_all(stream, 2)
    stream.close()  # waits for the thread
    with pytest.raises(RuntimeError, match="no device"):
        stream.take(saved[1])


def test_an_error_keeps_nothing_that_was_to_be_saved() -> None:
    stream = activation_stream()
    tensor = numbers(0)
    found = weakref.ref(tensor)
    stream._errors["another"] = StoreError(5, "lost")
    with suppress(StoreError):
        stream.put(tensor)
    del tensor
    assert found() is None


def test_a_read_that_failed_is_tried_again_by_whoever_tries_again() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults)
    saved = put_all(stream, 3)
    stream.drain()
    faults.gone = 5
    for _ in range(2):
        with pytest.raises(StoreError):
            stream.take(saved[0])
    faults.gone = 0
    assert torch.equal(value(stream, saved[0]), numbers(0))


def test_two_who_wait_for_a_read_that_fails_are_both_told() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults)
    saved = put_all(stream, 3)
    stream.drain()
    faults.paused = True
    errors: list[type[Exception]] = []

    def take() -> None:
        try:
            stream.take(saved[0])
        except Exception as error:
            errors.append(type(error))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: saved[0].record.state is State.READING)
    for thread in threads:
        thread.join(0.1)  # so that both wait
    faults.gone = 5
    faults.paused = False
    for thread in threads:
        thread.join()
    assert errors == [StoreError, StoreError]


def test_a_key_is_discarded_only_when_the_store_has_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = activation_stream(new_event=InOrder)
    late: list[str] = []
    discard = stream._discard_garbage

    def look_and_discard() -> None:
        late.extend(one.key for one in stream.slots._writes if not one.is_submitted)
        discard()

    monkeypatch.setattr(stream, "_discard_garbage", look_and_discard)
    saved = put_all(stream, 4)
    stream.drain()
    assert late == []
    assert len(saved) == 4


def test_copies_are_over_before_memory_goes_that_nobody_got() -> None:
    stream = activation_stream(new_event=InOrder)
    saved = put_all(stream, 4)
    stream.drain()
    stream._errors["another"] = StoreError(5, "lost")
    with suppress(StoreError):
        stream.take(saved[0])
    filled = saved[0].record.filled
    assert isinstance(filled, InOrder)
    assert not filled.query()
    saved.clear()
    assert stream.count == 0
    assert filled.query()


def test_what_was_modified_before_it_was_written_is_refused() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults, device_bytes=2 * NBYTES)
    tensor = numbers(0)
    waiting = stream.put(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stream.take(waiting)


def test_what_was_modified_while_it_was_written_is_refused_every_time() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults)
    faults.paused = True
    tensor = numbers(0)
    saved = [stream.put(tensor), stream.put(numbers(1))]
    wait_until(lambda: saved[0].record.state is State.WRITING)
    tensor.add_(1)
    faults.paused = False
    stream.drain()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stream.take(saved[0])
    saved.clear()
    assert (stream.count, stream._saved.held_bytes) == (0, 0)


def test_what_was_modified_while_it_was_used_and_written_is_refused_when_taken_again() -> None:
    faults = MemoryFaults()
    stream = activation_stream(faults)
    faults.paused = True
    tensor = numbers(0)
    saved = [stream.put(tensor), stream.put(numbers(1))]
    wait_until(lambda: saved[0].record.state is State.WRITING)
    stream.take(saved[0])
    tensor.add_(1)
    faults.paused = False
    stream.drain()
    stream.release(saved[0])
    saved += [stream.put(numbers(2)), stream.put(numbers(3))]
    stream.drain()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stream.take(saved[0])
    saved.clear()
    assert keys(stream) == []
    assert (stream.count, stream._saved.held_bytes) == (0, 0)


def test_a_closed_stream_has_no_thread() -> None:
    stream = activation_stream()
    saved = put_all(stream, 4)
    [worker] = stream._thread._threads
    stream.close()
    assert not worker.is_alive()
    assert len(saved) == 4
