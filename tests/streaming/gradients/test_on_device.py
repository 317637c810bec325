"""Gradients that wait on the device: in order, within their bytes, and errors reach the caller."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memascend.base.interfaces import Device
from memascend.errors import StoreError
from memascend.memory.guard import Guard
from memascend.streaming.gradients.on_device import GradientsOnDevice
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.streaming_fakes import LateDevice

WAIT_S = 60.0
NUMEL, NBYTES = 1024, 4096


def gradient(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), float(value))


class Stored:
    """What the thread has stored. It waits while the gate is closed."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.gate = threading.Event()
        self.error: Exception | None = None

    def store(self, one: torch.Tensor) -> None:
        assert self.gate.wait(WAIT_S)
        assert threading.current_thread().name.startswith("memascend-gradients")
        if self.error is not None:
            raise self.error
        self.values.append(one[0].item())


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def waiting(stored: Stored) -> Iterator[GradientsOnDevice]:
    device = Device(new_stream=lambda: nullcontext)
    found = GradientsOnDevice(device, Guard(threading.RLock()))
    found.room_bytes = 2 * NBYTES
    yield found
    stored.gate.set()
    found.close()


def test_the_room_is_granted_only_while_no_gradient_waits_and_counts_at_the_peak(
    waiting: GradientsOnDevice, stored: Stored
) -> None:
    assert not waiting.grant(2 * NBYTES + 1)
    assert waiting.bytes_peak == 0
    assert waiting.grant(2 * NBYTES)
    assert waiting.bytes_peak == 2 * NBYTES
    assert waiting.put(gradient(1), stored.store)
    assert not waiting.grant(1)


def test_the_queue_changes_under_the_lock_alone(waiting: GradientsOnDevice, stored: Stored) -> None:
    """A hook that looks for what is stored would otherwise remove a gradient that waits."""

    class Watched(deque[Any]):
        def append(self, one: Any) -> None:
            assert waiting._guard.is_held()
            super().append(one)

        def popleft(self) -> Any:
            assert waiting._guard.is_held()
            return super().popleft()

        def remove(self, one: Any) -> None:
            assert waiting._guard.is_held()
            super().remove(one)

    waiting._waiting = Watched()
    stored.gate.set()
    for value in range(4):
        assert waiting.put(gradient(value), stored.store)
    waiting.wait()
    assert waiting.is_quiet()
    assert stored.values == [0.0, 1.0, 2.0, 3.0]


def test_a_hook_goes_on_while_its_gradient_waits(
    waiting: GradientsOnDevice, stored: Stored
) -> None:
    reused = gradient(1.0)
    assert waiting.put(reused, stored.store)
    reused.fill_(2.0)  # DeepSpeed fills its bucket again
    assert waiting.put(reused, stored.store)
    assert (stored.values, waiting.held_bytes, waiting.is_quiet()) == ([], 2 * NBYTES, False)
    stored.gate.set()
    waiting.wait()
    assert (stored.values, waiting.held_bytes, waiting.is_quiet()) == ([1.0, 2.0], 0, True)


def test_without_room_a_hook_waits_until_the_oldest_is_stored(
    waiting: GradientsOnDevice, stored: Stored
) -> None:
    for number in range(2):
        waiting.put(gradient(number), stored.store)
    hook = threading.Thread(target=waiting.put, args=(gradient(2), stored.store))
    hook.start()
    hook.join(0.05)
    assert hook.is_alive()
    stored.gate.set()
    hook.join(WAIT_S)
    waiting.wait()
    assert stored.values == [0, 1, 2]
    assert waiting.bytes_peak == 2 * NBYTES


@pytest.mark.parametrize("new_stream", [None, lambda: nullcontext])
def test_what_does_not_fit_is_left_to_the_hook_in_order(
    new_stream: Callable[[], type[nullcontext[None]]] | None, stored: Stored
) -> None:
    """On the CPU, where there are no streams, that is every gradient."""
    waiting = GradientsOnDevice(Device(new_stream=new_stream), Guard(threading.RLock()))
    waiting.room_bytes = 2 * NBYTES
    stored.gate.set()
    took = waiting.put(gradient(1.0), stored.store)
    assert not waiting.has_room(3 * NBYTES)
    assert not waiting.put(torch.zeros(3 * NUMEL), stored.store)
    assert stored.values == [1.0] * took == [1.0] * (new_stream is not None)
    waiting.close()


