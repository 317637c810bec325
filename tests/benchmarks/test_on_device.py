"""What the training program does on a device, as far as it can be tried without one."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")


import gpu_machine
import on_device


@pytest.fixture
def ballast(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What fills the device; that of a host cannot be filled."""
    filled = [torch.zeros(1)]
    monkeypatch.setattr(on_device, "_ballast", lambda: filled)
    return filled


def refuse() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_refusal_is_counted_and_the_device_is_empty_afterwards(
    ballast: list[torch.Tensor],
) -> None:
    assert on_device.crowded(refuse) == 1
    assert ballast == []


def test_a_pass_that_found_room_is_no_trial(ballast: list[torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match="full"):
        on_device.crowded(lambda: None)
    assert ballast == []


def test_other_errors_are_not_taken_for_a_refusal(ballast: list[torch.Tensor]) -> None:
    with pytest.raises(ZeroDivisionError):
        on_device.crowded(lambda: 1 // 0)
    assert ballast == []


def test_a_device_is_filled_in_ever_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    room = [(1 << 30) + (65 << 20) + (1 << 10)]

    def empty(nbytes: int, **_: object) -> int:
        if nbytes > room[0]:
            refuse()
        room[0] -= nbytes
        return nbytes

    monkeypatch.setattr(torch, "empty", empty)
    assert on_device._ballast() == [1 << 30, 64 << 20]
    assert room[0] < min(on_device.BALLAST_BYTES)


class Driver:
    """A driver of three devices, some of which this process has a context on."""

    def __init__(self, *active: int, code: int = 0) -> None:
        self._active, self._code = active, code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def cuDevicePrimaryCtxGetState(self, number: int, flags: Any, is_active: Any) -> int:
        is_active._obj.value = number in self._active
        return self._code


def test_contexts_are_those_that_the_driver_calls_active() -> None:
    assert on_device.contexts(Driver()) == []
    assert on_device.contexts(Driver(0, 2)) == [0, 2]
    with pytest.raises(RuntimeError, match="CUDA error 3"):
        on_device.contexts(Driver(0, code=3))


def test_the_host_peak_is_that_since_the_last_call() -> None:
    device, nbytes = on_device.OnDevice(), 64 << 20
    device.take_host_peak()
    before = device.take_host_peak()
    # Not through malloc, which may keep freed memory: tests before this one have set it.
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE) as memory:
        memory[:: mmap.PAGESIZE] = b"1" * (nbytes // mmap.PAGESIZE)
    assert device.take_host_peak() - before > nbytes / 2
    assert device.take_host_peak() - before < nbytes / 2


def test_more_devices_than_there_are_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="3"):
        gpu_machine.look(tmp_path, gpus=3)


def test_a_machine_without_devices_is_told_as_one(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    machine = gpu_machine.look(tmp_path, gpus=1)
    assert (machine.gpus, machine.device_bytes) == (0, 0)
    assert machine.drive_bytes > 0
    assert 0 < machine.host_bytes <= machine.total_bytes