def test_an_error_reaches_every_later_hook_until_the_pass_is_dropped(
    waiting: GradientsOnDevice, stored: Stored
) -> None:
    stored.error = StoreError(5, "cannot write gradient.0_1.0.0")
    for number in range(2):
        waiting.put(gradient(number), stored.store)
    stored.gate.set()
    waiting.wait()
    stored.error = None
    for _ in range(2):
        with pytest.raises(StoreError, match=r"gradient\.0_1"):
            waiting.put(gradient(2), stored.store)
        with pytest.raises(StoreError, match=r"gradient\.0_1"):
            waiting.check()
    assert stored.values == []  # also the one behind it: its pass has failed
    waiting.abandon()
    waiting.check()
    waiting.put(gradient(3), stored.store)
    waiting.wait()
    assert stored.values == [3]


def test_abandoned_gradients_are_not_stored(waiting: GradientsOnDevice, stored: Stored) -> None:
    for number in range(2):
        waiting.put(gradient(number), stored.store)
    abandoning = threading.Thread(target=waiting.abandon)
    abandoning.start()
    while not waiting._is_dropping:
        abandoning.join(0.001)
    stored.gate.set()
    abandoning.join(WAIT_S)
    assert (stored.values, waiting.held_bytes) == ([0], 0)


def test_without_device_memory_the_hooks_store_from_then_on(
    waiting: GradientsOnDevice,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    stored.gate.set()
    waiting.put(gradient(0), stored.store)
    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    with caplog.at_level(logging.WARNING):
        assert not waiting.put(gradient(1), stored.store)
    assert (stored.values, waiting.is_quiet(), waiting.has_room(1)) == ([0], True, False)
    assert "memascend.streaming.gradients.device_bytes" in caplog.text


def test_memory_is_kept_until_the_copies_of_the_thread_are_over(stored: Stored) -> None:
    """They are issued when `store` returns, and the device may come to them later."""
    late = LateDevice()
    device = Device(new_stream=lambda: nullcontext, new_event=lambda: Passing(late))
    waiting = GradientsOnDevice(device, Guard(threading.RLock()))
    waiting.room_bytes = NBYTES
    target = torch.zeros(NUMEL)
    waiting.put(gradient(5.0), lambda one: late.issue(lambda: target.copy_(one)))
    waiting.wait()
    assert bool((target == 5.0).all())
    waiting.close()


class Passing:
    """An event of the late device for which a stream may wait, too."""

    def __init__(self, device: LateDevice) -> None:
        self._event = device.new_event()

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self._event.synchronize()


def test_with_the_lock_nothing_is_waited_for(waiting: GradientsOnDevice, stored: Stored) -> None:
    """The thread may need it."""
    waiting.put(gradient(0), stored.store)
    with waiting._guard.lock, pytest.raises(AssertionError, match="lock"):
        waiting.wait()


def test_the_thread_itself_sees_no_gradient_that_waits(
    waiting: GradientsOnDevice, stored: Stored
) -> None:
    """It may call methods that wait for it on any other thread."""
    quiet: list[bool] = []
    waiting.put(gradient(0), lambda _: quiet.append(waiting.is_quiet()) or waiting.wait())
    waiting.wait()
    assert quiet == [True]


@each_stride(5)
def test_after_ctrl_c_at_any_line_the_next_pass_is_whole(stride: int) -> None:
    waiting: list[GradientsOnDevice] = []
    values: list[float] = []

    def store(one: torch.Tensor) -> None:
        values.append(one[0].item())

    def work() -> None:
        for number in range(3):
            waiting[-1].put(gradient(number), store)
        waiting[-1].wait()
        waiting[-1].abandon()

    def make() -> Callable[[], object]:
        device = Device(new_stream=lambda: nullcontext)
        waiting.append(GradientsOnDevice(device, Guard(threading.RLock())))
        waiting[-1].room_bytes = 2 * NBYTES
        return work

    for _ in interruptions(make, stride):
        one = waiting[-1]
        one.abandon()
        values.clear()
        for number in (7.0, 8.0, 9.0):
            assert one.put(gradient(number), store)
        one.wait()
        one.check()
        assert (values, one.held_bytes, one.is_quiet()) == ([7.0, 8.0, 9.0], 0, True)
        assert not one._guard.is_held()
        one.close()
